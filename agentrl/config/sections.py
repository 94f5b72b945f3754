"""The sections of a run's configuration that belong to no other part. The docstring of a field is its documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from agentrl.config.base import Section
from agentrl.config.failure import FailureConfig


class EnvConfig(Section):
    """Which environment, and how it is built."""

    name: str = "search_r1"
    """A registered environment, or ``path/to/file.py:Class``; ``--env`` sets it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""


class TasksConfig(Section):
    """Which problems to train and evaluate on."""

    name: str | None = None
    """A registered taskset, or ``path/to/file.py:Class``; without one the environment's own ``tasks()`` are taken."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the taskset's constructor."""
    train_split: str = "train"
    """The split to train on."""
    eval_split: str = "eval"
    """The split to evaluate on."""


class ModelConfig(Section):
    """The policy."""

    path: str = "multihop-warm"
    """A local Hugging Face folder, a shipped model's name, or a hub id."""
    warm_start: str | None = None
    """A configuration of ``agentrl sft``, a file or a shipped one's name: ``agentrl train`` first fine-tunes the model by it,
    in ``warm_start/`` of the run's folder, and then trains what came of it. Done once; a resumed run goes on from it."""
    warm_start_options: dict[str, Any] = Field(default_factory=dict)
    """Laid over that configuration, such as ``{sft: {minutes: 1}}``. The model, the format and the folders are the run's."""


class EmbeddedConfig(Section):
    """The engine that agentrl brings: a torch model behind SGLang's endpoints."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and KV cache in the engine."""
    slots: PositiveInt = 256
    """Sequences whose KV cache is kept at the same time."""
    context: PositiveInt = 1024
    """Tokens a sequence may have in the engine."""
    threads: PositiveInt = 2
    """CPU threads of the engine."""


class SamplerConfig(Section):
    """Where tokens are sampled, and how."""

    backend: Literal["embedded", "sglang"] = "embedded"
    """``embedded`` runs anywhere; ``sglang`` wants SGLang and a GPU."""
    engines: PositiveInt = 1
    """Engines that the run starts; an episode's turns all go to the engine that has its prefix."""
    url: str | None = None
    """A running engine's address, or several separated by commas; without one the run starts its own."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the engine that the run starts, the next ones for further engines; 0 takes free ones."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature in training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in training; see ``allow_unnormalised``."""
    top_k: int = -1
    """Top-k sampling in training; see ``allow_unnormalised``."""
    allow_unnormalised: bool = False
    """Train with top-p or top-k although the engine's log-probabilities are then not those of what was sampled."""
    max_new_tokens: PositiveInt = 64
    """Tokens a turn may have."""
    request_timeout_s: PositiveFloat = 300.0
    """Seconds before a generation counts as lost."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds an engine may take to become healthy."""
    max_running: PositiveInt | None = None
    """Requests that an engine is given at a time; further ones wait in the run. Without a number it gets all."""
    router: Literal["builtin", "sglang"] = "builtin"
    """Who says which engine samples: ``builtin`` is the run itself; ``sglang`` puts the program ``sglang-router`` before the
    engines (``pip install 'agentrl[router]'``), where ``max_running`` is a mean over them. With both, all turns of an
    episode go to one engine, and a new episode to the engine with the fewest requests."""
    health_interval_s: PositiveFloat = 2.0
    """Seconds between two looks at an engine's health."""
    stall_timeout_s: PositiveFloat = 60.0
    """An engine that does not answer for so many seconds is taken for hung: one that the run started is started again."""
    max_restarts: int = Field(default=3, ge=0)
    """How often an engine that died or hung is started again; after that the run goes on with the others."""
    embedded: EmbeddedConfig = Field(default_factory=EmbeddedConfig)
    """Options of the embedded engine."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Options of ``sglang.launch_server``, passed through: ``mem_fraction_static: 0.5`` becomes ``--mem-fraction-static 0.5``.
    All but ``python``, the Python interpreter that runs SGLang, of an environment of its own; without it that of the run."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses in ``url``."""
        return tuple(part.strip().rstrip("/") for part in (self.url or "").split(",") if part.strip())

    @property
    def python(self) -> Path | None:
        """The interpreter that runs SGLang; None: the run's own."""
        return Path(self.sglang["python"]) if self.sglang.get("python") is not None else None

    @property
    def sglang_options(self) -> dict[str, Any]:
        """What of ``sglang`` is for ``sglang.launch_server``."""
        return {name: value for name, value in self.sglang.items() if name != "python"}

    @model_validator(mode="after")
    def _engines(self) -> SamplerConfig:
        if self.url is not None and not self.urls:
            raise ValueError(
                f"url={self.url!r} holds no address; set sampler.url=http://HOST:PORT, several with commas"
            )
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"url={self.url} names an engine twice; sampler.url takes each address once")
        if self.urls and self.engines > 1:
            raise ValueError(
                f"url={self.url} with engines={self.engines}: engines that run already are not started; leave out "
                "sampler.engines (all addresses in sampler.url are used), or sampler.url"
            )
        if self.port and self.port + self.engines - 1 > 65535:
            raise ValueError(
                f"port={self.port} with engines={self.engines}: there is no port above 65535; lower sampler.port"
            )
        if not isinstance(self.sglang.get("python"), str | None):
            raise ValueError(
                f"sglang.python={self.sglang['python']!r} is no path: set sampler.sglang.python=/…/bin/python"
            )
        return self

    @model_validator(mode="after")
    def _normalised(self) -> SamplerConfig:
        if (self.top_p < 1 or self.top_k > 0) and not self.allow_unnormalised:
            raise ValueError(
                f"top_p={self.top_p:g}, top_k={self.top_k}: the engine's log-probabilities are not renormalised, so the "
                "policy gradient would be wrong; set sampler.top_p=1 sampler.top_k=-1, or accept it with "
                "sampler.allow_unnormalised=true"
            )
        if self.temperature == 0:
            raise ValueError(
                "temperature=0: greedy samples of a group are all the same; set sampler.temperature above 0"
            )
        return self


class RolloutConfig(Section):
    """How episodes are run."""

    batch_size: PositiveInt = 32
    """Prompts a step (slime's ``rollout_batch_size``)."""
    n_samples_per_prompt: PositiveInt = 8
    """Episodes a prompt: the group that advantages are computed over."""
    max_turns: PositiveInt = 8
    """Turns an episode may have, those of its subagents included."""
    max_tokens: PositiveInt = 1024
    """Tokens that the policy may have before it at once, its answer included: prompt, turns and observations of one
    conversation."""
    max_seconds: PositiveFloat = 300.0
    """Seconds an episode may take."""
    concurrency: PositiveInt = 256
    """Episodes that run at the same time."""
    failure: FailureConfig = Field(default_factory=FailureConfig)
    """What follows when an episode fails, by where the error arose."""
    generate: str | None = None
    """A multi-turn loop of your own in place of environment and runner: ``module:function`` or ``file.py:function``."""


class BatchConfig(Section):
    """How rollouts become batches."""

    aggregation: Literal["token_mean", "rollout_mean"] = "token_mean"
    """``token_mean``: every sampled token weighs the same (DAPO, arXiv:2503.14476); ``rollout_mean``: every rollout does."""
    global_batch_size: PositiveInt | None = None
    """Rollouts an optimizer step; without a number, all rollouts of a step divided by ``train.steps_per_rollout``."""
    tokens_per_bin: PositiveInt = 2048
    """Rows are packed into bins of this many tokens; a longer row gets a bin of its own."""
    tokens_per_micro: PositiveInt = 4096
    """Tokens a rank computes at the same time."""


class WeightsConfig(Section):
    """How new weights reach the engine."""

    transport: Literal["tensor", "disk", "distributed", "ipc"] = "tensor"
    """``tensor`` sends them in the request; ``disk`` through a folder that both can read; ``distributed`` from the learner's
    rank 0 through a ``torch.distributed`` group with the engines, NCCL on GPUs of their own or gloo on a CPU; ``ipc`` lets
    engines read them from the GPU that they share with the learner (``placement.mode=colocate``)."""
    bucket_mib: PositiveInt = 512
    """Size of one bucket, MiB: what each of the learner's ranks holds beside its own weights meanwhile."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """What weights are cast to before they are sent, such as to what the engines hold; by default they go as the learner
    holds them."""
    sync_every: PositiveInt = 1
    """Steps between two updates of the engines; an evaluation always has the newest weights. Tokens carry the version that
    sampled them, and the ratio to its log-probabilities (``algo.old_logprobs=sampler``) corrects for its age."""
    check: Literal["none", "version", "checksum"] = "version"
    """What every engine is asked after an update: nothing, the version that it samples with, or checksums of its weights
    too (of engines of one rank; the driver reads all weights for it)."""


class TrainConfig(Section):
    """How long to train, and what to keep."""

    steps: int = Field(default=100, ge=0)
    """Steps, each of one batch of rollouts; 0 only evaluates (slime's ``num_rollout``)."""
    steps_per_rollout: PositiveInt = 1
    """Optimizer steps a batch of rollouts is divided into (slime's ``num_steps_per_rollout``)."""
    minutes: PositiveFloat | None = None
    """Stop after the step that passes this many minutes of training, evaluations not counted."""
    eval_every: int = Field(default=10, ge=0)
    """Evaluate every so many steps; 0 only after the last."""
    eval_first: bool = True
    """Evaluate before the first step too."""
    save_every: int = Field(default=10, ge=0)
    """Write a checkpoint every so many steps; 0 only after the last."""
    keep: PositiveInt = 2
    """Checkpoints to keep."""
    provenance: Literal["strict", "warn"] = "strict"
    """What follows where a batch would train on a token that no engine sampled: ``strict`` refuses the batch, which ends
    the run; ``warn`` logs the first one, leaves all of them out of the loss and counts them in
    ``train/provenance_faults``."""
    stop_at: dict[str, float] = Field(default_factory=dict)
    """End the run once an evaluation reaches all of these, such as ``{exact_match: 0.98}``."""


class ToolConfig(Section):
    """One tool server."""

    url: str | None = None
    """A running server's address; without one the run starts its own."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the server that the run starts; 0 takes a free one."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds that server may take to answer; building or loading an index counts."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the tool, see its README."""


class RunConfig(Section):
    """Where a run lies, and what makes it repeatable."""

    dir: Path | None = None
    """The run's folder; without one, ``runs/<environment>-<time>``."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order, episodes and sampling."""


class ObsConfig(Section):
    """What a run shows and records."""

    tensorboard: bool = True
    """Write TensorBoard event files beside ``metrics.jsonl``."""
    rollouts: Literal["all", "first", "none"] = "all"
    """Which of a step's rollouts to write to ``rollouts/``: all, the first group of each step, or none."""
    rollout_format: Literal["jsonl", "parquet"] = "jsonl"
    """How rollouts lie on disk; parquet is made of the JSON lines once a step is whole."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases: off, online (wants a key), or offline for ``wandb sync`` later."""
    wandb_project: str = "agentrl"
    """The project of the run at Weights & Biases."""
    table_rows: int = Field(default=8, ge=0)
    """Rollouts of each step to show in the trackers' sample tables."""
    progress: Literal["auto", "live", "plain"] = "auto"
    """A live table, plain lines, or whichever fits the output."""
    stall_warning_s: float = Field(default=120.0, ge=0)
    """Seconds without progress before the run says what it waits for; it says so again after twice and four times as
    long. On SIGUSR1 it says so at once. 0 leaves it at that."""

    @field_validator("wandb", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        """In YAML a bare ``off`` is the boolean."""
        return "off" if value is False else value
