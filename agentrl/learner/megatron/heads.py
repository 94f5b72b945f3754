"""The heads of the last stage, from its hidden states to scores. With tensor parallelism a rank has a part of the vocabulary,
or the whole of a value head.

Legend: ``L`` tokens that the rank has of a micro-batch, ``N`` tokens to score, ``H`` hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import nn

from agentrl.learner.head import HeadOptions, VocabularyPart, token_scores, token_values


class ValueHead(nn.Module):
    """The weights of a linear layer from hidden states to values, initially zeros. Replaces Megatron-Core's output layer.

    Args:
        config: of Megatron-Core.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))


def logprobs_at(
    chunk: Any, hidden_L_H: torch.Tensor, places_N: torch.Tensor, targets_N: torch.Tensor, options: HeadOptions
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies; see `token_scores`.

    Args:
        chunk: of the last stage, a ``GPTModel``.
        hidden_L_H: with sequence parallelism a part of the tokens.
        places_N: int64 indices of the hidden states before the tokens, among those of all tensor-parallel ranks.
        targets_N: int64 token ids.
        options: without ``part``.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    # Each rank has the gradient by its part of the vocabulary, which the ranks add up.
    if chunk.config.sequence_parallel:
        hidden_L_H = gather_from_sequence_parallel_region(hidden_L_H, tensor_parallel_output_grad=True)
    elif group.size() > 1:
        hidden_L_H = copy_to_tensor_model_parallel_region(hidden_L_H)
    is_tied = chunk.share_embeddings_and_output_weights
    weight_V_H = chunk.shared_embedding_or_output_weight() if is_tied else chunk.output_layer.weight
    vocabulary_part = VocabularyPart(len(weight_V_H) * group.rank(), group) if group.size() > 1 else None
    hidden_N_H = hidden_L_H.index_select(0, places_N)
    return token_scores(hidden_N_H, weight_V_H, None, targets_N, replace(options, vocabulary_part=vocabulary_part))


def values_at(chunk: Any, hidden_L_H: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
    """Return values ``[N]``, the same on all tensor-parallel ranks; arguments as of `logprobs_at`."""
    if chunk.config.sequence_parallel:
        # Each rank has the whole gradient, and takes that of its tokens.
        hidden_L_H = gather_from_sequence_parallel_region(hidden_L_H, tensor_parallel_output_grad=False)
    head = chunk.output_layer
    return token_values(hidden_L_H.index_select(0, places_N), head.weight, head.bias)
