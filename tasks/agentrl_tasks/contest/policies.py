"""The folder of the policy shipped with this taskset.

It was made by ``make_policy`` and then ``--config code_contest/sft_warm``; `make policies` makes it again.
"""

from pathlib import Path

WARM = Path(__file__).parent / "policies" / "warm"
"""Writes programs of two lines over one line of integers, most of them with a mistake: the start of
``--config code_contest/cpu``."""
