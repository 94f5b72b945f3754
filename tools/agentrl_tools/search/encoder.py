"""Text to vectors with E5 (Wang et al. 2022, arXiv 2212.03533). Imports torch and Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from agentrl import ConfigError

MAX_TOKENS = 256
"""Longer texts are cut here, as the published wiki-18 index was made."""
BATCH = 128
"""Texts in one forward pass."""

Vectors = NDArray[np.float32]
"""One row a text, of length 1, so that an inner product is a cosine."""


class Encoder:
    """Mean of the last hidden states over a text's tokens, normalised; queries and passages have different prefixes."""

    def __init__(self, model: str, device: str = "cpu", key: str = "--model") -> None:
        """Load a model folder or a hub id: float32 on the CPU, float16 on a GPU.

        Raises:
            ConfigError: the model cannot be loaded or lacks weights, or there is no such device.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda (tools.search.options.device): torch sees no GPU here; cpu works anywhere")
        self.device = torch.device(device)
        dtype = torch.float16 if device == "cuda" else torch.float32
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            loaded, report = AutoModel.from_pretrained(
                model, dtype=dtype, output_loading_info=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its readers do
            raise ConfigError(f"{key}={model} cannot be loaded: {type(error).__name__}: {error}") from error
        # The pooler is not used: it follows the hidden states. transformers initialises missing weights at random.
        missing_weights = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
        if missing_weights:
            raise ConfigError(
                f"{key}={model}: {len(missing_weights)} weights are missing, such as {missing_weights[0]!r}"
            )
        self._model: Any = loaded.to(self.device).eval()
        self._max_tokens = min(MAX_TOKENS, getattr(loaded.config, "max_position_embeddings", MAX_TOKENS))
        self.name = model

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return int(self._model.config.hidden_size)

    def encode(self, texts: Sequence[str], kind: Literal["query", "passage"]) -> Vectors:
        """Return one vector a text."""
        parts = [
            self._encode([f"{kind}: {text}" for text in texts[i : i + BATCH]]) for i in range(0, len(texts), BATCH)
        ]
        return np.concatenate(parts) if parts else np.empty((0, self.dimension), np.float32)

    @torch.inference_mode()
    def _encode(self, texts: list[str]) -> Vectors:
        tokens = self._tokenizer(
            texts, max_length=self._max_tokens, truncation=True, padding=True, return_tensors="pt"
        ).to(self.device)
        hidden_B_L_D = self._model(**tokens).last_hidden_state.float()
        mask_B_L_1 = tokens["attention_mask"].unsqueeze(-1)
        mean_B_D = (hidden_B_L_D * mask_B_L_1).sum(1) / mask_B_L_1.sum(1)
        vectors: Vectors = torch.nn.functional.normalize(mean_B_D, dim=-1).cpu().numpy()
        return vectors
