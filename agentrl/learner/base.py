"""The contracts of a learner: its ranks, its driver side, and the export of its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import LearnerError
from agentrl.core.types import RowKey
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.models.engine_float8 import EngineFloat8

if TYPE_CHECKING:
    import torch

    from agentrl.batch.microbatch import GlobalBatch
    from agentrl.distributed.sglang_loader.agentrl_weight_loaders import Changes

RowScores = dict[RowKey, NDArray[np.float32]]
"""By row: float32 ``[T]``, a number for each token given the tokens before it; 0 for the first."""
RowLogprobs = RowScores
"""Log-probabilities of tokens."""
Role = Literal["policy", "critic"]
"""The model that a rank trains: with a language head, or with a value head."""


class WeightSource(Protocol):
    """Full (unsharded) weights by name."""

    float32_weights: frozenset[str] = frozenset()
    """Names of weights that the model's folder has in float32 while others have a smaller dtype: they are sent without a cast."""

    @property
    def float8(self) -> EngineFloat8:
        """How engines have the weights in float8.

        Raises:
            ConfigError: see `read_engine_float8`.
            LearnerError: it is not known, as for adapters.
        """
        raise LearnerError("which of these weights engines have in float8 is not known")

    @property
    def gathers_on(self) -> torch.device:
        """Device of the tensors that `gather` writes into; the CPU while the rank sleeps."""

    def specs(self) -> Sequence[TensorSpec]:
        """Return the weights' Hugging Face names, dtypes and shapes, always in the same order; tied weights once."""

    def gather(self, into: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write weights, cast, into tensors on `gathers_on`. Collective: every rank must call it with the same names."""


class StreamSource(WeightSource, Protocol):
    """A part of the weights, which some ranks gather and the first of them sends: a stream of buckets."""

    ranks: Sequence[int]
    """The ranks that call `gather`, the sender first."""


@runtime_checkable
class StreamedWeights(Protocol):
    """What a `LearnerRank` may have in addition: ranks that each send a part of the weights."""

    def streams(self) -> Sequence[StreamSource]:
        """Return the streams in which this rank takes part, with current weights.

        Collective: all ranks call it before the streams' weights are gathered. Two streams of several ranks have the same order
        on all of them. All ranks' streams together have each weight once; weights that a loader joins are in one stream.
        """


class LearnerRank(WeightSource, Protocol):
    """One rank of a learner. All ranks are called in the same order, with the same arguments, or their part of a batch.

    While a rank sleeps, only the methods that `RankGroup.sleep` lists work.
    """

    @property
    def adapters(self) -> Mapping[str, WeightSource]:
        """The trained LoRA adapters of each policy, by their names in a PEFT folder; empty without LoRA."""

    @property
    def data_parallel_rank(self) -> int:
        """Index of the micro-batches in `GlobalBatch.micro` that this rank computes, alone or with other ranks."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether the rank takes micro-batches that share prefixes; see `RankGroup.shares_prefixes`."""

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Add the gradient of ``batch``, and take an optimizer step if it completes one (`GlobalBatch.completes`).

        The batch that completes the step multiplies the whole gradient by its `GlobalBatch.gradient_scale`. A gradient that is
        not finite is dropped, and the step skipped: weights and optimizer stay as they are.

        Args:
            batch: with this rank's micro-batches alone, as ``batch.micro[0]``; `check_provenance` has passed it.

        Returns:
            metrics of the optimizer step, the same on every rank; none if ``batch`` does not complete it. If there was a token
            to train on, ``train/nonfinite_gradients`` is 1 if the step was skipped, else 0.

        Raises:
            LearnerError: the rank sleeps.
        """

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        """Return the log-probabilities of the rows in ``batch.micro[0]``.

        Among ranks that compute the same micro-batches, one returns all rows; the others return the same or none.

        Raises:
            LearnerError: no such policy is loaded.
        """

    def update_reference(self) -> None:
        """Make the reference policy a copy of the policy; see `LearnerGroup.update_reference`."""

    def values(self, batch: GlobalBatch) -> RowScores:
        """Return the values of the rows in ``batch.micro[0]``; see `CriticGroup.values`.

        Raises:
            LearnerError: the rank is not a critic's.
        """

    def sleep(self) -> None:
        """Offload to the CPU and release the device's memory; see `RankGroup.sleep`."""

    def wake(self) -> None:
        """Restore the device's memory."""

    def save(self, folder: Path) -> None:
        """Begin to write ``folder``; see `RankGroup.save`."""

    def finish_save(self) -> None:
        """Wait until this rank has written its part, or raise why it could not. May be called from any thread."""

    def load(self, folder: Path) -> None:
        """Load what `save` wrote, on any number of ranks.

        Raises:
            CheckpointError: the folder is incomplete, or of another model or optimizer.
        """

    def close(self) -> None:
        """Leave the process group."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The arguments of a rank's constructor."""

    folder: Path
    """Hugging Face folder of the model."""
    config: LearnerConfig
    """Precision, optimizer, sharding."""
    algo: AlgoConfig
    """The algorithm, whose loss the rank computes."""
    device: torch.device
    """Where the rank computes."""
    seed: int
    """Seed of random states, the same on all ranks; each adds its rank."""
    reference: Path | None = None
    """Folder of the reference policy, if the loss needs one."""
    role: Role = "policy"
    """The model that the rank trains."""
    trust_remote_code: bool = False
    """``model.trust_remote_code``, for tokenizers and image processors; weights are loaded with the code of transformers only."""

    @property
    def replays_routing(self) -> bool:
        """Whether the trained model's routers take the experts that the engine chose."""
        return self.algo.replays_routing and self.role == "policy"


RankClass = Callable[[RankOptions], LearnerRank]
"""Loads this process's rank; the process group of all ranks must exist. Raises `ModelError` if a folder cannot be loaded."""


class LearnerBackend(ABC):
    """A learner backend before its ranks exist. Nothing heavy is imported before `rank_class`."""

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """The number of data-parallel groups: the learner's ranks, over those that compute a micro-batch together."""

    @abstractmethod
    def check(self, algo: AlgoConfig, models: Sequence[Path]) -> None:
        """Check the configuration before anything starts.

        Args:
            algo: its loss and critic are checked.
            models: folders of the models to load that are known already: policy, critic, reference.

        Raises:
            ConfigError: the backend cannot train this; the message has values and keys.
        """

    @abstractmethod
    def rank_class(self) -> RankClass:
        """Import the class of the ranks."""


class WeightBucket(Protocol):
    """Full (unsharded) weights that ranks hold on their device until the next bucket is requested.

    A bucket of `WeightExport.buckets` is on all ranks, a bucket of `WeightExport.buckets_by_sender` on the ranks that have
    gathered it. "Rank 0" in the docstrings of methods is the bucket's sender. Methods block.
    """

    specs: Sequence[TensorSpec]
    """Names, dtypes and shapes of the weights, in their order in memory."""
    last: bool
    """Whether this is the last bucket."""
    sender: int
    """The rank that sends it: 0, unless it comes from `WeightExport.buckets_by_sender`."""

    def fingerprint(self) -> int:
        """Return 64 bits that differ if any weight differs; see `agentrl.models.weight_checksum.fingerprint`."""

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights on the CPU of the calling process, read-only."""

    def save(self, file: Path) -> None:
        """Write the weights from rank 0 as safetensors."""

    def changes(self, base: str | None, version: str) -> Changes:
        """Return how the weights differ from those of the call with ``version=base``, and keep a copy of them in rank 0's memory.

        Args:
            base: name of the weights to compare with; None: all are returned.
            version: name of these weights.

        Raises:
            LearnerError: the last call was not that with ``version=base``, or a changed weight is not finite.
        """

    def broadcast(self) -> None:
        """Broadcast the weights from their sender in the group that it has joined with `LearnerGroup.join_group`.

        They are sent as one tensor of bytes, large weights one by one: see `flat_bucket.broadcast_as_one`.

        Raises:
            EngineError: another process of the group died or is too slow, or `leave_group` was called.
            LearnerError: no group was joined, or the learner sleeps and the group uses NCCL.
        """

    def ipc_handles(self) -> list[str]:
        """Return, by rank, handles that open the weights in another process on the same GPU. For `WeightExport.buckets` only.

        Each is a bucket as SGLang's ``/update_weights_from_tensor`` takes it; see `agentrl.distributed.flat_bucket.serialize`.

        Raises:
            LearnerError: the weights are not on a GPU.
        """


class RankGroup(Protocol):
    """The driver side of ranks: takes global batches, returns results on the CPU."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether batches may be packed with ``share_prefixes``: no layer mixes rows other than by attention. May block."""

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take an optimizer step and return its metrics; none if ``batch`` does not complete it. See `LearnerRank.train_step`.

        Raises:
            LearnerError: a rank failed.
            ProvenanceError: the batch would train on a token that no engine sampled; see `check_provenance`.
        """

    def sleep(self) -> None:
        """Offload weights, optimizer and reference to the CPU, and release the device's memory. Idempotent.

        A sleeping learner supports `LearnerGroup.buckets` (without ``ipc_handles`` and NCCL's ``broadcast``), `save` and
        `close`; all other calls raise `LearnerError`.
        """

    def wake(self) -> None:
        """Restore the device's memory. Idempotent.

        Raises:
            LearnerError: there is not enough memory; the learner stays offloaded.
        """

    def save(self, folder: Path) -> None:
        """Begin to write optimizer, scheduler and random states and the model as a Hugging Face folder ``folder/model``.

        When it returns, the state has been copied and training may continue. It waits for an earlier save.
        """

    def finish_save(self) -> None:
        """Wait until all of the folder is written. May be called from any thread, also during training.

        Raises:
            LearnerError, OSError: it could not be written.
        """

    def load(self, folder: Path) -> None:
        """Load what `save` wrote, on any number of ranks.

        Raises:
            CheckpointError: the folder is incomplete, or of another model.
        """

    def close(self) -> None:
        """End the ranks."""


class WeightExport(Protocol):
    """Export of the policy's weights: in buckets, as copies of LoRA adapters, and through a broadcast group."""

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        """Iterate over the weights by Hugging Face name, tied weights once. Stopping early is allowed.

        Args:
            bucket_bytes: size of a bucket; a larger tensor gets a separate bucket.
            dtype: weights are cast to it, such as ``bfloat16``; None keeps the learner's dtype. With ``float8_e4m3fn`` those
                of `WeightSource.float8` are quantised, each with its scales in the same bucket, and the others are bfloat16.
        """

    def buckets_by_sender(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        """Iterate over the weights like `buckets`, in another order, each bucket gathered by its sender and few other ranks.

        Senders take turns: while a bucket is sent, the next sender gathers. Rank 0 sends everything of a learner without
        `StreamedWeights`.
        """

    def adapters(self, dtype: str | None = None, policy: str = "main") -> list[tuple[str, torch.Tensor]]:
        """Return copies of a policy's LoRA adapters on the CPU, by their names in a PEFT folder; none without LoRA.

        Args:
            dtype: they are cast to it; None keeps the learner's dtype.
            policy: one of ``learner.lora.policies``.
        """

    def open_group(
        self, urls: Sequence[str], size: int, backend: str, timeout_s: float, sender: int = 0
    ) -> WeightGroup:
        """Open, in a rank's process, the store of a group, at an address that the engines at ``urls`` can reach.

        Args:
            urls: addresses of the engines.
            size: number of processes in the group, including the sender.
            backend: ``nccl`` or ``gloo``.
            timeout_s: time limit of joining, and later of each broadcast.
            sender: rank that opens the group; it leaves an earlier one.
        """

    def join_group(self, group: WeightGroup, sender: int = 0) -> None:
        """Let the sender join the group that `open_group` opened on it, as the group's rank 0; returns when all have joined.

        Raises:
            EngineError: not all joined in time, or `leave_group` was called.
        """

    def leave_group(self) -> None:
        """Leave all senders' groups, if any; pending joins and broadcasts fail. May be called from any thread at any time."""


class LearnerGroup(RankGroup, WeightExport, Protocol):
    """The driver side of a learner: the ranks that train the policy and export its weights."""

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        """Return, by row key, float32 log-probabilities ``[T]`` of each token given the tokens before it (0 for the first).

        Args:
            batch: rows to score, at its temperature.
            policy: ``main`` is the trained policy, ``reference`` the frozen one of the KL term.

        Raises:
            LearnerError: no such policy is loaded, or a rank failed.
        """

    def update_reference(self) -> None:
        """Make the reference policy a copy of the policy. Checkpoints have it from then on.

        Raises:
            LearnerError: there is no reference, or it is of another architecture.
        """


class CriticGroup(RankGroup, Protocol):
    """The driver side of a critic: a learner whose model has a value head, which takes ``value`` batches."""

    def values(self, batch: GlobalBatch) -> RowScores:
        """Return, by row key, float32 values ``[T]`` of the states in which the tokens were sampled.

        A state is the text before the token, so that its value is predicted from the same position as its log-probability.

        Raises:
            LearnerError: a rank failed.
        """
