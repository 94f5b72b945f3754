"""Checks of judges and remote reward models, from their metrics."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.doctor.record import Finding, RunRecord, mean

RECENT = 20
"""Steps that are judged."""
FAILING = 0.1
"""Share of calls or rewards that fail, from which on it is a problem."""
AGREES = 0.6
"""Agreement below which a judge contradicts itself: 0.5 is what a judge of pairs has that prefers a position half of the time."""


def failing_judges(run: RunRecord) -> Iterator[Finding]:
    """Yield judges and rewards that fail, and judges that contradict themselves."""
    for prefix in _prefixes(run, "/failed_calls"):
        calls, failed_calls = (sum(run.recent(f"{prefix}/{name}", RECENT)) for name in ("calls", "failed_calls"))
        if failed_calls >= FAILING * max(calls, 1e-9):
            steps = len(run.steps[-RECENT:])
            share = f"{failed_calls / max(calls, 1e-9):.0%} of the calls in the last {steps} steps had no score"
            yield Finding(
                "problem",
                f"the judge {_name(prefix)} fails",
                (share, "samples without a score have no reward, and are dropped"),
                (
                    "`agentrl view RUN` shows the failures; of requests: reward.judge.endpoint.url and its key",
                    "of texts without a score: reward.judge.pattern, max_new_tokens, a template that says how to write it",
                ),
            )
    for key in _keys(run, "reward/", "/failed"):
        shares, name = run.recent(key, RECENT), key.removeprefix("reward/").removesuffix("/failed")
        judged = any(prefix.endswith(f"/{name}") for prefix in _prefixes(run, "/failed_calls"))
        if mean(shares) >= FAILING and not judged:
            evidence = (f"{key} is {mean(shares):.2f} over the last {len(shares)} steps: these samples are dropped",)
            yield Finding(
                "problem", f"the reward {name} fails", evidence, (f"reward.functions.{name}: its server or function",)
            )
    for prefix in {*_prefixes(run, "/agreement")} & {*_prefixes(run, "/failed_calls")}:
        agreement = run.recent(f"{prefix}/agreement", RECENT)
        if mean(agreement) < AGREES:
            yield Finding(
                "hint",
                f"the judge {_name(prefix)} contradicts itself",
                (f"{prefix}/agreement is {mean(agreement):.2f} over the last {len(agreement)} steps",),
                ("a larger model, a rubric with fewer questions, reward.judge.judgements for a mean of several",),
            )


def _keys(run: RunRecord, beginning: str, end: str) -> list[str]:
    return sorted(
        {key for row in run.steps[-RECENT:] for key in row if key.startswith(beginning) and key.endswith(end)}
    )


def _prefixes(run: RunRecord, end: str) -> list[str]:
    return [key.removesuffix(end) for key in _keys(run, "rollout/", end)]


def _name(prefix: str) -> str:
    return prefix.removeprefix("rollout/")
