"""The folder of the policy shipped with this taskset.

It was made by ``make_policy`` and then ``configs/python_math/sft_warm.yaml``; `make policies` makes it again.
"""

from pathlib import Path

WARM = Path(__file__).parent / "policies" / "warm"
"""Knows how to call the tool, and mostly guesses or slips: the start of ``configs/python_math/cpu.yaml``."""
