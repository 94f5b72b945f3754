"""A fake learner that records its batches and learns nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import CheckpointError, LearnerError

if TYPE_CHECKING:
    import torch

    from agentrl.batch.microbatch import GlobalBatch
    from agentrl.core.types import RowKey
    from agentrl.distributed.base import WeightGroup
    from agentrl.learner.base import WeightBucket
    from agentrl.learner.export import WeightExporter

_FILE = "fake_learner.json"


class FakeLearner:
    """Implements `agentrl.learner.base.LearnerGroup`. Its log-probabilities, also of the reference, are the sampler's."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        fail_at: int | None = None,
        adapters: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Create a learner that has trained nothing.

        Args:
            weights: by Hugging Face name.
            metrics: those of every step.
            fail_at: the step (from 0) that fails.
            adapters: tensors by PEFT name, by policy; without them there are no LoRA adapters.
        """
        self.batches: list[GlobalBatch] = []
        self.steps = 0
        self.closed = False
        self.sleeping = False
        self.shares_prefixes = True
        self._named = dict(weights or {})
        self._exporter: WeightExporter | None = None
        self._metrics = dict(metrics or {"loss": 0.0})
        self._fail_at = fail_at
        self._adapters = adapters or {}

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Append the batch to ``batches``.

        Raises:
            LearnerError: this is the step ``fail_at``, or the learner sleeps.
        """
        self._check_awake()
        if self.steps == self._fail_at:
            raise LearnerError(f"fails at step {self.steps}, as configured")
        self.batches.append(batch)
        self.steps += batch.completes
        return dict(self._metrics) if batch.completes else {}

    def update_reference(self) -> None:
        """There is no reference policy."""
        raise LearnerError("the fake learner has no reference policy; set algo.reference_steps=0")

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> dict[RowKey, Any]:
        """Return by row key the float32 log-probabilities ``[T]`` in the batch, which are the sampler's."""
        self._check_awake()
        return {
            key: micro.logprobs_L[micro.row_L == index].clone()
            for rank in batch.micro
            for micro in rank
            for index, key in enumerate(micro.keys)
        }

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        """Iterate over the weights in buckets of at most ``bucket_bytes``, with at least one tensor."""
        return self._weights().buckets(bucket_bytes, dtype)

    def buckets_by_sender(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        """Iterate over `buckets`: rank 0 sends all of them."""
        return self.buckets(bucket_bytes, dtype)

    def adapters(self, dtype: str | None = None, policy: str = "main") -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of a policy's adapter in a dtype, by default their own."""
        import torch

        adapter = self._adapters.get(policy, {})
        return [(name, tensor.to(getattr(torch, dtype)) if dtype else tensor) for name, tensor in adapter.items()]

    def open_group(
        self, urls: Sequence[str], size: int, backend: str, timeout_s: float, sender: int = 0
    ) -> WeightGroup:
        """Open a real weight sync group."""
        return self._weights().open_group(urls, size, backend, timeout_s)

    def join_group(self, group: WeightGroup, sender: int = 0) -> None:
        """Join a weight sync group."""
        self._weights().join_group(group)

    def leave_group(self) -> None:
        """Leave the weight sync group."""
        self._weights().leave_group()

    def sleep(self) -> None:
        """Set ``sleeping``."""
        self.sleeping = True

    def wake(self) -> None:
        """Clear ``sleeping``."""
        self.sleeping = False

    def _weights(self) -> WeightExporter:
        if self._exporter is None:
            from agentrl.learner.export import NamedTensors, WeightExporter

            self._exporter = WeightExporter(NamedTensors(self._named))
        return self._exporter

    def _check_awake(self) -> None:
        if self.sleeping:
            raise LearnerError("the learner sleeps; wake it first")

    def save(self, folder: Path) -> None:
        """Write the number of steps; ``folder/model`` stays empty."""
        (folder / "model").mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(json.dumps({"steps": self.steps}))

    def finish_save(self) -> None:
        """Do nothing: `save` has written everything."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            CheckpointError: no `FakeLearner` saved there.
        """
        self._check_awake()
        if not (folder / _FILE).is_file():
            raise CheckpointError(f"{folder} holds no checkpoint of a FakeLearner")
        self.steps = int(json.loads((folder / _FILE).read_text())["steps"])

    def close(self) -> None:
        """Set ``closed``."""
        self.closed = True
