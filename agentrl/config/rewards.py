"""The ``reward`` section: reward functions, remote reward models, judge models, and their weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from agentrl.config.base import Seconds, Section
from agentrl.config.sampler import check_sizes
from agentrl.config.services import ChatModelConfig, ServiceConfig
from agentrl.core.user_code import MAX_SECONDS

POLICY = "policy"
"""Value of ``judge.model``: the policy judges."""
REMOTE, JUDGE = "remote", "judge"
"""Values of ``reward.function`` for `RemoteRewardConfig` and `JudgeConfig`."""
PLACEHOLDER = re.compile(r"\{(question|answer|answer_a|answer_b|reference|rubric|low|high)\}")
"""What a judge's template may have."""


class RemoteRewardConfig(ServiceConfig):
    """A reward model behind an HTTP server, for ``function=remote``. docs/how_to/rewards.md has the format of requests."""

    batch_size: PositiveInt | None = 32
    """Most samples of a request, which has them in a list. Null: each request is one sample, not in a list, as servers for
    slime's ``remote_rm`` take it."""
    wait_s: float = Field(default=0.05, ge=0, le=MAX_SECONDS)
    """Longest time that a sample waits for others of its request, seconds."""


class JudgeConfig(Section):
    """A judge model, for ``function=judge``: it reads an answer and writes a score. docs/how_to/rewards.md."""

    endpoint: ChatModelConfig | None = None
    """The model, behind OpenAI's chat completions."""
    model: str | None = None
    """A model that an engine of the run serves, in place of ``endpoint``. ``policy``: the policy itself, by the run's engines
    with the weights of the moment. Otherwise a model as in ``model.path``, on its own engines."""
    engines: PositiveInt = 1
    """Engines of ``model``."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Options of SGLang for the engines of ``model``, such as ``{mem_fraction_static: 0.2}`` for engines on one GPU with the
    policy's with ``placement.mode=separate``. Added to those of ``sampler.sglang`` that are not about the policy's model, as
    ``load_format``, ``context_length`` and ``speculative_algorithm`` are."""
    gpus: Literal["shared", "own"] = "shared"
    """With ``placement.mode=colocate`` or ``disaggregate``: ``shared``: the engines of ``model`` are on the GPUs of the policy's,
    in turn with them. ``own``: they have further GPUs. With ``separate`` they have the GPUs after the policy's, as far as there
    are some."""
    mode: Literal["rubric", "reference", "pairwise"] = "rubric"
    """``rubric``: a score by ``rubric``. ``reference``: a score by comparison with the label. ``pairwise``: which of two answers
    is better; the reward is the share of comparisons won, a tie is a half."""
    against: Literal["group", "label"] = "group"
    """What ``pairwise`` compares an answer with: the other answers of its group, or the label."""
    swap: bool = True
    """Compare each pair in both orders, so that a preference for one position cancels out."""
    rubric: str = "The answer is correct, complete and to the point."
    """What a good answer is."""
    template: Path | None = None
    """File with the prompt, in place of the built-in one. ``{question}``, ``{answer}``, ``{reference}``, ``{rubric}``, ``{low}``
    and ``{high}`` are replaced; with ``pairwise`` ``{answer_a}`` and ``{answer_b}``."""
    system: str | None = None
    """System message."""
    pattern: str | None = None
    """Regular expression whose last match in the judge's text has the score, or the verdict ``A``, ``B`` or ``C`` (a tie), in its
    first group. Null: in double brackets, such as ``[[7]]``."""
    scale: list[float] = Field(default_factory=lambda: [0.0, 10.0])
    """Lowest and highest score, which become rewards of 0 and 1. A score outside of it is none."""
    answer: Literal["final", "response"] = "final"
    """What is judged: the last turn without its reasoning, or all turns with what was between them."""
    judgements: PositiveInt = 1
    """Judgements of an answer, or of a pair in each order; their mean counts."""
    tries: PositiveInt = 2
    """How often the judge is requested for one judgement until its text has a score. A request that fails, after the attempts of
    its client, is repeated as well if a reward needs several judgements."""
    check: str | None = None
    """A reward function, such as ``math``, with which the judge is compared: metric ``label_agreement``."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    max_new_tokens: PositiveInt = 1024
    """Most tokens of a judgement. One that ends there is none."""

    @model_validator(mode="after")
    def _has_one_model(self) -> JudgeConfig:
        if self.endpoint is None and self.model is None:
            raise ValueError("no judge: set endpoint.url and endpoint.model, or model")
        if self.endpoint is not None and self.model is not None:
            raise ValueError(
                f"endpoint.url={self.endpoint.url} and model={self.model} both name the judge; leave out one"
            )
        if self.model in (None, POLICY) and (self.engines > 1 or self.sglang):
            name = "engines" if self.engines > 1 else "sglang"
            raise ValueError(f"{name} is for a judge with engines of its own; set model to a model, or leave it out")
        if self.model in (None, POLICY) and self.gpus != "shared":
            raise ValueError(f"gpus={self.gpus} is for a judge with engines of its own; set model to a model")
        return self

    @field_validator("sglang")
    @classmethod
    def _sizes(cls, options: dict[str, Any]) -> dict[str, Any]:
        check_sizes(options)
        return options

    @field_validator("scale")
    @classmethod
    def _is_range(cls, scale: list[float]) -> list[float]:
        if len(scale) != 2 or scale[0] >= scale[1]:
            raise ValueError(f"{scale} is no lowest and a higher highest score, such as [0, 10]")
        return scale

    @field_validator("pattern")
    @classmethod
    def _has_group(cls, pattern: str | None) -> str | None:
        try:
            if pattern is not None and not re.compile(pattern).groups:
                raise ValueError(f"{pattern!r} has no group in round brackets around the score")
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return pattern

    @property
    def compares_group(self) -> bool:
        """Whether answers of a group are compared with each other."""
        return self.mode == "pairwise" and self.against == "group"

    @property
    def reads_label(self) -> bool:
        """Whether the judge, or what it is compared with, needs the label."""
        return (
            self.mode == "reference" or (self.mode == "pairwise" and self.against == "label") or self.check is not None
        )


class RewardFunctionConfig(Section):
    """What gives a reward, and what follows if it fails."""

    function: str | None = None
    """``module:function``, ``file.py:function``, or built in: exact_match, f1, numeric, math, dapo, deepscaler, gpqa, ifbench,
    code, squad_exact_match, squad_f1, environment; ``remote`` and ``judge`` have sections. docs/how_to/rewards.md."""
    key: str | None = None
    """The key of the reward if the function returns a mapping, ``score`` by default; the other keys become metrics."""
    on_error: Literal["stop", "drop", "score"] = "stop"
    """What follows when the function raises or returns no finite number: stop the run, drop the sample, or score it. Failures of
    services, judges, tools and sandboxes always drop it."""
    error_score: float = 0.0
    """The reward of such a sample with ``on_error=score``."""
    timeout_s: Seconds = 60.0
    """Timeout of a call of a function, seconds."""
    remote: RemoteRewardConfig | None = None
    """The server of ``function=remote``."""
    judge: JudgeConfig | None = None
    """The model of ``function=judge``."""

    @model_validator(mode="after")
    def _has_its_section(self) -> RewardFunctionConfig:
        for name, section in ((REMOTE, self.remote), (JUDGE, self.judge)):
            if self.function == name and section is None:
                setting = {REMOTE: "remote.url=http://HOST:PORT", JUDGE: "judge.endpoint"}[name]
                raise ValueError(f"function={name} needs the section {name}: set {setting}")
            if section is not None and self.function != name:
                raise ValueError(
                    f"{name} is set, and function={self.function or 'null'}; set function={name}, or leave out {name}"
                )
        return self


class WeightedRewardConfig(RewardFunctionConfig):
    """One of several rewards."""

    weight: float = 1.0
    """What the reward is multiplied by in the sum."""


class RewardConfig(RewardFunctionConfig):
    """A reward in place of the environment's own. ``reward=F`` is short for ``reward.function=F``."""

    functions: dict[str, WeightedRewardConfig] = Field(default_factory=dict)
    """Several rewards by name, in place of ``function``: their weighted sum is the reward, and each has metrics
    ``reward/NAME/…``. ``algo.advantage.name=gdpo`` normalises each of them apart."""

    @field_validator("functions")
    @classmethod
    def _names(cls, functions: dict[str, WeightedRewardConfig]) -> dict[str, WeightedRewardConfig]:
        for name, reward in functions.items():
            if not re.fullmatch(r"\w[\w-]*", name):
                raise ValueError(f"the name {name!r} becomes part of metrics: letters, digits, _ - only")
            if reward.function is None:
                raise ValueError(f"{name} has no function; set functions.{name}.function")
        return functions

    @model_validator(mode="after")
    def _is_single_or_several(self) -> RewardConfig:
        if self.functions and (self.function is not None or self.key is not None):
            name = "function" if self.function is not None else "key"
            raise ValueError(
                f"{name}={getattr(self, name)} and functions.{next(iter(self.functions))} are both set; leave out one"
            )
        return self

    @property
    def by_name(self) -> dict[str, RewardFunctionConfig]:
        """The rewards by their names; the single one is named by its function; empty: the environment's own."""
        if self.functions:
            return {**self.functions}
        return {} if self.function is None else {self.function: self}

    def section_key(self, name: str) -> str:
        """Return the key of the section of a reward in `by_name`."""
        return f"reward.functions.{name}" if self.functions else "reward"

    @property
    def setting(self) -> str | None:
        """The key and value that set a reward, for messages; None: the environment's own."""
        if self.functions:
            return f"reward.functions={', '.join(self.functions)}"
        return None if self.function is None else f"reward.function={self.function}"
