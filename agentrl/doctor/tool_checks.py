"""What the metrics and prompts of a run say about its tools."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from agentrl.core.errors import UserError
from agentrl.core.registry import make_any_env
from agentrl.core.types import Rollout
from agentrl.doctor.record import RECENT, Finding, RunRecord, mean
from agentrl.obs.rollouts import rollout_files, scan_rollouts

PROMPTS = 8
"""Recorded prompts in which the environment's tools are looked for."""
FAILING = 0.3
"""From this share on failures of a tool are a problem."""
SLOW_TOOLS = 0.5
"""From this share of the slots' time on episodes wait for tools too long."""


def unread_tools(run: RunRecord) -> Iterator[Finding]:
    """Yield that the environment's tools are in no prompt: the chat template may have no place for them."""
    config, files = run.config, rollout_files(run.folder)
    if config.sources or config.rollout.loop is not None or not files:
        return
    try:
        tools = make_any_env(config.env.name, config.env.options).tools
        scanned = islice(scan_rollouts(files[max(files)]), PROMPTS)
        prompts = [scan.rollout.prompt for scan in scanned if isinstance(scan.rollout, Rollout) and scan.rollout.prompt]
    except UserError:
        return  # such as an environment that this machine does not have
    unread = [tool.name for tool in tools if not any(tool.name in prompt for prompt in prompts)]
    if prompts and unread:
        evidence = (
            f"none of the {len(prompts)} prompts that were read has {', '.join(unread)} of env.name={config.env.name}",
        )
        advice = (
            "render.tool_preamble=true describes them in the system message; render.chat_template=FILE may have a place for them",
        )
        yield Finding("problem", "the policy never reads its tools", evidence, advice)


def failing_tools(run: RunRecord) -> Iterator[Finding]:
    """Yield the tools that answer too few calls."""
    for name in _tool_names(run):
        calls = sum(run.recent(f"tool/{name}/calls", RECENT))
        share = _tool_total(run, name, "failed_share") / max(1.0, calls)
        if share >= FAILING:
            evidence = (f"{share:.0%} of {calls:.0f} calls of {name} in the last {len(run.steps[-RECENT:])} steps",)
            advice = (
                f"`agentrl view --steps` shows what {name} answers; run it by hand: it raises, times out or is killed",
                "the tool's timeout_s; sandbox.limits for code",
            )
            yield Finding("problem", "calls of a tool fail", evidence, advice)


def slow_tools(run: RunRecord) -> Iterator[Finding]:
    """Yield that episodes wait for tools most of the time, with the tool that takes the most of it."""
    idle_shares = run.recent("slot_idle/tools", RECENT)
    seconds = {name: _tool_total(run, name, "seconds") for name in _tool_names(run)}
    if not seconds or not idle_shares or mean(idle_shares) < SLOW_TOOLS:
        return
    slowest = max(seconds, key=lambda name: seconds[name])
    evidence = (
        f"slot_idle/tools is {mean(idle_shares):.2f} over the last {len(idle_shares)} steps",
        f"tool/{slowest}/seconds is {mean(run.recent(f'tool/{slowest}/seconds', RECENT)):.2f}; "
        f"{seconds[slowest] / max(1e-9, sum(seconds.values())):.0%} of the time in tools",
    )
    advice = (
        f"make {slowest} faster, or give its server more workers or machines (tools.{slowest}.url takes several)",
        "a larger rollout.concurrency, so that engines work meanwhile",
    )
    yield Finding("hint", "episodes wait for a tool most of the time", evidence, advice)


def _tool_total(run: RunRecord, name: str, metric: str) -> float:
    """Return the sum of a metric that is a mean over a tool's calls, over its calls of the last steps."""
    calls, value = f"tool/{name}/calls", f"tool/{name}/{metric}"
    return sum(row.get(calls, 0.0) * row.get(value, 0.0) for row in run.steps[-RECENT:])


def _tool_names(run: RunRecord) -> list[str]:
    """Return the names of the tools that were called in the last steps."""
    keys = {key for row in run.steps[-RECENT:] for key in row if key.startswith("tool/") and key.endswith("/calls")}
    return sorted(key.removeprefix("tool/").removesuffix("/calls") for key in keys)
