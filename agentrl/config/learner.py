"""The ``learner`` section, shared by reinforcement learning and supervised fine-tuning."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from agentrl.config.base import Seconds, Section
from agentrl.core.lineup import MAIN

Recompute = Literal["none", "selective", "all_but_attention", "full"]
"""What is computed again in the backward pass; see `LearnerConfig.recompute`."""


OptimizerState = Literal["float32", "8bit"]
"""AdamW's moments; see `OptimizerConfig.state`."""

Schedule = Literal["constant", "linear", "cosine"]
"""The learning rate after the warm-up."""


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon`` orthogonalises the steps of the layers' matrices; embeddings, head, norms and biases get AdamW."""
    lr: PositiveFloat | Literal["auto"] = "auto"
    """Learning rate after warm-up; Muon's is scaled to match AdamW's root mean square. ``auto`` is by the number of weights:
    3e-4, from 50 million 5e-5, from 500 million 1e-6, or 1e-5 for critics and SFT."""
    warmup_steps: NonNegativeInt | Literal["auto"] = "auto"
    """Steps over which the learning rate grows linearly to ``lr``. ``auto`` is by the number of weights: 0, from 50 million 3,
    from 500 million 10."""
    schedule: Literal["auto", "constant", "linear", "cosine"] = "auto"
    """The learning rate after the warm-up, over the run's optimizer steps. ``auto`` is ``constant``, for SFT ``linear``."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of ``lr`` that ``linear`` and ``cosine`` end at."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's term against division by zero."""
    state: Literal["auto"] | OptimizerState = "auto"
    """AdamW's moments: in ``float32``, or in ``8bit`` floating point with a scale for each block, rounded stochastically: 2 in
    place of 8 bytes a weight. On a single rank ``8bit`` adds gradients up in bfloat16, likewise rounded. ``auto`` is ``8bit``
    where a GPU's memory asks for it, see `BatchConfig.tokens_per_micro`; not with Muon, LoRA or Megatron-Core."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger norm over all weights are scaled down to this one."""

    @model_validator(mode="after")
    def _state_of_adamw(self) -> OptimizerConfig:
        if self.state == "8bit" and self.name != "adamw":
            raise ValueError(f"state=8bit is of name=adamw, not {self.name}: leave out state")
        return self

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both are from 0 to below 1")
        return betas

    def resolve_schedule(self, auto: Schedule) -> Schedule:
        """Return ``schedule``, or the argument ``auto`` if ``schedule`` is ``auto``."""
        return auto if self.schedule == "auto" else self.schedule

    @property
    def fixed_lr(self) -> float:
        """``lr``, which is no longer ``auto`` once a run has a model."""
        assert self.lr != "auto"
        return self.lr

    @property
    def fixed_warmup_steps(self) -> int:
        """``warmup_steps``, which is no longer ``auto`` once a run has a model."""
        assert self.warmup_steps != "auto"
        return self.warmup_steps


EXPERT_PARALLEL = "learner.expert_parallel"
"""Key of `LearnerConfig.expert_parallel`."""

POLICY_NAME = re.compile(r"[A-Za-z]\w*")
"""Names of policies."""


class LoraConfig(Section):
    """Adapters of low rank, in float32, that are trained in place of the weights."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveInt = 32
    """The adapters' product is scaled by ``alpha / rank``."""
    target: Literal["linear"] | list[str] = "linear"
    """Shell patterns of the linear layers that get one, by Hugging Face name; ``linear`` is all but the output head."""
    policies: list[str] = Field(default_factory=lambda: [MAIN], min_length=1)
    """Policies, each with separate adapters over the same base model. A run takes them from ``env.roles.ROLE.policy``."""

    @field_validator("policies")
    @classmethod
    def _names(cls, policies: list[str]) -> list[str]:
        for name in policies:
            if not POLICY_NAME.fullmatch(name) or policies.count(name) > 1:
                raise ValueError(f"{name!r} becomes part of names of weights: letters, digits and _, each name once")
        return policies


class LearnerConfig(Section):
    """Backend, devices and memory options of training."""

    backend: str = "fsdp"
    """The implementation. ``fsdp`` is PyTorch's FSDP2 on the Hugging Face model, ``megatron`` Megatron-Core. Others are
    registered (entry points ``agentrl.learners``), or ``file.py:Class`` or ``module:Class``."""
    ranks: PositiveInt = 1
    """Processes of the learner; each with one GPU if on GPUs."""
    context_parallel: PositiveInt = 1
    """Ranks that compute each micro-batch together, each a part of its tokens and, in attention, of the heads (Ulysses). For
    rows whose activations are too large for one GPU. Divides ``ranks``."""
    replicas: PositiveInt = 1
    """Copies of the sharded weights (HSDP): ``ranks / replicas`` adjacent ranks hold one together. Weights are gathered inside of
    a copy, such as the GPUs of one machine; between copies only gradients are added up. More memory, less communication between
    machines. Divides ``ranks``; not for ``backend=megatron``."""
    expert_parallel: PositiveInt = 1
    """Ranks that each have different experts of every layer: so many adjacent ranks of a copy of the weights divide them, and
    exchange the tokens of their micro-batches for them. Less is gathered of layers with experts, which are not compiled. Divides
    the experts and ``ranks / replicas``; not for ``backend=megatron``, which has options under ``megatron``."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; ``auto`` uses GPUs if there are any."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of a rank; 0 shares the machine's cores among the ranks."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of matrix products and gathered weights; the optimizer's weights, gradients and log-probabilities stay float32.
    ``auto`` is ``bfloat16`` if the device has instructions for it: CPUs without them take 10 to 30 times as long as in
    float32."""
    fp8: bool = False
    """Compute the linear layers of decoder layers in float8, with one scale a tensor. Needs torchao and a recent GPU."""
    batch_invariant: bool = False
    """Compute each token as the embedded engine does with ``sampler.embedded.batch_invariant``, so that both give the same
    log-probabilities, bit for bit: products of a fixed size, in float32. Dense models, on CPUs, without shared prefixes; several
    times slower (docs/how_to/precision.md)."""
    compile: Literal["auto"] | bool = "auto"
    """Compile decoder layers; ``auto`` does so on GPUs. The first step takes about a minute longer, less with what an earlier
    run has compiled: it is kept in ``~/.cache/agentrl/torchinductor``, or the folder that ``TORCHINDUCTOR_CACHE_DIR`` names."""
    recompute: Literal["auto"] | Recompute = "auto"
    """What is computed again in the backward pass to save memory: ``none``; ``selective``, all but matrix products and
    attention (half the activations, some hundredths slower); ``all_but_attention``, for long rows, whose attention takes most of
    the time; ``full``, everything but each layer's input (a third slower). ``auto`` is ``none`` on CPUs; on GPUs it is the first
    for which the estimate of memory fits; see `BatchConfig.tokens_per_micro`."""
    reshard_after_forward: bool = False
    """Drop gathered weights after each layer's forward pass: less memory, twice the communication."""
    cpu_offload: Literal["none", "optimizer"] = "none"
    """What is in CPU memory while the learner trains: ``optimizer``, the optimizer's states, 8 of 16 bytes of a weight. A step
    moves them to the GPU and back, about 1 GiB at a time. With ``backend=megatron`` a resumed run loads them on the GPU."""
    logits_chunk: PositiveInt = 4096
    """Trained tokens whose logits are held at the same time."""
    freeze: list[str] = Field(default_factory=list)
    """Shell patterns of weights that stay as they are, by Hugging Face name, such as ``*.embed_tokens.*``, or ``*visual.*`` for
    the vision tower of Qwen and GLM. They have no gradient and no optimizer state. Of a critic only weights that read images
    are frozen by it."""
    lora: LoraConfig | None = None
    """Train adapters only (needs the extra ``lora``). Engines, unless ``weights.adapters`` is ``only``, and exports get merged
    weights. A critic is trained as a whole, except its vision tower."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Options of Megatron-Core, for ``backend=megatron``: fields of its ``TransformerConfig``, ``OptimizerConfig`` and
    ``DistributedDataParallelConfig``, such as ``tensor_model_parallel_size``."""
    save_hf: Literal["auto"] | bool = "auto"
    """Whether checkpoints have a Hugging Face folder of the weights, which engines and other programs load. Without it each rank
    writes its own files (``torch.distributed.checkpoint``), with LoRA the adapters alone, and ``agentrl export`` makes the
    folder. ``auto``: only models of up to 50 billion parameters have it. docs/reference/checkpoints.md."""
    start_timeout_s: Seconds = 300.0
    """Seconds until the ranks must have loaded the model."""
    step_timeout_s: Seconds = 1800.0
    """Timeout of a call to the ranks, such as an optimizer step or a checkpoint, seconds."""

    def for_critic(self, optimizer: OptimizerConfig) -> LearnerConfig:
        """Return the settings of a critic's learner: without adapters, and `freeze` matches weights that read images.

        Args:
            optimizer: ``algo.critic.optimizer``.
        """
        freeze = self.freeze if self.lora is None else ["*"]  # adapters are of the text part alone
        return self.model_copy(update={"optimizer": optimizer, "freeze": freeze, "lora": None})

    @model_validator(mode="after")
    def _adapters_alone(self) -> LearnerConfig:
        for key in ("fp8", "freeze"):
            if self.lora is not None and getattr(self, key):
                raise ValueError(f"{key} with lora: only the adapters are trained, in float32; leave out {key} or lora")
        if self.lora is not None and self.optimizer.state == "8bit":
            raise ValueError("optimizer.state=8bit with lora: adapters have float32 moments; leave out optimizer.state")
        return self
