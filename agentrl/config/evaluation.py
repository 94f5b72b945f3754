"""The ``eval`` section: sets of tasks and their sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, SerializationInfo, field_serializer, field_validator

from agentrl.config.base import Section
from agentrl.config.sampler import TopK


class EvalSet(Section):
    """One set of tasks and its sampling parameters. Keys that a set under ``eval.sets`` does not set are those of ``eval``."""

    source: str | None = None
    """In a mixed run, the source whose environment, reward and limits the set has; without one, all are evaluated (see
    ``eval.sets``)."""
    split: str | None = None
    """The split; without one ``tasks.eval_split``."""
    path: Path | None = None
    """A file of prompts in place of a split; the section ``data`` has its columns."""
    size: PositiveInt | None = None
    """Number of tasks, from the start of the split; without it, all."""
    n_samples: PositiveInt = 1
    """Episodes per task; pass@k is reported for powers of two up to it."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: TopK = -1
    """Top-k sampling; -1 keeps all."""
    max_new_tokens: PositiveInt | None = None
    """Maximum tokens of a turn; without it, ``sampler.max_new_tokens``."""
    pass_reward: float = 1.0
    """A sample passes (pass@k) if its reward is at least this."""
    group_by: str | None = None
    """A key of the tasks' metadata, such as ``hops``: metrics are also reported for each of its values."""


class EvalConfig(EvalSet):
    """How to evaluate."""

    sets: dict[str, EvalSet] = Field(default_factory=dict)
    """Several sets by name; without any, this section is the only set, or in a mixed run one for each source. A ``size`` or
    ``group_by`` from here is ignored by sets with fewer tasks or without that key."""

    function: str | None = None
    """A function that evaluates the policy in place of the sets, or runs them too: ``module:function`` or ``FILE.py:function`` of
    an ``async def evaluate(policy)`` that returns metrics (slime's ``eval_function_path``). docs/how_to/own_functions.md."""
    save_rollouts: bool = False
    """Keep the rollouts of evaluations in training, one file each: ``rollouts/eval_000012.jsonl`` is that after step 12."""
    background: bool = False
    """Continue training while an evaluation runs. On the engines of training, its tokens that are sampled after the next weight
    sync have newer weights: ``eval/lag_mean`` and ``eval/lag_max``. Engines that only evaluate are a group of ``sampler.groups``;
    ``placement.mode=colocate`` needs them."""

    @field_validator("sets")
    @classmethod
    def _names(cls, sets: dict[str, EvalSet]) -> dict[str, EvalSet]:
        for name in sets:
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(
                    f"the set's name {name!r} becomes part of eval/<set>/<metric>: letters, digits, _ - . only"
                )
        return sets

    @field_serializer("sets")
    def _as_given(self, sets: dict[str, EvalSet], info: SerializationInfo) -> dict[str, Any]:
        """Write only the keys that each set sets, so that the others are still those of ``eval`` after reading back."""
        mode: Literal["json", "python"] = "json" if info.mode_is_json() else "python"
        return {name: eval_set.model_dump(mode=mode, exclude_unset=True) for name, eval_set in sets.items()}

    def named_sets(self, sources: Collection[str] = ()) -> dict[str, EvalSet]:
        """Return each set with the keys it does not set filled in from this section. The set without a name is ``""``.

        Args:
            sources: of a mixed run, which has a set for each if none is configured.
        """
        defaults = self.model_dump(exclude=set(EvalConfig.model_fields) - set(EvalSet.model_fields))
        if not self.sets and sources and self.source is None:
            return {name: EvalSet(**defaults | {"source": name}) for name in sources}
        if not self.sets:
            return {"": EvalSet(**defaults)}
        return {name: EvalSet(**_fill_from_defaults(eval_set, defaults)) for name, eval_set in self.sets.items()}


def _fill_from_defaults(eval_set: EvalSet, defaults: dict[str, Any]) -> dict[str, Any]:
    set_values = eval_set.model_dump(exclude_unset=True)
    if set_values.get("split") is not None or set_values.get("path") is not None:
        defaults = {**defaults, "split": None, "path": None}  # a set's own source replaces both keys
    return {**defaults, **set_values}
