"""One rollout in the terminal, coloured by the provenance of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from agentrl.core.types import Provenance, Rollout
from agentrl.obs.console import TitledBlock

POLICY = "bold green"
OBSERVED = "cyan"
PROMPT = "dim"


def rollout_panel(rollout: Rollout, title: str, decode: Callable[[Sequence[int]], str]) -> RenderableType:
    """Return a titled block: the prompt dim, what the policy sampled green, what it observed cyan, turn markers included.

    Args:
        rollout: to show; its last row, which has the whole conversation unless it was rewritten.
        title: of the block.
        decode: returns the text of tokens.
    """
    text = Text()
    for row in rollout.rows[-1:]:
        sampled = row.provenance == Provenance.SAMPLED
        cuts = np.flatnonzero(np.diff(sampled, prepend=not sampled[0], append=not sampled[-1]))
        for start, stop in pairwise(cuts.tolist()):
            style = POLICY if sampled[start] else OBSERVED if start else PROMPT
            text.append(decode(row.token_ids[start:stop].tolist()), style)
    if not rollout.rows:
        text.append(rollout.prompt, PROMPT)
        for turn in rollout.turns:
            text.append(turn.action, POLICY)
            text.append(turn.observation, OBSERVED)
    legend = Text.assemble(
        ("prompt", PROMPT), "  ", ("sampled by the policy, trained on", POLICY), "  ", ("observed, masked", OBSERVED)
    )
    metrics = "  ".join(f"{key} {value:g}" for key, value in sorted(rollout.metrics.items()))
    end = Text(f"reward {rollout.reward:g}  {rollout.stop_reason.value}  {metrics}", "yellow")
    return TitledBlock(title, text, Text(), end, legend)
