"""The base class of ranks: the optimizer step, CPU offload, and checkpoints in the background.

Legend: ``N`` tokens of a micro-batch that are scored, ``S`` sequences of the global batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from agentrl.algo.batch_loss import BatchLoss
from agentrl.batch.microbatch import GlobalBatch, MicroBatch, to_device
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.core.errors import LearnerError
from agentrl.learner.base import LearnerRank, RankOptions, RowLogprobs, RowScores, WeightSource
from agentrl.learner.device import peak_memory
from agentrl.learner.layers import compilation
from agentrl.learner.offload import CpuOffload
from agentrl.learner.random_states import seed_everything
from agentrl.learner.step_metrics import StepMetrics
from agentrl.models.engine_float8 import EngineFloat8, read_engine_float8
from agentrl.models.learning_rates import resolve_optimizer
from agentrl.models.weight_files import WeightFiles, float32_weights

LARGE_MODEL = 50_000_000_000
"""Parameters of a model, above which ``learner.save_hf=auto`` writes no Hugging Face folder."""


def _config_of_role(options: RankOptions) -> LearnerConfig:
    """Return the configuration of a policy's or a critic's learner, without ``auto``."""
    config = options.config
    if options.role == "critic":
        config = config.for_critic(options.algo.critic.optimizer)
    optimizer = resolve_optimizer(config.optimizer, options.folder, options.role, lora=config.lora is not None)
    return config.model_copy(update={"optimizer": optimizer})


def learning_rate(config: OptimizerConfig, step: int, scale: float) -> float:
    """Return the learning rate after ``step`` finished steps: linear warm-up, times the schedule's factor."""
    steps = config.fixed_warmup_steps
    warm = min(1.0, (step + 1) / steps) if steps else 1.0
    return config.fixed_lr * warm * scale


class SequenceRatios:
    """The mean log-ratio of each sequence, which losses cannot compute where its parts are on other ranks."""

    def __init__(self, batch: GlobalBatch, device: torch.device) -> None:
        self._sizes_S = to_device(torch.tensor(batch.sequence_sizes), device)
        self._sums_S = torch.zeros(len(batch.sequence_sizes), dtype=torch.float64, device=device)
        self._numbers: list[torch.Tensor] = []
        self._dtype = torch.float32

    def add(self, log_ratio_N: torch.Tensor, sequence_N: torch.Tensor) -> None:
        """Add what `BatchLoss.log_ratio` returned of a micro-batch."""
        self._sums_S.index_add_(0, sequence_N, log_ratio_N.double())
        self._numbers.append(sequence_N)
        self._dtype = log_ratio_N.dtype

    def reduce(self, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
        """Return, for each micro-batch, the mean log-ratio of each token's sequence, ``[N]``. Collective.

        Args:
            group: ranks that together have each token once; None are all.
        """
        dist.all_reduce(self._sums_S, group=group)
        means_S = (self._sums_S / self._sizes_S).to(self._dtype)
        return [means_S[sequence_N] for sequence_N in self._numbers]


def mask_positions(micro: MicroBatch) -> torch.Tensor:
    """Return the positions at the loss mask, int64 ``[N]`` on the CPU."""
    at_N = micro.mask_L.nonzero()[:, 0]
    assert bool((micro.position_ids_L[at_N] > 0).all()), "a row's first token cannot be trained on"
    return at_N


def score_positions(micro: MicroBatch) -> torch.Tensor:
    """Return the positions of tokens that have a score: all but the first of each row, int64 on the CPU."""
    return ((micro.row_L >= 0) & (micro.position_ids_L > 0)).nonzero()[:, 0]


def first_tokens(micro: MicroBatch, count: int) -> MicroBatch:
    """Return the first tokens of a micro-batch, as rows that share nothing."""
    cut: dict[str, Any] = {
        field.name: value[:count]
        for field in fields(micro)
        if isinstance(value := getattr(micro, field.name), torch.Tensor)
    }
    images = tuple(placed for placed in micro.images if placed.span.end <= count)
    return replace(micro, shares_prefixes=False, support=None, images=images, **cut)


def by_row(micro: MicroBatch, at_N: torch.Tensor, scores_N: torch.Tensor) -> RowScores:
    """Return scores at positions by row, 0 elsewhere."""
    flat_L = torch.zeros(micro.row_L.numel())
    flat_L[at_N] = scores_N.float().cpu()
    lengths = torch.bincount(micro.row_L[micro.row_L >= 0], minlength=len(micro.keys)).tolist()
    rows = torch.split(flat_L[: sum(lengths)], lengths)  # one after the other, before the padding
    return {key: row_T.numpy() for key, row_T in zip(micro.keys, rows, strict=True)}


class BackendRank(LearnerRank, ABC):
    """A rank without its model: subclasses load the model, compute scores and gradients, and name the tensors of the state.

    A critic has a value head in place of the language head, ``algo.critic.optimizer``, and the loss of values.

    Raises:
        ConfigError, ModelError: a model cannot be loaded; see the subclass.
    """

    adapters: Mapping[str, WeightSource] = MappingProxyType({})
    data_parallel_rank: int = 0
    reference: object | None = None
    """The reference policy, if the loss needs one."""

    def __init__(self, options: RankOptions) -> None:
        self.config = _config_of_role(options)
        self.device = options.device
        self.model_folder = options.folder
        self.float32_weights = float32_weights(WeightFiles(options.folder, "model.path").specs())
        self._float8: EngineFloat8 | None = None
        self.name = "critic" if options.role == "critic" else "main"
        self.loss = BatchLoss(options.algo, options.device)
        self._metrics: StepMetrics | None = None
        """Metrics of the incomplete optimizer step."""
        self._offload = CpuOffload()
        self._writing: Future[None] = Future()
        """The write of the newest checkpoint."""
        self._writing.set_result(None)
        seed_everything(options.seed + dist.get_rank())

    @property
    @override
    def float8(self) -> EngineFloat8:
        if self._float8 is None:
            self._float8 = read_engine_float8(self.model_folder)
        return self._float8

    # Hooks

    def computing(self) -> AbstractContextManager[None]:
        """Return the context in which the backend computes."""
        return nullcontext()

    @abstractmethod
    def _add_gradients(self, batch: GlobalBatch, metrics: StepMetrics) -> None:
        """Add the batch's gradient to the weights' gradients, and its losses to ``metrics``."""

    @abstractmethod
    def _reduce(self, metrics: StepMetrics, scale: float) -> dict[str, float]:
        """Return the metrics of the global batch, the losses times ``scale``, on every rank. Collective."""

    @abstractmethod
    def _scale_gradients(self, factor: float) -> None: ...

    @abstractmethod
    def _update(self, lr_scale: float) -> dict[str, float]:
        """Clip the gradient and take an optimizer step, unless the gradient is not finite; return the step's metrics."""

    @abstractmethod
    def _zero_grad(self) -> None: ...

    @abstractmethod
    def _score_rows(self, batch: GlobalBatch, name: str) -> RowScores:
        """Return the scores of every token by row, of ``main``, ``critic`` or ``reference``; 0 for the first token."""

    @abstractmethod
    def _copy_to_reference(self) -> None:
        """Copy the policy's weights into the reference."""

    @abstractmethod
    def _settle_weights(self) -> None:
        """Bring this rank's shards of the weights up to date before they are copied."""

    @abstractmethod
    def _release_gradients(self) -> None: ...

    def _restore_gradients(self) -> None:
        """Allocate what `_release_gradients` released, if the backend does not do so in the backward pass."""

    @abstractmethod
    def _state(self) -> Iterable[torch.Tensor]:
        """Return this rank's shards of weights, optimizer states and reference that are not in CPU memory already."""

    @abstractmethod
    def _saved_state(self) -> Iterable[torch.Tensor]:
        """Return the shards of `_state` that a checkpoint has."""

    @abstractmethod
    def _start_saving(self, folder: Path) -> Future[None]:
        """Begin to write the copies of `_saved_state`."""

    @abstractmethod
    def _load(self, folder: Path) -> None: ...

    # Training and scores

    @override
    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Without a token to train on no optimizer step is taken."""
        self._check_awake()
        metrics = self._metrics = self._metrics or StepMetrics(self.device)
        with self.computing():
            self._add_gradients(batch, metrics)
            if not batch.completes:
                return {}
            self._metrics = None
            reduced = self._reduce(metrics, batch.gradient_scale) | peak_memory(self.device) | compilation()
            if reduced["train/trained_tokens"]:
                self._scale_gradients(batch.gradient_scale)
                reduced |= self._update(batch.lr_scale)
            self._zero_grad()
        return reduced

    @override
    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        self._check_awake()
        with self.computing():
            return self._score_rows(batch, policy)

    @override
    def values(self, batch: GlobalBatch) -> RowScores:
        return self.logprobs(batch, "critic")

    def unknown_model(self, name: str) -> LearnerError:
        """Return the error for a model that is not loaded."""
        hint = "; set algo.kl_coef above 0, or give the learner its folder" if name == "reference" else ""
        names = [self.name] if self.reference is None else [self.name, "reference"]
        return LearnerError(f"the learner has no policy {name!r}, only {', '.join(names)}{hint}")

    @override
    @torch.no_grad()
    def update_reference(self) -> None:
        self._check_awake()
        if self.reference is None:
            raise LearnerError(
                "the learner has no reference policy: set algo.kl_coef above 0, or algo.reference_steps=0"
            )
        with self.computing():
            self._copy_to_reference()

    # Offload

    @property
    @override
    def gathers_on(self) -> torch.device:
        return torch.device("cpu") if self._offload else self.device

    @override
    @torch.no_grad()
    def sleep(self) -> None:
        if self._offload:
            return
        wait([self._writing])  # it reads the copies
        with self.computing():
            self._settle_weights()
            self._release_gradients()
            self._offload.offload(self._state())
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @override
    def wake(self) -> None:
        try:
            self._offload.restore()
            self._restore_gradients()
        except torch.OutOfMemoryError as error:
            raise LearnerError(
                "the learner stays offloaded, as its GPU no longer has the memory that it released: "
                f"{str(error).splitlines()[0]}; another process keeps too much of it while the learner trains"
            ) from error

    def _check_awake(self) -> None:
        if self._offload:
            raise LearnerError("the learner sleeps: its weights are on the CPU; wake it first")

    # Checkpoints

    @property
    def saves_hf(self) -> bool:
        """Whether checkpoints have a Hugging Face folder of the weights; see `LearnerConfig.save_hf`."""
        if self.config.save_hf != "auto":
            return self.config.save_hf
        return sum(math.prod(spec.shape) for spec in self.specs()) <= LARGE_MODEL

    @override
    @torch.no_grad()
    def save(self, folder: Path) -> None:
        wait([self._writing])
        with self.computing():
            self._settle_weights()
            self._offload.copy(self._saved_state())
            self._writing = self._start_saving(folder)

    @override
    def finish_save(self) -> None:
        self._writing.result()

    @override
    def load(self, folder: Path) -> None:
        self._check_awake()
        self.finish_save()
        dist.barrier()
        with self.computing():
            self._load(folder)

    @override
    def close(self) -> None:
        wait([self._writing])
        dist.destroy_process_group()
