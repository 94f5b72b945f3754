"""Mixtures of experts whose routing can be replayed: the sizes of the experts that an engine returns for each token."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np

from agentrl.core.experts import Experts, unknown_expert

KEY = "algo.routing_replay"
REPLAYED = ("deepseek_v3", "glm4_moe", "kimi_k2", "qwen3_moe")
"""``model_type`` of models whose routers the learners can give experts."""

COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts in ``config.json``; releases of transformers write different ones."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Sizes of the experts of a token."""

    layers: int
    """All of the model's, also those without experts."""
    per_token: int
    """Experts of a token in a layer."""
    experts: int
    """Routed experts of a layer."""

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds the numbers of experts and a higher one."""
        return "uint8" if self.experts <= 255 else "int16"

    def read(self, text: str, tokens: int) -> Experts:
        """Return the experts ``[tokens, layers, K]`` in an engine's reply: base64 of int32.

        The experts of tokens with a number that is no expert's are not known.

        Raises:
            ValueError: they are of another number of tokens, or of another model.
        """
        raw = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
        if raw.size != tokens * self.layers * self.per_token:
            raise ValueError(
                f"are {raw.size} numbers, not those of {tokens} tokens, {self.layers} layers and {self.per_token} experts"
            )
        experts = raw.reshape(tokens, self.layers, self.per_token)
        if raw.size and int(raw.max()) >= self.experts:
            raise ValueError(f"name the expert {raw.max()} of {self.experts}: is model.path the engine's model?")
        typed = experts.astype(self.dtype)
        typed[(experts < 0).any((1, 2))] = unknown_expert(self.dtype)
        return typed


def chooses_outside_router(mixture: object) -> bool:
    """Return whether a layer chooses its experts itself, from the router's logits: GLM-4.5 and DeepSeek in transformers 5.12.

    Such experts are neither recorded nor replayed.
    """
    return hasattr(mixture, "route_tokens_to_experts")
