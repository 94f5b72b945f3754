"""Group sequence policy optimisation with an advantage of each token."""

from __future__ import annotations

from agentrl.algo.losses.gspo import Gspo


class GspoToken(Gspo):
    """The loss of ``gspo`` in which each token has its own advantage (arXiv:2507.18071, equation 13)."""

    one_advantage_per_sequence = False
