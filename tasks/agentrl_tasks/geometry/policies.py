"""The folder of the policy shipped with this taskset; the README says how it was made."""

from pathlib import Path

WARM = Path(__file__).parent / "policies" / "warm"
"""Sees most of a picture, zooms on the right figure, and answers at random more than half of the time: the start of
``--config geometry/cpu``."""
