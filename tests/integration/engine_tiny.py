"""Tiny random models with a real tokenizer, for tests of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_SHAPE: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    # Random models would end at random; tests that want an end name one.
    "eos_token_id": None,
    "bos_token_id": None,
    "initializer_range": 0.15,
}
_MODELS: dict[str, Any] = {
    "qwen3": lambda sizes: Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 16} | sizes, tie_word_embeddings=True)),
    "llama": lambda sizes: LlamaForCausalLM(LlamaConfig(**sizes)),
    "qwen2": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)),
    # Its window is shorter than the prompts of the tests.
    "mistral": lambda sizes: MistralForCausalLM(MistralConfig(**sizes, sliding_window=24)),
}
FAMILIES = tuple(_MODELS)


def save_model(
    folder: Path,
    family: str = "qwen3",
    seed: int = 0,
    end: int | None = None,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> Path:
    """Write a random model that ends its turns with the token ``end``, and a byte-level BPE tokenizer.

    The tokenizer names no end: SGLang would end turns with it, whatever the model says.
    """
    torch.manual_seed(seed)
    model = _MODELS[family](_SHAPE | sizes).to(dtype)
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 384 ids in which ``>x`` is one token, so that ``</search>`` may end inside it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["</search>x", "<search>who wrote it", "the city of the river", ">x>x>x"] * 4
    tokenizer.train_from_iterator(text, trainer)
    make: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = make(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    return fast


def reference_logprobs(
    model: torch.nn.Module, prompt: list[int], output: list[int], temperature: float = 1.0
) -> list[float]:
    """Return a Hugging Face forward's log-probabilities of ``output`` after ``prompt``."""
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = model(ids).logits[0].float() / (temperature or 1.0)
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[len(prompt) + at - 1, token]) for at, token in enumerate(output)]
