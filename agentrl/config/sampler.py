"""The ``sampler`` section: inference engines and sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializationInfo,
    StringConstraints,
    field_serializer,
    field_validator,
)

from agentrl.config.base import Seconds, Section

_TENSOR = ("tp", "tp_size", "tensor_parallel_size")
_PIPELINE = ("pp", "pp_size", "pipeline_parallel_size")
_DATA = ("dp", "dp_size", "data_parallel_size")
"""Spellings of SGLang's options for the sizes of tensor, pipeline and data parallelism."""
_MACHINES = ("nnodes",)
_ACCEPTS_MORE = (
    "drafts are accepted more often than the policy samples them, so log-probabilities are not those of the samples"
)
REFUSED_OPTIONS: Mapping[str, tuple[object, str]] = {
    "speculative_accept_threshold_single": (1.0, _ACCEPTS_MORE),
    "speculative_accept_threshold_acc": (1.0, _ACCEPTS_MORE),
    "preferred_sampling_params": (
        None,
        "requests get parameters that they do not have, so tokens are sampled from another distribution than the policy's",
    ),
    "allow_auto_truncate": (False, "prompts that are too long lose tokens, and are answered"),
    "tokenizer_worker_num": (
        1,
        "only the process that takes a request for new weights learns their version, so turns of others would have a wrong one",
    ),
}
"""SGLang's options with which its replies are not those that training needs: the value that is accepted, and why."""


class EmbeddedConfig(Section):
    """The engine of agentrl itself: a torch model behind SGLang's endpoints."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and KV cache in the engine."""
    slots: PositiveInt = 256
    """Sequences in the KV cache at the same time."""
    context: PositiveInt = 1024
    """Maximum tokens of a sequence in the engine."""
    threads: PositiveInt = 2
    """CPU threads of the engine."""
    batch_invariant: bool = False
    """Compute each token the same, bit for bit, whatever else is computed with it; see `LearnerConfig.batch_invariant`. Needs
    ``dtype=float32``."""


def _keeps_something(top_k: int) -> int:
    if top_k != -1 and top_k < 1:
        raise ValueError("-1 keeps all tokens, 1 and more keep so many")
    return top_k


TopK = Annotated[int, AfterValidator(_keeps_something)]
"""How many of the most probable tokens are kept: -1 or at least 1."""


class EngineGroup(Section):
    """Engines with their own options."""

    serves: Literal["evaluation", "prefill", "decode"]
    """``evaluation``: only evaluations in training, with ``eval.background``; they keep the weights with which an evaluation
    begins, and have their own GPUs with every ``placement.mode`` that reserves GPUs. ``prefill`` and ``decode``: SGLang's
    ``--disaggregation-mode``, behind ``sampler.router=sglang``; engines of the one compute prompts, those of the other sample.
    They take the place of ``sampler.engines``."""
    engines: PositiveInt = 1
    """Engines of the group."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Options of SGLang, over those of ``sampler.sglang``; null takes SGLang's default."""
    embedded: EmbeddedConfig = Field(default_factory=EmbeddedConfig)
    """Options of the embedded engine; those that a group does not set are those of ``sampler.embedded``."""

    @field_validator("sglang")
    @classmethod
    def _sglang_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if "python" in options:
            raise ValueError("one interpreter runs the engines of all groups; set sampler.sglang.python")
        check_sizes(options)
        return options

    @field_serializer("embedded")
    def _as_set(self, embedded: EmbeddedConfig, info: SerializationInfo) -> dict[str, Any]:
        """Write only the keys that the group sets, so that the others are still those of the run after reading back."""
        return embedded.model_dump(mode="json" if info.mode_is_json() else "python", exclude_unset=True)


class SamplerConfig(Section):
    """Inference engines and sampling parameters."""

    backend: Literal["embedded", "sglang"] = "embedded"
    """``embedded`` runs anywhere; ``sglang`` needs SGLang and a GPU."""
    engines: PositiveInt = 1
    """Engines that the run starts; an episode's turns all go to the engine that has its prefix."""
    url: str | None = None
    """Address of a running engine, or several separated by commas; without it, the run starts engines."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first engine that the run starts, the following ports for further engines; 0 takes free ports."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature in training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in training; see ``renormalise``."""
    top_k: TopK = -1
    """Top-k sampling in training; see ``renormalise``."""
    renormalise: Literal["engine", "learner", "none"] = "none"
    """Log-probabilities of the tokens that ``top_k`` and ``top_p`` leave, as was sampled. ``engine``: the engine returns the ids
    that it has sampled each token from, and the learner takes these; SGLang does so since 0.5.23, with ``top_k`` from 2 on.
    ``learner``: it keeps tokens by its own logits, and the sampled one; this needs ``algo.old_logprobs=learner`` without
    correction, as engines return log-probabilities of the whole distribution. docs/reference/algorithms.md."""
    allow_unnormalised: bool = False
    """Train with top-p or top-k although the engine's log-probabilities are then not those of the distribution sampled from."""
    max_new_tokens: PositiveInt = 64
    """Maximum tokens of a turn."""
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = Field(default_factory=list)
    """Strings that end a turn and stay in it, in addition to those of the environment or loop (slime's ``rollout_stop``)."""
    request_timeout_s: Seconds = 300.0
    """Seconds until a generation counts as lost."""
    start_timeout_s: Seconds = 300.0
    """Seconds until a started engine must be healthy."""
    keep_minutes: PositiveFloat | None = None
    """Minutes that the engines which a training run starts stay after it, so that the next run with the same options on the
    same machine takes them again, without a start. Null ends them with the run. ``agentrl engines`` lists and ends them."""
    max_running: PositiveInt | Literal["auto"] | None = None
    """Maximum concurrent requests per engine; further ones wait in the run. Without a number there is no limit. ``auto``: the
    limit of each engine follows the pressure on its KV cache."""
    router: Literal["builtin", "sglang"] = "builtin"
    """Which router distributes requests to the engines: ``builtin`` is part of the run; ``sglang`` is
    the program ``sglang-router`` (extra ``router``), with which ``max_running`` is a mean over engines. With both, all
    turns of an episode go to one engine, and a new episode to the engine with the fewest requests; ``builtin`` keeps the episodes
    of a prompt together as long as that engine has less than 8 requests more than another."""
    health_interval_s: Seconds = 2.0
    """Seconds between health checks of an engine."""
    stall_timeout_s: Seconds = 60.0
    """An engine that has not answered for this many seconds counts as hung; it is restarted if the run started it."""
    update_timeout_s: Seconds = 600.0
    """The same while an engine receives weights: it may not answer during a long update."""
    max_restarts: int = Field(default=3, ge=0)
    """How often a dead or hung engine is restarted; after that the run continues with the others."""
    embedded: EmbeddedConfig = Field(default_factory=EmbeddedConfig)
    """Options of the embedded engine."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Options of ``sglang.launch_server``, passed through: ``mem_fraction_static: 0.5`` becomes ``--mem-fraction-static 0.5``.
    Except ``python``: the Python interpreter that runs SGLang, if it is installed in a separate environment. ``dtype`` on GPUs
    is by default that of the model's ``config.json``; for a model in float32, such as a checkpoint, it is ``bfloat16``.
    ``speculative_algorithm: NGRAM`` turns speculative decoding on. docs/how_to/tune.md."""
    groups: dict[str, EngineGroup] = Field(default_factory=dict)
    """Further engines by the name of their group, with their own options: ``{eval: {serves: evaluation, engines: 2, sglang:
    {tp_size: 2}}}``. docs/how_to/scale.md."""

    @field_validator("temperature")
    @classmethod
    def _not_greedy(cls, temperature: float) -> float:
        if temperature < 1e-6:  # as engines decide
            raise ValueError("greedy samples of a group are all the same; set sampler.temperature to 1e-6 or more")
        return temperature

    @field_validator("sglang")
    @classmethod
    def _sglang_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(options.get("python"), str | None):
            raise ValueError(f"python={options['python']!r} is not a path; set sampler.sglang.python=/…/bin/python")
        check_sizes(options, "sampler.sglang.")
        return options

    @field_validator("groups")
    @classmethod
    def _group_names(cls, groups: dict[str, EngineGroup]) -> dict[str, EngineGroup]:
        for name in groups:
            if not re.fullmatch(r"\w[\w-]*", name):
                raise ValueError(
                    f"the group's name {name!r} becomes part of engines/<group>/<metric>: letters, digits, _ - only"
                )
        return groups

    @property
    def uses_sglang(self) -> bool:
        """Whether engines are SGLang's, which take ``sglang``; else they take ``embedded``, and compute as the learner does."""
        return self.backend == "sglang"

    @property
    def has_router_program(self) -> bool:
        """Whether a program between the run and the engines chooses the engine of a request. It drops fields of requests, such as
        the key of a version, or the option to return experts.
        """
        return self.router == "sglang"

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses in ``url``."""
        return tuple(part.strip().rstrip("/") for part in (self.url or "").split(",") if part.strip())

    @property
    def python(self) -> Path | None:
        """The interpreter that runs SGLang; None for the run's own."""
        return Path(self.sglang["python"]) if self.sglang.get("python") is not None else None

    @property
    def sglang_options(self) -> dict[str, Any]:
        """Options for ``sglang.launch_server``."""
        return {name: value for name, value in self.sglang.items() if name != "python"}

    def sglang_option(self, name: str, default: object = None) -> object:
        """Return an option of SGLang by its name with underscores; ``default`` if it is not set."""
        value = _normalised(self.sglang).get(name)
        return default if value is None else value

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Device of the engines that a run starts."""
        gpu = self.uses_sglang and self.sglang_options.get("device", "cuda") != "cpu"
        return "cuda" if gpu else "cpu"

    @property
    def speculative_algorithm(self) -> str | None:
        """SGLang's algorithm of speculative decoding, in capitals; None: it decodes token by token."""
        name = self.sglang_option("speculative_algorithm") if self.uses_sglang else None
        return None if name is None else str(name).upper()

    @property
    def context_length(self) -> int | None:
        """SGLang's context as its options set it; None: the model's."""
        length = _normalised(self.sglang).get("context_length")
        return None if length is None else int(length)

    @property
    def memory_share(self) -> float | None:
        """SGLang's share of a GPU's memory for weights and KV cache as its options set it; None: most of it."""
        share = _normalised(self.sglang).get("mem_fraction_static")
        return None if share is None else float(share)

    @property
    def tensor_ranks(self) -> int:
        """Tensor parallel ranks of an engine."""
        return int(_size(self.sglang, _TENSOR)) if self.uses_sglang else 1

    @property
    def engine_ranks(self) -> int:
        """Processes of one engine, each with its own GPU if it computes on GPUs.

        The product of its tensor, pipeline and data parallel sizes. With ``enable_dp_attention`` SGLang divides the tensor
        parallel ranks among the data parallel ones, which then add none.
        """
        if not self.uses_sglang:
            return 1
        data = 1 if self.sglang_option("enable_dp_attention") else int(_size(self.sglang, _DATA))
        return self.tensor_ranks * int(_size(self.sglang, _PIPELINE)) * data

    @property
    def engine_machines(self) -> int:
        """Machines that the processes of one engine are divided among."""
        return int(_size(self.sglang, _MACHINES)) if self.uses_sglang else 1


def check_sizes(options: Mapping[str, object], key: str = "") -> None:
    """Check SGLang's options that are sizes or a share of memory; ``key`` comes before their names.

    Raises:
        ValueError: one is none.
    """
    for names in (_TENSOR, _PIPELINE, _DATA, ("nnodes", "nnodes"), ("context_length", "context_length")):
        size = _size(options, names)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{key}{names[1]}={size!r}: SGLang takes a whole number from 1 on")
    share = _normalised(options).get("mem_fraction_static", 1.0)
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        raise ValueError(f"{key}mem_fraction_static={share!r}: SGLang takes a share of a GPU's memory, between 0 and 1")


def merge_options(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's options of a group: ``own`` ones replace ``common`` ones, in whatever spelling these are."""
    spellings = {spelling for name in own for spelling in _spellings(name)}
    return {name: value for name, value in common.items() if name.replace("-", "_") not in spellings} | dict(own)


def _spellings(name: str) -> tuple[str, ...]:
    """Return the names of an option of SGLang, with underscores."""
    name = name.replace("-", "_")
    return next((names for names in (_TENSOR, _PIPELINE, _DATA) if name in names), (name,))


def _normalised(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in options.items()}


def _size(options: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the value set under one of ``names``, 1 if none is set."""
    sizes = _normalised(options)
    return next((sizes[name] for name in names if sizes.get(name) is not None), 1)
