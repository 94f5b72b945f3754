"""The learner's input. Legend: ``L`` tokens of a micro-batch.

The mask, advantage and log-probability of a token stand at the token's own position; the token is predicted from the
position before it. All denominators are already in the weights: the loss is the plain sum ``Σ weight · loss(token)``, so
neither packing nor the number of ranks changes the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.core.images import ImageSpan, PlacedImage
from agentrl.core.sampling_support import SamplingSupport
from agentrl.core.types import RowKey

Kind = Literal["rl", "sft", "value"]
"""Reinforcement learning, supervised fine-tuning, or a critic's values."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows packed one after the other into ``L`` tokens. All tensors are on the CPU and shaped ``[L]``."""

    token_ids_L: torch.Tensor
    """int64; padding holds the pad token."""
    position_ids_L: torch.Tensor
    """int64; starts at 0 in every row. Padding counts as a separate row, so attention never crosses into it."""
    row_L: torch.Tensor
    """int32 index into ``keys``; -1 is padding."""
    mask_L: torch.Tensor
    """bool loss mask; never set on a row's first token."""
    weight_L: torch.Tensor
    """float32; 0 where the mask is 0, else the token's weight in the loss of the global batch."""
    advantages_L: torch.Tensor
    """float32; 0 where the mask is 0. Zeros in supervised batches."""
    logprobs_L: torch.Tensor
    """float32 log-probabilities from the sampler; 0 where not sampled."""
    provenance_L: torch.Tensor
    """uint8 `Provenance`."""
    versions_L: torch.Tensor
    """int32 policy version; -1 where not sampled."""
    requests_L: torch.Tensor
    """int32 request index; -1 where not sampled."""
    keys: tuple[RowKey, ...]
    """The rows packed here."""
    sequences: tuple[int, ...] = ()
    """Number of each row's sequence, all that one agent sampled in a rollout, in the global batch."""
    sources: tuple[int, ...] = ()
    """Number of each row's source in a mixed run, in the order of ``sources``; else empty."""
    shares_prefixes: bool = False
    """Whether the learner computes tokens that several rows begin with only once; see `agentrl.batch.prefix_tree`."""
    learner_logprobs_L: torch.Tensor | None = None
    """float32 log-probabilities of the learner before the first optimizer step of the training step, if computed."""
    correction_L: torch.Tensor | None = None
    """float32 importance weights, if the driver computed them."""
    values_L: torch.Tensor | None = None
    """float32 values of the critic before the first optimizer step of the training step, in its batches."""
    returns_L: torch.Tensor | None = None
    """float32 returns that the critic learns to predict, in its batches."""
    experts_L: torch.Tensor | None = None
    """uint8 or int16 ``[L, layers, K]`` experts that routers of the policy take, where they are numbers of experts; elsewhere,
    and in all batches without, routers choose."""
    support: SamplingSupport | None = None
    """Sampling support of the ``L`` tokens: the ids over which log-probabilities of the policy and of the reference are
    renormalised, if it is known. None: log-probabilities are those of the whole vocabulary, or see `GlobalBatch.truncation`."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the rows, with their tokens among the ``L``, in the order of the tokens. An image of several rows is one object,
    which is pickled once."""
    needs_vision: bool = False
    """Whether this micro-batch has images, or one that another rank computes at the same time: all of them run the vision tower
    then, as its weights are sharded."""

    @property
    def image_mask_L(self) -> torch.Tensor:
        """Bools of the tokens that stand for images."""
        return torch.from_numpy(span_mask(len(self.token_ids_L), [placed.span for placed in self.images]))


def span_mask(length: int, spans: Iterable[ImageSpan]) -> NDArray[np.bool_]:
    """Return which of ``length`` tokens are in spans of images."""
    mask = np.zeros(length, np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class GlobalBatch:
    """One optimizer step or a part of it: equally many micro-batches for each data-parallel rank."""

    micro: tuple[tuple[MicroBatch, ...], ...]
    """``micro[rank][i]``, by data-parallel rank. A rank receives a batch with only its own, ``micro[0]``."""
    kind: Kind = "rl"
    """The learner's loss. In ``sft`` the mask may hold demonstrated and observed tokens; else mask 1 implies sampled
    (`check_provenance`)."""
    temperature: float = 1.0
    """The sampling temperature; the learner computes log-probabilities at the same temperature."""
    truncation: Truncation | None = None
    """What sampling left of the distribution at this temperature, if the policy's log-probabilities are those of the rest."""
    lr_scale: float = 1.0
    """The schedule's factor on the learning rate for this step."""
    sequence_sizes: tuple[int, ...] = ()
    """Trained tokens of each sequence, by its number."""
    divided_sequences: bool = False
    """Whether rows of a sequence are in different micro-batches."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the batch, such as tokens and padding, logged with the step."""
    policy: str = "main"
    """Which of several policies the batch trains or scores. All of its rows are this policy's."""
    completes: bool = True
    """Whether the optimizer step is taken. Else the batch is a part of it: gradient and metrics are added to those of the next
    batch."""
    gradient_scale: float = 1.0
    """Factor of the whole gradient and of the loss, with those of the parts before."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Top-k and top-p sampling, both of the whole distribution as in SGLang.

    The fewest tokens whose share reaches ``top_p`` are kept, and of these the ``top_k`` most probable.
    """

    top_k: int = -1
    """-1 keeps all tokens."""
    top_p: float = 1.0


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the CPU on ``device``; a GPU copies it without the host waiting."""
    assert tensor.device.type == "cpu", tensor.device
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
