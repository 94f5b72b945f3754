"""What one rank of a learner does, whatever backend it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.core.types import RowKey
from agentrl.distributed.base import TensorSpec, WeightGroup

if TYPE_CHECKING:
    import torch

    from agentrl.batch.microbatch import GlobalBatch

RowLogprobs = dict[RowKey, NDArray[np.float32]]
"""By row: float32 ``[T]``, each token's log-probability given those before it; 0 for the first."""


class WeightSource(Protocol):
    """Gives whole weights."""

    @property
    def gathers_on(self) -> torch.device:
        """Where `whole` returns weights: the device, or the CPU while the rank sleeps."""
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """Return what the weights are, by Hugging Face name, tied ones once; always the same and in the same order."""
        ...

    def whole(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight, cast to ``dtype``. Every rank must ask for it, as gathering is collective."""
        ...


class LearnerRank(WeightSource, Protocol):
    """One rank of a learner. All ranks are called in the same order, with the same arguments or their `for_rank` share."""

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take one optimizer step on ``batch.micro`` of this rank, which `admit` has checked.

        Returns:
            metrics of the global batch, the same on every rank.

        Raises:
            LearnerError: the gradient is not finite; weights and optimizer are as before.

        """
        ...

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        """Return the log-probabilities of this rank's rows.

        Raises:
            LearnerError: no such policy is loaded.

        """
        ...

    def sleep(self) -> None:
        """Give the device's memory back, the contents kept on the CPU; see `LearnerGroup.sleep`."""
        ...

    def wake(self) -> None:
        """Take the device's memory again."""
        ...

    def save(self, folder: Path) -> None:
        """Write ``folder``, which appears whole or not at all."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, on any number of ranks.

        Raises:
            CheckpointError: the folder is not whole, or of another model or optimizer.

        """
        ...

    def close(self) -> None:
        """Leave the process group."""
        ...


class WeightBucket(Protocol):
    """Some of the learner's weights, whole, held by every rank on its device until the next bucket is asked for.

    Methods block.
    """

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """What is in it, in the order in which it is sent."""
        ...

    @property
    def last(self) -> bool:
        """Whether no bucket follows."""
        ...

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights on the CPU of the calling process; they must not be written to."""
        ...

    def save(self, file: Path) -> None:
        """Have rank 0 write them as safetensors."""
        ...

    def broadcast(self) -> None:
        """Have rank 0 send them, in order, in the group that `LearnerGroup.join_group` joined.

        Raises:
            EngineError: another process of the group is gone or too slow, or `leave_group` was called.
            LearnerError: no group was joined, or the learner sleeps and the group is of NCCL.
        """
        ...

    def share(self) -> list[str]:
        """Return by rank what opens the weights in another process on the same GPU.

        Each is what SGLang's ``/update_weights_from_tensor`` takes: a pickle of names and CUDA handles, in base64.

        Raises:
            LearnerError: they are not on a GPU.
        """
        ...


class LearnerGroup(Protocol):
    """The driver's side of a learner: global batch in, results on the CPU out."""

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take one optimizer step and return its metrics.

        Raises:
            LearnerError: a rank failed; `ProvenanceError` where the batch may not be trained on.

        """
        ...

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> dict[RowKey, Any]:
        """Return, by row key, float32 log-probabilities ``[T]`` of each token given those before it (0 for the first).

        Args:
            batch: rows to score, at its temperature.
            policy: whose: ``main`` is the trained one, ``reference`` the frozen one that the loss is held to.

        Raises:
            LearnerError: no such policy is loaded, or a rank failed.

        """
        ...

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        """Iterate over the weights by Hugging Face name, tied ones once. Stopping early is allowed.

        Args:
            bucket_bytes: size of a bucket; a larger tensor makes one of its own.
            dtype: what they are cast to, such as ``bfloat16``; None leaves them as the learner holds them.

        """
        ...

    def open_group(self, urls: Sequence[str], size: int, backend: str, timeout_s: float) -> WeightGroup:
        """Open, in rank 0's process, the meeting point of a group, at an address that engines at ``urls`` can reach.

        Args:
            urls: where the engines answer.
            size: processes of the group, rank 0 included.
            backend: ``nccl`` or ``gloo``.
            timeout_s: seconds that joining, and later each tensor, may take.

        """
        ...

    def join_group(self, group: WeightGroup) -> None:
        """Have rank 0 join the group that `open_group` opened, as its rank 0; returns when all have joined.

        Raises:
            EngineError: not all were there in time, or `leave_group` was called.
        """
        ...

    def leave_group(self) -> None:
        """Leave the group, if there is one; what still joins or broadcasts in it fails. From any thread, at any time."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back: weights, optimizer and reference go to the CPU. Twice is once.

        A sleeping learner gives `buckets`, whose ``share`` and whose ``broadcast`` by NCCL fail, saves and closes; all
        else raises `LearnerError`.
        """
        ...

    def wake(self) -> None:
        """Take the device's memory again. Nothing where the learner is awake.

        Raises:
            LearnerError: there is not enough; the learner sleeps on.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write optimizer, scheduler and random states and the model as a Hugging Face folder ``folder/model``."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, on any number of ranks.

        Raises:
            CheckpointError: the folder is not whole, or of another model.

        """
        ...

    def close(self) -> None:
        """End the ranks."""
        ...
