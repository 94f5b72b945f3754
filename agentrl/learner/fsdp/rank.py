"""One rank of the FSDP2 learner. The process group must exist before it is made."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from agentrl.algo import make_algorithm, sft_loss
from agentrl.batch.microbatch import MicroBatch
from agentrl.batch.provenance import check_micro_batch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.errors import LearnerError
from agentrl.learner.base import RankBatch, RowLogprobs
from agentrl.learner.fsdp.attention import move, packed_rows
from agentrl.learner.fsdp.model import PolicyModel, load_policy, shard
from agentrl.learner.fsdp.optimizer import learning_rate, make_optimizers
from agentrl.learner.fsdp.state import load_state, save_state
from agentrl.learner.fsdp.step import StepFigures, select


class FsdpRank:
    """Implements `agentrl.learner.base.LearnerRank` on a Hugging Face model.

    Args:
        folder: the model, a Hugging Face folder.
        config: precision, optimizer, sharding.
        algo: the loss of ``rl`` batches.
        device: where this rank computes.
        seed: of this rank's random states.

    """

    def __init__(
        self, folder: Path, config: LearnerConfig, algo: AlgoConfig, *, device: torch.device, seed: int
    ) -> None:
        self.config = config
        self.device = device
        self.source = folder
        self.step = 0
        seed_everything(seed + dist.get_rank())
        self.algorithm = make_algorithm(algo)
        self.model: PolicyModel = load_policy(folder, config).to(device)
        self._fsdp = shard(self.model, init_device_mesh(device.type, (dist.get_world_size(),)), config)
        head = self.model.hf.get_output_embeddings()
        self.optimizers = make_optimizers(self.model, head, config.optimizer)

    def train_step(self, batch: RankBatch) -> dict[str, float]:
        """Take one optimizer step; see `LearnerRank.train_step`. A batch that trains no token takes none."""
        if batch.kind == "rl":
            for micro in batch.micro:
                check_micro_batch(micro)
        figures = StepFigures(self.device)
        for index, micro in enumerate(batch.micro):
            self._fsdp.set_requires_gradient_sync(index == len(batch.micro) - 1)
            self._backward(micro, batch, figures)
        result = figures.reduce()
        if result["train/trained_tokens"]:
            result |= self._update(batch.lr_scale)
        self._zero_grad()
        return result

    def _backward(self, micro: MicroBatch, batch: RankBatch, figures: StepFigures) -> None:
        at_N, selected = select(micro, self.device)
        logprobs_N, entropy_N = self._score(micro, at_N, batch.temperature)
        loss_of = self.algorithm.loss if batch.kind == "rl" else sft_loss
        loss, metrics = loss_of(logprobs_N, selected)
        torch.autograd.backward(loss)
        figures.add(loss, entropy_N, metrics)

    def _score(self, micro: MicroBatch, at_N: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        packed = move(packed_rows(micro.position_ids_R_L, micro.row_R_L), self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.autocast == "bfloat16"):
            scored: tuple[torch.Tensor, torch.Tensor] = self.model(
                micro.token_ids_R_L.to(self.device),
                micro.position_ids_R_L.to(self.device),
                packed,
                at_N,
                temperature,
            )
        return scored

    def _reshard(self) -> None:
        """After a forward pass without a backward pass the gathered weights still stand in the sharded ones' place."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _update(self, lr_scale: float) -> dict[str, float]:
        """Clip the gradient and step; the learning rate is that of the step now taken."""
        norm_tensor = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        norm = float(norm_tensor.full_tensor() if isinstance(norm_tensor, DTensor) else norm_tensor)
        if not math.isfinite(norm):
            self._zero_grad()
            raise LearnerError(
                f"the gradient's norm is {norm} in step {self.step + 1}; weights are as before. A smaller "
                "learner.optimizer.lr or learner.autocast=none may help"
            )
        rate = learning_rate(self.config.optimizer, self.step, lr_scale)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.step += 1
        return {"train/grad_norm": norm, "train/lr": rate}

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @torch.no_grad()
    def logprobs(self, batch: RankBatch) -> RowLogprobs:
        """Return the log-probabilities of this rank's rows; see `LearnerRank.logprobs`."""
        found: RowLogprobs = {}
        for micro in batch.micro:
            row = micro.row_R_L.reshape(-1)
            at_N = ((row >= 0) & (micro.position_ids_R_L.reshape(-1) > 0)).nonzero()[:, 0]
            scored_N, _ = self._score(micro, at_N.to(self.device), batch.temperature)
            self._reshard()
            flat = torch.zeros(row.numel())
            flat[at_N] = scored_N.float().cpu()
            found |= {key: flat[row == number].numpy() for number, key in enumerate(micro.keys)}
        return found

    @torch.no_grad()
    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Iterate over whole float32 tensors on this rank's device; see `LearnerRank.weights`."""
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, parameter in self.model.hf.named_parameters():
            bytes_ = parameter.numel() * parameter.element_size()
            if bucket and size + bytes_ > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            data = parameter.detach()
            bucket.append((name, data.full_tensor() if isinstance(data, DTensor) else data))
            size += bytes_
        yield bucket

    def save(self, folder: Path) -> None:
        """Write optimizer and random states and the model; see `LearnerRank.save`."""
        save_state(self, folder)

    def load(self, folder: Path) -> None:
        """Go on from `save`; see `LearnerRank.load`."""
        load_state(self, folder)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy's and Python's global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
