"""Folders of the policies shipped with this taskset.

They were made by ``make_policy`` and then ``--config search_r1/sft_base``, ``sft_warm.yaml`` and
``sft_discover.yaml`` on one H200, in 265, 67 and 259 seconds, and from the last ``sft_detour.yaml`` on two cores in a
quarter of an hour; `make policies` makes them again.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent / "policies"

WARM = _FOLDER / "warm"
"""Follows the protocol, but mostly stops searching too early: the start of ``--config search_r1/cpu``."""
DISCOVER = _FOLDER / "discover"
"""Has seen only solutions of one hop, some after an unnecessary search, and random walks: the start of
``--config search_r1/cpu_discover``."""
