"""Random weights for a small policy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.atomic_files import give_default_mode

from .tokenizer import CHAT_TEMPLATE, VOCABULARY, marker_bpe, save_tokenizer, wrap_tokenizer


@dataclass(frozen=True, slots=True)
class PolicySize:
    """Sizes of a small policy; by default it has about 1.7M parameters."""

    hidden: int = 192
    layers: int = 4
    heads: int = 6
    key_value_heads: int = 2
    feed_forward: int = 512


def save_policy(
    folder: Path, texts: Iterable[str], *, vocabulary: int = VOCABULARY, seed: int = 0, size: PolicySize | None = None
) -> None:
    """Write an untrained policy into ``folder``, a Hugging Face model with the tokenizer of ``texts``."""
    init_model(folder, save_tokenizer(folder, texts, vocabulary), seed=seed, size=size)


def save_marker_policy(folder: Path, markers: Sequence[str], *, seed: int, size: PolicySize) -> None:
    """Write an untrained policy into ``folder``, whose tokenizer is `marker_bpe`."""
    init_model(folder, wrap_tokenizer(folder, marker_bpe(markers), CHAT_TEMPLATE), seed=seed, size=size)


def init_model(folder: Path, tokenizer: Any, *, seed: int = 0, size: PolicySize | None = None) -> None:
    """Write a Qwen3 model of random parameters in bfloat16 into ``folder``, for a loaded ``tokenizer``."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = size or PolicySize()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        head_dim=32,
        intermediate_size=size.feed_forward,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.03,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    give_default_mode(*folder.glob("*.safetensors"))


def run_command(description: str | None, save: Callable[[Path, int], None]) -> None:
    """Run the command line of a module that writes an untrained policy: ``save`` gets its folder and seed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    save(arguments.out, arguments.seed)
    print(f"untrained policy: {arguments.out}")
