"""Passes of micro-batches through a model by Megatron-Core's schedules, from packed tokens to scores on the last stage.

Legend: ``L`` tokens of a micro-batch, ``N`` tokens to score, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from agentrl.algo.base import TokenScores
from agentrl.batch.microbatch import MicroBatch, Truncation, to_device
from agentrl.batch.packing import MULTIPLE
from agentrl.core.errors import LearnerError
from agentrl.learner.head import HeadOptions
from agentrl.learner.images import ImageTokens
from agentrl.learner.megatron.layers import PackedTokens, logprobs_at, values_at
from agentrl.learner.megatron.model import (
    MegatronModel,
    embedded_tokens,
    local_tokens,
    packed_tokens,
    rank_context,
)
from agentrl.learner.token_support import Coefficients, TokenSupport

Consumer = Callable[[int, TokenScores], torch.Tensor | None]
"""Called with the index of a micro-batch and its scores. Returns the loss if there is a backward pass."""


class Pipeline:
    """Computes the scores of micro-batches, with all ranks of the model and of context parallelism.

    Args:
        model: this rank's part.
        chunks: its chunks, wrapped for data parallelism if the model is trained.
        device: of the rank.
        logits_chunk: tokens whose logits exist at the same time.
        compiled: whether the computation of scores from logits is compiled.
    """

    def __init__(
        self, model: MegatronModel, chunks: Sequence[nn.Module], device: torch.device, logits_chunk: int, compiled: bool
    ) -> None:
        self.model = model
        self.is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        """Whether this rank has the scores."""
        self._is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        self._chunks = [*chunks]
        self._device = device
        self._logits_chunk = logits_chunk
        self._compiled = compiled
        self.replays_routing = False
        """Whether routers use the experts recorded in micro-batches."""
        self.context = rank_context()
        """The ranks that divide a micro-batch's tokens; None without context parallelism."""
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        if self.is_last:
            # The head is applied to the hidden states of some tokens only; see `_scores`.
            model.chunks[-1].output_layer.forward = _hidden_states

    def local_places(self, micro: MicroBatch, at_N: torch.Tensor) -> torch.Tensor:
        """Return the positions in ``at_N`` that this rank scores: those predicted from its tokens."""
        return at_N if self.context is None else at_N[self.context.has(at_N - 1, len(micro.token_ids_L))]

    def run(
        self,
        micros: Sequence[MicroBatch],
        places: Sequence[torch.Tensor],
        temperature: float,
        consume: Consumer,
        *,
        entropy: bool = False,
        backward: bool = False,
        truncation: Truncation | None = None,
        centering: Coefficients | None = None,
    ) -> None:
        """Pass micro-batches through the model. Collective.

        Args:
            micros: on the CPU, as many on all ranks.
            places: of each, int64 positions ``[N]`` of the tokens to score, of `local_places`, on the CPU.
            temperature: logits are divided by it.
            consume: called on the last stage, in the order of ``micros``.
            entropy: whether to compute entropies.
            backward: whether gradients are accumulated.
            truncation: see `HeadOptions.truncation`.
            centering: see `HeadOptions.centering`.
        """
        padding = self._padding(len(micros))
        options = HeadOptions(
            temperature, entropy, self._logits_chunk, self._compiled, truncation=truncation, centering=centering
        )
        inputs = [*zip([*micros, *padding], [*places, *(_NO_PLACES for _ in padding)], strict=True)]

        def score_and_consume(number: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            micro, at_N = inputs[number]
            scores = self._scores(hidden, micro, at_N, options)
            loss = consume(number, scores) if number < len(micros) else scores[0].sum()
            return (loss if loss is not None else hidden.new_zeros(())), torch.zeros((), dtype=torch.int), None

        def step(numbers: Iterator[int], chunk: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            number = next(numbers)
            micro = inputs[number][0]
            ids, positions = (
                tensor[None, local_tokens(len(micro.token_ids_L))]
                for tensor in (micro.token_ids_L, micro.position_ids_L)
            )
            ids, positions = to_device(ids, self._device), to_device(positions, self._device)
            images, rotary_3_L = self._image_inputs(micro)
            options: dict[str, Any] = {"packed_seq_params": self._packed_tokens(micro, rotary_3_L)}
            if images is not None and self._is_first:
                options["images"] = images.slice(embedded_tokens(self.model, len(micro.token_ids_L)))
            hidden = chunk(ids, positions, None, **options)
            return hidden, partial(score_and_consume, number)

        numbers = [iter(range(len(inputs))) for _ in self._chunks]
        with torch.set_grad_enabled(backward):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=numbers,
                model=self._chunks,
                num_microbatches=len(inputs),
                seq_length=len(inputs[0][0].token_ids_L),  # of no effect: stages send shapes
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _padding(self, count: int) -> list[MicroBatch]:
        """Return micro-batches of padding: the interleaved schedule needs a multiple of the number of stages."""
        if len(self._chunks) == 1:
            return []
        return [_only_padding() for _ in range(-count % self._stages)]

    def _image_inputs(self, micro: MicroBatch) -> tuple[ImageTokens | None, torch.Tensor | None]:
        """Return the images of a micro-batch, and rotary positions ``[3, L]`` if they are not those in the rows.

        Raises:
            LearnerError: the model reads no images.
        """
        if not micro.images:
            return None, None
        if self.model.images is None:
            raise LearnerError(
                f"the batch has images, but the model with model_type={self.model.hf.model_type!r} reads none; set "
                f"{self.model.key} to a vision-language model"
            )
        return self.model.images.inputs.read(micro)

    def _packed_tokens(self, micro: MicroBatch, rotary_3_L: torch.Tensor | None) -> PackedTokens:
        experts_L = micro.experts_L if self.replays_routing else None
        weight = float(micro.weight_L.sum())
        positions_L = micro.position_ids_L
        return packed_tokens(self.model, positions_L, micro.row_L, self._device, experts_L, weight, rotary_3_L)

    def _scores(self, hidden: torch.Tensor, micro: MicroBatch, at_N: torch.Tensor, options: HeadOptions) -> TokenScores:
        """Return the scores of tokens from the last stage's output ``[1, L, H]``. A value has no entropy."""
        chunk = self.model.chunks[-1]
        places_N = to_device(at_N - 1 - local_tokens(len(micro.token_ids_L)).start, self._device)
        if self.model.values:
            return TokenScores(values_at(chunk, hidden[0], places_N), None)
        if micro.support is None and options.centering is not None:  # padding only
            options = replace(options, centering=None)
        support = None if micro.support is None else TokenSupport(micro.support.select(at_N.numpy()), self._device)
        targets_N = to_device(micro.token_ids_L[at_N], self._device)
        return logprobs_at(chunk, hidden[0], places_N, targets_N, options, support)


_NO_PLACES = torch.zeros(0, dtype=torch.int64)


def _only_padding() -> MicroBatch:
    zeros_L, rows_L = torch.zeros(MULTIPLE), torch.full((MULTIPLE,), -1, dtype=torch.int32)
    positions_L = torch.arange(MULTIPLE)
    nothing_L = torch.zeros(MULTIPLE, dtype=torch.uint8)
    return MicroBatch(
        token_ids_L=torch.zeros_like(positions_L),
        position_ids_L=positions_L,
        row_L=rows_L,
        mask_L=nothing_L.bool(),
        weight_L=zeros_L,
        advantages_L=zeros_L,
        logprobs_L=zeros_L,
        provenance_L=nothing_L,
        versions_L=rows_L,
        requests_L=rows_L,
        keys=(),
    )


def _hidden_states(hidden: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
    """Replace the ``forward`` of a head: return the hidden states."""
    return hidden, None
