"""A plan as lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from agentrl.config.merging import Tree
from agentrl.planner.gpus import GIB, MACHINE
from agentrl.planner.layouts import micro_tokens
from agentrl.planner.plan import Option, Plan
from agentrl.planner.training_summary import FITS


def report(plan: Plan, configured: Tree) -> list[str]:
    """Return the lines of a plan.

    Args:
        plan: to show.
        configured: keys that are not repeated as keys to set.
    """
    gpus, config = plan.gpus, plan.config
    limit = FITS * gpus.bytes / GIB
    return [
        f"{'model':<13}{config.model.path}: {plan.numbers / 1e9:,.2f} billion weights",
        f"{'GPUs':<13}{gpus.count} of {gpus.bytes / GIB:.1f} GiB ({gpus.name}), of which a layout may need {limit:.1f}",
        f"{'tokens':<13}{micro_tokens(config):,} a micro-batch (batch.tokens_per_micro), rows of up to {config.max_tokens:,} "
        "(rollout.max_tokens)",
        *(line for option in plan.options for line in ("", *_option(option, plan, configured))),
    ]


def _option(option: Option, plan: Plan, configured: Tree) -> Iterator[str]:
    title = f"{option.backend}, {option.mode}, learner.ranks={option.learner_gpus}"
    yield f"{title}: {'does not fit' if option.faults else 'fits'}"
    yield from (f"  {'because':<12}{fault}" for fault in option.faults)
    if option.candidate is None:
        return
    memory = option.candidate.memory
    yield f"  {'learner':<12}{memory.total / GIB:.1f} GiB a GPU: {_parts(asdict(memory))}"
    if option.candidate.critic:
        yield f"  {'critic':<12}{option.candidate.critic / GIB:.1f} GiB a GPU, on as many GPUs"
    if (engines := option.engines) is not None:
        rows = engines.rows(plan.config.max_tokens)
        parts = _parts({"weights": engines.weights, "KV cache": max(0, engines.cache)})
        yield (
            f"  {'engines':<12}{engines.engines} with tp_size={engines.tensor}, GiB a GPU: {parts}: {engines.cache_tokens:,} "
            f"tokens or {rows:,} rows in an engine"
        )
    if option.at_sync:
        yield f"  {'weight sync':<12}{option.at_sync / GIB:.1f} GiB: learner at rest, a bucket, the engine's weights"
        offloaded = memory.weights + memory.optimizer + memory.reference + memory.critic
        count = min(MACHINE, option.learner_gpus)
        yield f"  {'main memory':<12}{count * offloaded / GIB:,.0f} GiB a machine, while engines sample"
    if keys := " ".join(_keys(option.settings or {}, configured)):
        yield f"  {'set':<12}{keys}"


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)


def _keys(tree: Tree, configured: Tree, prefix: str = "") -> Iterator[str]:
    """Yield settings as ``key=value``, without those that are given."""
    for name, value in tree.items():
        configured_value = configured.get(name) if isinstance(configured, dict) else None
        if isinstance(value, dict):
            yield from _keys(value, configured_value if isinstance(configured_value, dict) else {}, f"{prefix}{name}.")
        elif configured_value is None:
            yield f"{prefix}{name}={str(value).lower() if isinstance(value, bool) else value}"
