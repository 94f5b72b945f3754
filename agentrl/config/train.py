"""Sections of training: ``train``, ``batch``, ``weights``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from agentrl.config.base import Section
from agentrl.core.user_code import MAX_SECONDS


class RunConfig(Section):
    """Where a run is stored, and its seed."""

    dir: Path | None = None
    """The run's folder; without it, ``runs/<environment>-<time>``, or ``runs/sft-<time>``."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of data order, episodes and sampling."""


class TrainConfig(Section):
    """Length, evaluation and checkpoints of training."""

    steps: int | None = Field(default=None, ge=0)
    """Steps, each with one batch of rollouts; 0 only evaluates (slime's ``num_rollout``). 100 if neither this nor ``epochs`` is
    set."""
    epochs: PositiveFloat | None = None
    """How often the tasks are gone through (slime's ``num_epoch``). Groups that ``rollout.filter_groups`` drops count, and what
    is less than a batch at the end is not trained. With ``steps`` too, the run ends at whichever comes first."""
    steps_per_rollout: PositiveInt = 1
    """Optimizer steps a batch of rollouts is divided into (slime's ``num_steps_per_rollout``)."""
    minutes: PositiveFloat | None = None
    """Stop after the step that passes this many minutes of training, evaluations not counted."""
    eval_every: int = Field(default=10, ge=0)
    """Steps between evaluations; 0: none between the first step and the last. After the last step there always is one."""
    eval_first: bool = True
    """Evaluate before the first step too, whatever ``eval_every`` is."""
    save_every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0: only after the last step."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep."""
    save_episodes_s: float | None = Field(default=30.0, ge=0, le=MAX_SECONDS)
    """Seconds after which an episode in progress is saved to the journal, and again, so that a killed run continues with it; null
    saves none. docs/reference/checkpoints.md."""
    keep_best: str | None = None
    """An evaluation metric, such as ``exact_match``: the checkpoint where it is highest is kept too, and written even if
    ``save_every`` does not ask for it; null keeps the newest alone."""
    provenance: Literal["strict", "warn"] = "strict"
    """What follows if a batch would train on a token that no engine sampled: ``strict`` refuses the batch, which ends the
    run; ``warn`` logs the first such token, excludes all of them from the loss and counts them in
    ``train/provenance_faults``."""
    stop_at: dict[str, float] = Field(default_factory=dict)
    """End the run once an evaluation reaches all of these, such as ``{exact_match: 0.98}``."""
    callbacks: list[str] = Field(default_factory=list)
    """Callbacks, called in this order: subclasses of ``agentrl.Callback``, or instances, as ``path/to/file.py:Class`` or
    ``module:Class``. docs/how_to/python.md."""

    @model_validator(mode="after")
    def _has_length(self) -> TrainConfig:
        if self.steps is None and self.epochs is None:
            self.steps = 100
        return self


class AsyncConfig(Section):
    """Sampling while the learner trains."""

    max_staleness: int = Field(default=0, ge=0)
    """A trained token is at most so many policy versions older than the policy that it trains. 0 is the synchronous loop; 1
    samples one step ahead; more let long episodes take several steps. docs/explanation/async.md."""
    mask_older_than: int | None = Field(default=None, ge=0)
    """Tokens that are older than this many versions are not trained (loss mask 0, reason ``STALE``), and do not count in the
    denominators of the loss. null trains all of them, with ``algo.correction``."""
    streaming: bool = False
    """Compute the gradient of groups as they finish, while the others of the step are sampled; the optimizer step follows the
    last one. For estimators that compare the rollouts of a group alone. docs/explanation/async.md."""


class BatchConfig(Section):
    """How rollouts become batches."""

    aggregation: Literal["token_mean", "sequence_mean", "rollout_mean", "constant"] = "token_mean"
    """How tokens share the loss. ``token_mean``: every sampled token weighs the same (DAPO, arXiv:2503.14476);
    ``sequence_mean``: every agent of every rollout does; ``rollout_mean``: every rollout does; ``constant``: the sum over all
    tokens is divided by the number of rollouts times ``constant_tokens`` (Dr.GRPO, arXiv:2503.20783)."""
    constant_tokens: PositiveInt | None = None
    """The divisor of ``constant``; None is ``rollout.max_tokens``."""
    denominator: Literal["live", "all"] = "live"
    """Which rollouts count in the denominators of means: those with an advantage, or all (as in TRL and slime)."""
    global_batch_size: PositiveInt | None = None
    """Rollouts an optimizer step; without a number, all rollouts of a step divided by ``train.steps_per_rollout``."""
    tokens_per_micro: Literal["auto"] | PositiveInt = "auto"
    """Tokens a rank computes at the same time, in one sequence of packed rows; a longer row gets a separate one. ``auto`` is
    4,096 on CPUs. On GPUs it is the most, up to 32,768, for which the estimate of memory is at most 0.95 of a GPU's, or 0.9 of
    one that engines share, together with ``learner.recompute`` and ``learner.optimizer.state``: no recomputation, else selective
    recomputation and at least 8,192 tokens with float32 moments, else with moments in 8 bits; more recomputation where none of
    these fits, as of rows of up to ``rollout.max_tokens`` that are long."""
    convert: str | None = None
    """A function that chooses, masks, weighs or rewards the samples of a training step before advantages are computed:
    ``module:function`` or ``FILE.py:function`` (slime's ``custom_convert_samples_to_train_data_path``). It cannot change what was
    sampled. docs/how_to/own_functions.md."""
    share_prefixes: bool = True
    """Compute tokens that several rows of a micro-batch begin with, such as a group's prompt, only once, where that is
    faster. Loss and gradient stay the same up to rounding. Layers that mix rows, such as Mamba, rule it out."""

    @property
    def micro_tokens(self) -> int:
        """``tokens_per_micro``; 4,096 for ``auto`` that no GPU's memory has decided."""
        return 4096 if self.tokens_per_micro == "auto" else self.tokens_per_micro


class WeightsConfig(Section):
    """Weight sync from the learner to the engines."""

    transport: str = "tensor"
    """``tensor``: by HTTP; ``delta``: likewise, but only what has changed since the last sync; ``disk``: through a
    folder that both can read; ``distributed``: broadcast from ranks of the learner in ``torch.distributed`` groups with the
    engines, NCCL on separate GPUs or gloo on a CPU; ``ipc``: CUDA IPC on the GPUs that engines share with the learner
    (``placement.mode=colocate``, or ``separate`` on a machine with one GPU, which all of them use). For ``delta`` the ranks
    that send keep a copy of the weights in the CPU's memory. Or a class of yours: ``FILE.py:Class``, ``module:Class`` or an entry
    point of ``agentrl.transports``."""
    adapters: Literal["merged", "only"] = "merged"
    """With ``learner.lora``: ``merged`` sends all weights, with the adapters merged; ``only`` sends the adapters, in the HTTP
    request, and the engines keep the base model's weights; several policies need it. Not with ``placement.mode=colocate``."""
    bucket_mib: PositiveInt | None = None
    """Size of one bucket, MiB; by default 4096 for ``ipc`` and ``distributed``, and 512 for ``tensor`` and ``disk``. A
    smaller model is one bucket. Each learner rank needs this memory on its device for a sync in addition to its weights, and
    with ``ipc`` keeps it. With ``distributed`` each GPU of an engine needs it too, with SGLang 0.5.17 twice."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float8"] = "auto"
    """Weights are cast to it before they are sent. ``auto`` is what the engines report to hold; if they report nothing, or
    hold different ones, the learner's float32 is sent. ``float8``: SGLang's engines have the matrices of decoder layers in
    float8 with one scale for each block of 128 x 128 numbers, or as the ``quantization_config`` of a model published in float8
    says, and the learner quantises them before they are sent; the others are bfloat16. That is also ``auto`` of a model
    published in float8. docs/how_to/precision.md."""
    sync_every: PositiveInt = 1
    """Steps between weight syncs; an evaluation always has the newest weights. Tokens have the version that sampled them,
    and the ratio to its log-probabilities (``algo.old_logprobs=sampler``) corrects for its age. With ``async.max_staleness`` at
    most that plus 1."""
    pause: Literal["finish", "restart", "abort", "retract", "in_place"] = "abort"
    """What becomes of generations in progress at a sync, with ``async.max_staleness``. ``finish``: engines end them first, with
    the old weights. ``restart``: they are sampled again from their first token. The others continue them with the
    new weights: ``abort`` sends the tokens again, ``retract`` lets the engine compute their keys and values again,
    ``in_place`` keeps those of the old weights. SGLang before 0.5.23 has only the first three."""
    prefix_cache: Literal["drop", "by_version", "keep"] = "drop"
    """What becomes of the engines' prefix cache at a sync. ``drop``: it is emptied. ``by_version``: requests reuse only what
    their policy version has computed. ``keep``: requests also reuse keys and values of older weights."""
    check: Literal["none", "version", "checksum"] = "version"
    """Check of every engine after a sync: none, its policy version, or also checksums of its weights (for engines of one
    rank; the driver reads all weights for it)."""
    gap_limit: PositiveFloat | Literal["auto", "off"] = "auto"
    """How far engines and learner may be apart, as k3 of sampled tokens in nats a token of a first turn; twice that in a ninth.
    The run stops if they are further apart after the first sync. ``auto``: 2e-3 for weights in 16 bits, 2e-2 with experts or for
    float8 weights or KV caches, 5e-2 for both, a twentieth if all is float32. ``off``: no check."""
