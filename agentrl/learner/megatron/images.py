"""Images in the Megatron-Core learner: the vision tower of transformers on the first pipeline stage, the same on tensor ranks.

Its features replace the embeddings of the image's tokens before the decoder. Those of deeper blocks (Qwen3-VL's deepstack) are
added to the outputs of the first layers. Every stage reads the images, as rotary positions follow from their grids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from agentrl.batch.microbatch import to_device
from agentrl.core.errors import ModelError
from agentrl.learner.images import ImageInputs, ImageTokens, image_inputs
from agentrl.learner.layers import vision_tower
from agentrl.learner.megatron.families.base import EMBEDDING, HfTensor, Weight, same
from agentrl.learner.megatron.layers import LayerFeatures, PackedTokens
from agentrl.models.load import empty_model
from agentrl.models.weight_files import WeightFiles

_MODULE = "tower"
"""Name of the tower in a chunk."""


class ImageModel:
    """The part of a model of transformers that reads images. Its weights are on `meta` until `allocate`.

    Args:
        folder: of the model.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: the folder cannot be loaded.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.hf: Any = empty_model(folder, "eager", key=key)
        tower = vision_tower(self.hf)
        assert tower is not None, "its family reads images"
        tower.set_attn_implementation("sdpa")  # of whole images, which are no rows
        del self.hf.base_model.language_model, self.hf.lm_head
        inputs = image_inputs(self.hf, folder, key)
        assert inputs is not None, "it has a vision tower"
        self.inputs: ImageInputs = inputs
        names = {spec.name for spec in WeightFiles(folder, key).specs()}
        self._is_flat = EMBEDDING in names
        """Whether the folder has ``model.layers`` and ``visual`` for ``model.language_model.layers`` and ``model.visual``."""

    def weights(self) -> Iterator[Weight]:
        """Iterate over the tower's weights, which each rank of the first stage has as a whole."""
        for name, parameter in self.hf.named_parameters():
            hf_name = name.removeprefix("model.") if self._is_flat else name
            yield same(f"{_MODULE}.{name}", HfTensor(hf_name, tuple(parameter.shape)))

    def rename(self, weight: Weight) -> Weight:
        """Return a weight of the decoder with the names that it has in the folder."""
        blocks = tuple(
            tuple(rows._replace(tensor=rows.tensor._replace(name=self.text_name(rows.tensor.name))) for rows in block)
            for block in weight.blocks
        )
        return replace(weight, blocks=blocks)

    def text_name(self, name: str) -> str:
        """Return the name of a decoder's weight in the folder, from that in the folder of a model without images."""
        return name if self._is_flat else _nest(name)

    def module_name(self, name: str) -> str:
        """Return the name that a weight of the folder has in the model of transformers."""
        return _nest(name) if self._is_flat else name

    def allocate(self, config: TransformerConfig, device: torch.device) -> None:
        """Give the weights memory on a rank of the first stage."""
        for module in self.hf.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                weight = nn.Parameter(torch.empty(parameter.shape, dtype=config.params_dtype, device=device))
                # With sequence parallelism each rank has the gradient by its own tokens: Megatron-Core sums marked ones.
                weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
                setattr(module, name, weight)
            for name, buffer in [*module.named_buffers(recurse=False)]:
                setattr(module, name, buffer.to(device))


def _nest(name: str) -> str:
    if name.startswith("model."):
        return f"model.language_model.{name.removeprefix('model.')}"
    return f"model.{name}" if name.startswith("visual.") else name


class ImageGPT(GPTModel):  # type: ignore[misc]
    """The chunk of a first pipeline stage, with a vision tower."""

    def add_tower(self, images: ImageModel, layer_features: int) -> None:
        """Take the tower, which has memory, and let the first ``layer_features`` layers add its features.

        Raises:
            ModelError: the chunk has fewer layers than add features.
        """
        self.tower = images.hf
        self._inputs = images.inputs
        if layer_features > len(self.decoder.layers):
            raise ModelError(
                f"the first pipeline stage has {len(self.decoder.layers)} layers, and {layer_features} add features of images; "
                f"set learner.megatron.num_layers_in_first_pipeline_stage to {layer_features} or more"
            )
        for number, layer in enumerate(self.decoder.layers[:layer_features]):
            layer.register_forward_hook(_FeatureAdder(number), with_kwargs=True)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedTokens,
        images: ImageTokens | None = None,
    ) -> torch.Tensor:
        """Return what a ``GPTModel`` does; ``images`` have places among the tokens that the rank embeds."""
        embeddings: torch.Tensor | None = None
        if images is not None:
            embeddings = self.embedding(input_ids=input_ids, position_ids=position_ids)
            embeddings, _, features = self._inputs.insert_features(embeddings, images)
            if features:
                places_M = to_device(torch.from_numpy(images.places_M), embeddings.device)
                layer_features = LayerFeatures(places_M, tuple(features))
                packed_seq_params = replace(packed_seq_params, layer_features=layer_features)
        hidden: torch.Tensor = super().forward(
            input_ids, position_ids, attention_mask, embeddings, packed_seq_params=packed_seq_params
        )
        return hidden


@dataclass(frozen=True, slots=True)
class _FeatureAdder:
    """Adds features to the output of a decoder layer: a hook after its forward pass, which may be compiled or repeated."""

    layer: int

    def __call__(
        self,
        module: nn.Module,
        inputs: object,
        options: Mapping[str, PackedTokens],
        output: tuple[torch.Tensor, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        features = options["packed_seq_params"].layer_features
        if features is None:
            return output
        hidden, context = output
        added = features.layers_M_H[self.layer].to(hidden.dtype)
        summed = hidden.flatten(0, 1).index_add(0, features.places_M, added).view_as(hidden)
        return summed, context
