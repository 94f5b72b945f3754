"""Passes of micro-batches through a model by Megatron-Core's schedules, from packed tokens to scores on the last stage.

Legend: ``L`` tokens of a micro-batch, ``N`` tokens to score, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from agentrl.batch.microbatch import MicroBatch
from agentrl.batch.packing import MULTIPLE
from agentrl.learner.device import to_device
from agentrl.learner.head import HeadOptions
from agentrl.learner.megatron.heads import logprobs_at, values_at
from agentrl.learner.megatron.layers import PackedTokens
from agentrl.learner.megatron.model import MegatronModel, own_tokens, packed_tokens, rank_context

Scores = tuple[torch.Tensor, torch.Tensor | None]
"""Log-probabilities or values ``[N]``, at least float32, and entropies if requested."""
Consumer = Callable[[int, Scores], torch.Tensor | None]
"""Gets the number of a micro-batch and its scores, and returns the loss for a backward pass."""


class Pipeline:
    """Computes the scores of micro-batches, with all ranks that have a part of them.

    Args:
        model: this rank's part.
        chunks: its chunks, as they are called: wrapped for data parallelism, or not.
        device: of the rank.
        logits_chunk: tokens whose logits exist at the same time.
        compiled: whether what follows the head's products is compiled.

    """

    def __init__(
        self, model: MegatronModel, chunks: Sequence[nn.Module], device: torch.device, logits_chunk: int, compiled: bool
    ) -> None:
        self.model = model
        self.is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        """Whether this rank has the scores."""
        self._chunks = [*chunks]
        self._device = device
        self._logits_chunk = logits_chunk
        self._compiled = compiled
        self.replays_routing = False
        """Whether routers take the experts of micro-batches."""
        self.context = rank_context()
        """The ranks that have the other parts of a micro-batch's tokens."""
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        if self.is_last:
            # The head is applied to the hidden states of some tokens only; see `_scores`.
            model.chunks[-1].output_layer.forward = _hidden_states

    def own(self, micro: MicroBatch, at_N: torch.Tensor) -> torch.Tensor:
        """Return those of the tokens at ``at_N`` that this rank scores: those predicted from its part."""
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
    ) -> None:
        """Pass micro-batches through the model. Collective.

        Args:
            micros: on the CPU, as many on all ranks.
            places: of each, int64 positions ``[N]`` of the tokens to score, of `own`, on the CPU.
            temperature: logits are divided by it.
            consume: called on the last stage, in the order of ``micros``.
            entropy: whether to compute entropies.
            backward: whether gradients are accumulated.

        """
        padding = self._padding(len(micros))
        given = [*zip([*micros, *padding], [*places, *(_NOWHERE for _ in padding)], strict=True)]

        def scored(number: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            micro, at_N = given[number]
            scores = self._scores(hidden, micro, at_N, temperature, entropy)
            loss = consume(number, scores) if number < len(micros) else scores[0].sum()
            return (loss if loss is not None else hidden.new_zeros(())), torch.zeros((), dtype=torch.int), None

        def step(numbers: Iterator[int], chunk: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            number = next(numbers)
            micro = given[number][0]
            ids, positions = (
                each[None, own_tokens(len(micro.token_ids_L))] for each in (micro.token_ids_L, micro.position_ids_L)
            )
            ids, positions = to_device(ids, self._device), to_device(positions, self._device)
            hidden = chunk(ids, positions, None, packed_seq_params=self._packed(micro))
            return hidden, partial(scored, number)

        numbers = [iter(range(len(given))) for _ in self._chunks]
        with torch.set_grad_enabled(backward):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=numbers,
                model=self._chunks,
                num_microbatches=len(given),
                seq_length=len(given[0][0].token_ids_L),  # of no effect: stages send shapes
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _padding(self, count: int) -> list[MicroBatch]:
        """Return micro-batches of padding with which the interleaved schedule, which computes groups of them, can run."""
        if len(self._chunks) == 1:
            return []
        return [_only_padding() for _ in range(-count % self._stages)]

    def _packed(self, micro: MicroBatch) -> PackedTokens:
        experts_L = micro.experts_L if self.replays_routing else None
        return packed_tokens(self.model, micro.position_ids_L, micro.row_L, self._device, experts_L)

    def _scores(
        self, hidden: torch.Tensor, micro: MicroBatch, at_N: torch.Tensor, temperature: float, entropy: bool
    ) -> Scores:
        """Return the scores of tokens from the last stage's output ``[1, L, H]``. A value has no entropy."""
        chunk = self.model.chunks[-1]
        places_N = to_device(at_N - 1 - own_tokens(len(micro.token_ids_L)).start, self._device)
        if self.model.values:
            return values_at(chunk, hidden[0], places_N), None
        options = HeadOptions(temperature, entropy, self._logits_chunk, self._compiled)
        return logprobs_at(chunk, hidden[0], places_N, to_device(micro.token_ids_L[at_N], self._device), options)


_NOWHERE = torch.zeros(0, dtype=torch.int64)


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
    """Take the place of a head's ``forward``."""
    return hidden, None
