"""Folders of the policies shipped with this taskset.

Their recipe is ``make_policy`` and then ``configs/search_r1/sft_*.yaml``. The weights that lie here were not made by
``agentrl sft`` yet, but by a plain PyTorch loop over the same demonstrations with the same hyper-parameters: 3,932
steps for the base, 897 for the warm start, 3,848 for the discovery start. Its stages of the curriculum ended by
accuracy in place of steps, and its experts still found the right answer after a fault of format or query.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent / "policies"

WARM = _FOLDER / "warm"
"""Knows the protocol, and mostly stops searching too early: the start of ``configs/search_r1/cpu.yaml``."""
DISCOVER = _FOLDER / "discover"
"""Was shown solutions of one hop only, and random walks: the start of ``configs/search_r1/cpu_discover.yaml``."""
