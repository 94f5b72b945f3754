"""Folders of the policies shipped with this taskset; ``make_policy`` and the SFT configurations make them again."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "policies"

WARM = _FOLDER / "warm"
"""Knows the protocol, and mostly stops searching too early: the start of ``configs/search_r1/cpu.yaml``."""
DISCOVER = _FOLDER / "discover"
"""Was shown solutions of one hop only, and random walks: the start of ``configs/search_r1/cpu_discover.yaml``."""
