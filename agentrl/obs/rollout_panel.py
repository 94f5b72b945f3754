"""One rollout for a person to read, coloured by who made each part."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from agentrl.core.types import Rollout

POLICY = "bold green"
OBSERVED = "cyan"
PROMPT = "dim"


def rollout_panel(rollout: Rollout, title: str) -> RenderableType:
    """Return a panel: the prompt dim, what the policy sampled green, what it was answered cyan."""
    text = Text()
    text.append(rollout.prompt.strip() + "\n", PROMPT)
    for turn in rollout.turns:
        text.append(turn.action, POLICY)
        if turn.observation:
            text.append(turn.observation, OBSERVED)
    legend = Text.assemble(
        ("prompt", PROMPT), "  ", ("sampled by the policy, trained on", POLICY), "  ", ("observed, masked", OBSERVED)
    )
    figures = "  ".join(f"{key} {value:g}" for key, value in sorted(rollout.metrics.items()))
    end = Text(f"reward {rollout.reward:g}  {rollout.stop_reason.value}  {figures}", "yellow")
    return Panel(Group(text, Text(), end, legend), title=title, border_style="blue")
