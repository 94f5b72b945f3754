"""One rollout in the terminal, coloured by the provenance of its text."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from agentrl.core.types import Rollout
from agentrl.obs.console import TitledBlock

POLICY = "bold green"
OBSERVED = "cyan"
PROMPT = "dim"


def rollout_panel(rollout: Rollout, title: str) -> RenderableType:
    """Return a titled block: the prompt dim, what the policy sampled green, what it observed cyan."""
    text = Text()
    text.append(rollout.prompt.strip() + "\n", PROMPT)
    for turn in rollout.turns:
        text.append(turn.action, POLICY)
        if turn.observation:
            text.append(turn.observation, OBSERVED)
    legend = Text.assemble(
        ("prompt", PROMPT), "  ", ("sampled by the policy, trained on", POLICY), "  ", ("observed, masked", OBSERVED)
    )
    metrics = "  ".join(f"{key} {value:g}" for key, value in sorted(rollout.metrics.items()))
    end = Text(f"reward {rollout.reward:g}  {rollout.stop_reason.value}  {metrics}", "yellow")
    return TitledBlock(title, text, Text(), end, legend)
