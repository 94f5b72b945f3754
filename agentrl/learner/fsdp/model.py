"""A Hugging Face causal model for the learner: from packed tokens to log-probabilities, or values, at given positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from agentrl.algo.base import TokenScores
from agentrl.batch.microbatch import MicroBatch, Truncation, to_device
from agentrl.core.errors import LearnerError
from agentrl.learner.attention import DividedRows, PackedRows, packed_rows, unpack_rows
from agentrl.learner.context_parallel import Context
from agentrl.learner.head import HeadOptions, token_scores, token_values
from agentrl.learner.images import ImageInputs, ImageTokens
from agentrl.learner.routing_replay import experts_by_layer
from agentrl.learner.token_support import Coefficients, TokenSupport
from agentrl.learner.tree_attention import Tree, TreeInput, tree_input, tree_places
from agentrl.models.load import value_head


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is computed of the distributions that tokens are scored with; see `HeadOptions`."""

    temperature: float
    entropy: bool
    truncation: Truncation | None
    centering: Coefficients | None
    support: TokenSupport | None
    """The ids that the distributions have; see `token_scores`."""


class PackedModel(nn.Module):
    """Wraps the model so that one ``forward``, and with it one set of FSDP hooks, covers body and head.

    The head is applied only at the given positions, in chunks of ``logits_chunk`` positions.
    """

    def __init__(self, model: Any, logits_chunk: int) -> None:
        super().__init__()
        self.hf = model
        self.key = "model.path"
        """Configuration key of its folder, for messages."""
        self.logits_chunk = logits_chunk
        self.autocast = False
        """Whether matrix products are computed in bfloat16."""
        self.compiled = False
        """Whether decoder layers, and what follows the head's products, are compiled."""
        self.batch_invariant = False
        """Whether a token is computed the same whatever else is computed with it; see `agentrl.models.batch_invariant`."""
        self.separates_rows = False
        """Whether every row has a separate bin, as layers of the model other than attention would mix packed rows."""
        self.has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
        """Whether attention has sinks."""
        self.replays_routing = False
        """Whether routers take the experts that the engine chose (routing replay)."""
        self.images: ImageInputs | None = None
        """Computes images; None if the model reads none."""
        self.context: Context | None = None
        """The ranks that compute a micro-batch together with this one."""

    def forward(
        self,
        micro: MicroBatch,
        places_N: NDArray[np.int64],
        temperature: float,
        entropy: bool = False,
        truncation: Truncation | None = None,
        centering: Coefficients | None = None,
    ) -> TokenScores:
        """Score the tokens at ``places_N`` given the tokens before them in their rows.

        Args:
            micro: token ids, positions, rows and sampling support, on the CPU.
            places_N: positions of the tokens to score, never the first of a row; FSDP would move a tensor to the GPU. With
                a context, those of `local_positions`.
            temperature: logits are divided by it.
            entropy: whether to compute entropies.
            truncation: see `HeadOptions.truncation`.
            centering: see `HeadOptions.centering`.

        Returns:
            what `_score` returns.
        """
        device, at_N = self.hf.device, torch.from_numpy(places_N)
        support = None if micro.support is None else TokenSupport(micro.support.select(places_N), device)
        distribution = Distribution(temperature, entropy, truncation, centering, support)
        images, rotary_3_L = self._image_inputs(micro)
        if micro.shares_prefixes:
            tree = tree_input(micro, at_N, device, self.windows, self._ranks)
            return self._score_tree(tree, images, rotary_3_L, distribution)
        token_ids_L, position_ids_L, row_L = micro.token_ids_L, micro.position_ids_L, micro.row_L
        targets_N = to_device(token_ids_L[at_N], device)
        token_ids_R_L, position_ids_R_L, row_R_L = token_ids_L[None], position_ids_L[None], row_L[None]
        rotary_R_L = position_ids_R_L if rotary_3_L is None else rotary_3_L[:, None]
        if self.separates_rows:
            token_ids_R_L, position_ids_R_L, row_R_L, at_L = unpack_rows(
                token_ids_L, position_ids_L, row_L, torch.arange(len(token_ids_L))
            )
            at_N, images = at_L[at_N], None if images is None else images.at(at_L.numpy()[images.places_M])
            rotary_R_L = position_ids_R_L if rotary_3_L is None else _place(rotary_3_L, at_L, row_L, position_ids_R_L)
        replayed_experts = self._replayed_experts(micro.experts_L, len(token_ids_L))
        rows = self.attention_rows(position_ids_R_L, row_R_L)
        inputs = _Inputs(token_ids_R_L, rotary_R_L, rows, images, replayed_experts)
        inputs, before_N = self._slice_inputs(inputs, at_N - 1)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            hidden = self._hidden(inputs)
            hidden_N_H = hidden.index_select(0, to_device(before_N, device))
            return self._score(hidden_N_H, targets_N, distribution)

    @property
    def windows(self) -> tuple[int, ...]:
        """Sizes of the sliding windows that layers may have. They are small ones while a model is probed."""
        window = getattr(self.hf.config.get_text_config(), "sliding_window", None)
        return () if window is None else (window,)

    def _image_inputs(self, micro: MicroBatch) -> tuple[ImageTokens | None, torch.Tensor | None]:
        """Return the images of a micro-batch, and rotary positions ``[3, L]`` if they are not those in the rows.

        Raises:
            LearnerError: the model reads no images.
        """
        if self.images is not None:
            return self.images.read(micro)
        if micro.images:
            raise LearnerError(
                f"the batch has images, but {type(self.hf).__name__} reads none; set {self.key} to a vision-language model"
            )
        return None, None

    def local_positions(self, micro: MicroBatch, at_N: torch.Tensor) -> torch.Tensor:
        """Return the positions in ``at_N`` of tokens that are predicted from this rank's part; without a context all."""
        if self.context is None:
            return at_N
        before_N, length = at_N - 1, len(micro.token_ids_L)
        if micro.shares_prefixes:
            before_N, length = tree_places(micro, before_N, self.hf.device, self._ranks)
        return at_N[self.context.has(before_N, length)]

    def attention_rows(self, position_ids_R_L: torch.Tensor, row_R_L: torch.Tensor) -> PackedRows:
        """Return packed rows as the model's attention takes them; see `packed_rows`."""
        sinks = self.windows if self.has_sinks else None
        return packed_rows(
            position_ids_R_L,
            row_R_L,
            self.hf.device,
            flash=self.autocast,
            sinks=sinks,
            batch_invariant=self.batch_invariant,
        )

    @property
    def _ranks(self) -> int:
        """The number of ranks that compute a micro-batch."""
        return 1 if self.context is None else self.context.size

    def _slice_inputs(self, inputs: _Inputs, before_N: torch.Tensor) -> tuple[_Inputs, torch.Tensor]:
        """Return this rank's part of the inputs, and places ``before_N`` in it."""
        if self.context is None:
            return inputs, before_N
        assert not isinstance(inputs.packed, DividedRows)
        token_slice = self.context.token_slice(inputs.token_ids_R_L.shape[1])
        local_inputs = replace(
            inputs,
            token_ids_R_L=inputs.token_ids_R_L[:, token_slice],
            rotary_R_L=inputs.rotary_R_L[..., token_slice],
            packed=DividedRows(inputs.packed, self.context),
            images=None if inputs.images is None else inputs.images.slice(token_slice),
        )
        return local_inputs, before_N - token_slice.start

    def _score_tree(
        self,
        tree: TreeInput,
        images: ImageTokens | None,
        rotary_3_N: torch.Tensor | None,
        distribution: Distribution,
    ) -> TokenScores:
        """Return what `forward` does, for rows that share prefixes."""
        assert not self.separates_rows, "layers that mix rows cannot share prefixes"
        rotary_R_L = tree.position_ids_L[None]
        if rotary_3_N is not None:
            rotary_R_L = torch.zeros(3, 1, len(tree.token_ids_L), dtype=torch.int64)
            rotary_R_L[:, 0, tree.index_N] = rotary_3_N[:, : len(tree.index_N)]
        if images is not None:
            images = images.at(tree.index_N.numpy()[images.places_M])
        replayed_experts = self._replayed_experts(tree.experts_L, len(tree.token_ids_L))
        inputs = _Inputs(tree.token_ids_L[None], rotary_R_L, tree.tree, images, replayed_experts)
        inputs, before_M = self._slice_inputs(inputs, tree.before_M)
        with torch.autocast(self.hf.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = self._hidden(inputs)
            hidden_M_H = _select_lines(hidden, before_M)
            scores_M, entropy_M, centering_M = self._score(hidden_M_H, tree.targets_M, distribution)
        if distribution.support is not None:  # of each row's token: none is shared
            return TokenScores(scores_M, entropy_M, centering_M)
        scores_N = _select_lines(scores_M[:, None], tree.scored_N)[:, 0]
        entropy_N = None if entropy_M is None else _select_lines(entropy_M[:, None], tree.scored_N)[:, 0]
        return TokenScores(scores_N, entropy_N)

    def _replayed_experts(self, experts_L: torch.Tensor | None, length: int) -> torch.Tensor | None:
        """Return the experts of this rank's tokens by layer; None if routers choose them."""
        if experts_L is None or not self.replays_routing:
            return None
        assert not self.separates_rows, "models whose routing is replayed mix no rows"
        token_slice = slice(0, length) if self.context is None else self.context.token_slice(length)
        return experts_by_layer(experts_L, token_slice, self.hf.device)

    @property
    def body(self) -> nn.Module:
        """The module that maps token ids or embeddings to the last hidden states."""
        body: nn.Module = self.hf.base_model if self.images is None else self.hf.get_decoder()
        return body

    def _hidden(self, inputs: _Inputs) -> torch.Tensor:
        """Return the last hidden states, one line a token."""
        device = self.hf.device
        token_ids_R_L, rotary_R_L = (to_device(x, device) for x in (inputs.token_ids_R_L, inputs.rotary_R_L))
        options: dict[str, Any] = {"position_ids": rotary_R_L, "use_cache": False, "packed": inputs.packed}
        if inputs.replayed_experts is not None:
            options["replayed_experts"] = inputs.replayed_experts
        if inputs.images is None:
            options["input_ids"] = token_ids_R_L
        else:
            assert self.images is not None
            embeddings = self.hf.get_input_embeddings()(token_ids_R_L)
            options["inputs_embeds"], takes_features, layer_features = self.images.insert_features(
                embeddings, inputs.images
            )
            if layer_features:
                options |= {"visual_pos_masks": takes_features, "deepstack_visual_embeds": layer_features}
        hidden: torch.Tensor = self.body(**options).last_hidden_state
        return hidden.flatten(0, 1)

    @property
    def head(self) -> nn.Module:
        """The module that maps hidden states to logits or values."""
        raise NotImplementedError

    def _score(
        self,
        hidden_N_H: torch.Tensor,
        targets_N: torch.Tensor,
        distribution: Distribution,
    ) -> TokenScores:
        """Return the scores of tokens from the hidden states before them, at least float32, and entropies if wanted."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the body computes hidden states from, of ``R`` bins."""

    token_ids_R_L: torch.Tensor
    rotary_R_L: torch.Tensor
    """Positions ``[R, L]``, or ``[3, R, L]`` on three axes."""
    packed: PackedRows | Tree | DividedRows
    images: ImageTokens | None
    replayed_experts: torch.Tensor | None
    """Recorded experts of this rank's tokens, by layer."""


def _place(
    rotary_3_L: torch.Tensor, at_L: torch.Tensor, row_L: torch.Tensor, position_ids_R_L: torch.Tensor
) -> torch.Tensor:
    """Return the rotary positions ``[3, R, L]`` of bins, of rows one after the other."""
    rotary = position_ids_R_L.reshape(-1).repeat(3, 1)
    is_row_L = row_L >= 0
    rotary[:, at_L[is_row_L]] = rotary_3_L[:, is_row_L]
    return rotary.view(3, *position_ids_R_L.shape)


def _select_lines(lines: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """Index lines, also repeatedly, by the one operation whose gradient is deterministic on CPUs."""
    return F.embedding(index_N, lines)


class PolicyModel(PackedModel):
    """With a language head: the scores are log-probabilities; entropies (nats) are those of their distributions."""

    @property
    @override
    def head(self) -> nn.Module:
        head: nn.Module = self.hf.get_output_embeddings()
        return head

    def _score(
        self,
        hidden_N_H: torch.Tensor,
        targets_N: torch.Tensor,
        distribution: Distribution,
    ) -> TokenScores:
        """Return log-probabilities and entropies; see `token_scores`."""
        head: Any = self.head
        options = HeadOptions(
            distribution.temperature,
            distribution.entropy,
            self.logits_chunk,
            self.compiled,
            truncation=distribution.truncation,
            centering=distribution.centering,
            batch_invariant=self.batch_invariant,
        )
        return token_scores(hidden_N_H, head.weight, head.bias, targets_N, options, distribution.support)


class ValueModel(PackedModel):
    """With a value head: the score is the value of the state in which the token was sampled."""

    @property
    @override
    def head(self) -> nn.Linear:
        return value_head(self.hf)

    def _score(
        self,
        hidden_N_H: torch.Tensor,
        targets_N: torch.Tensor,
        distribution: Distribution,
    ) -> TokenScores:
        """Return values; a value has no entropy."""
        return TokenScores(token_values(hidden_N_H, self.head.weight, self.head.bias), None)
