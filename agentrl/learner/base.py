"""What one rank of a learner does, whatever backend it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.protocols import TensorSpec
from agentrl.types import RowKey

if TYPE_CHECKING:
    import torch

    from agentrl.batch.microbatch import GlobalBatch, MicroBatch

RowLogprobs = dict[RowKey, NDArray[np.float32]]
"""By row: float32 ``[T]``, each token's log-probability given those before it; 0 for the first."""


@dataclass(slots=True, eq=False)
class RankBatch:
    """One data-parallel rank's share of a `GlobalBatch`; the fields mean what they mean there."""

    micro: tuple[MicroBatch, ...]
    """The micro-batches, equally many on every rank."""
    kind: Literal["rl", "sft"] = "rl"
    """What the mask may hold, and which loss is taken."""
    temperature: float = 1.0
    """Log-probabilities are those of the distribution at this temperature."""
    lr_scale: float = 1.0
    """The schedule's factor on the learning rate."""
    provenance: Literal["strict", "warn"] = "strict"
    """Whether a token with mask 1 that was not sampled is refused or left out."""


def split(batch: GlobalBatch, ranks: int) -> list[RankBatch]:
    """Return each rank's share of ``batch``."""
    counts = {len(micro) for micro in batch.micro}
    assert len(batch.micro) == ranks, f"a batch for {len(batch.micro)} ranks came to a learner of {ranks}"
    assert len(counts) == 1, f"ranks have different numbers of micro-batches: {sorted(counts)}"
    return [RankBatch(micro, batch.kind, batch.temperature, batch.lr_scale, batch.provenance) for micro in batch.micro]


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
    """One rank. All ranks are called in the same order with the same arguments but for their share of the batch."""

    def train_step(self, batch: RankBatch) -> dict[str, float]:
        """Take one optimizer step; return metrics of the global batch, the same on every rank.

        Raises:
            ProvenanceError: the batch would train on a token that nobody sampled, and ``provenance`` is ``strict``.
            LearnerError: the gradient is not finite; weights and optimizer are as before.

        """
        ...

    def logprobs(self, batch: RankBatch, policy: str = "main") -> RowLogprobs:
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
