"""A tiny policy that talks, reasons and calls tools, trained within seconds, for engines.

Its tokens are merges of bytes, so that a turn has about ten, and a text has several tokenisations, of which it samples others
than the tokenizer's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from byte_renderer import chat_tokenizer
from dialect_episodes import WORDS
from gateway_episodes import CHATML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

CONTEXT = 4096
_VOCABULARY = 512
_TOKENS, _ROWS, _STEPS = 128, 8, 120


def _turn(rng: random.Random) -> str:
    """Return a turn: text, reasoning, or calls, which also may be broken."""
    word = json.dumps(rng.choice(WORDS[:4]), ensure_ascii=False)
    call = f'<tool_call>{{"name": "find", "arguments": {{"word": {word}, "n": {rng.randrange(4)}.0}}}}</tool_call>'
    count = f'<tool_call>{{"arguments": {{"n": {rng.randrange(4)}}}, "name": "count"}}</tool_call>'
    thought = f"<think>\nhm {word}\n</think>\n\n"
    text = rng.choice(WORDS[:3])
    return rng.choice((text, thought + text, call, thought + text + call, call + count, call[:-9]))


def _talk(rng: random.Random) -> str:
    user = "".join(rng.choice("abc é«»") for _ in range(rng.randrange(12)))
    return (
        f"<|im_start|>{rng.choice(('user', 'tool'))}\n{user}<|im_end|>\n<|im_start|>assistant\n{_turn(rng)}<|im_end|>\n"
    )


def _tokenizer() -> Any:
    """Return a tokenizer whose tokens are merges over the policy's talks, also across words."""
    rng = random.Random(1)
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - 3, initial_alphabet=alphabet, max_token_length=12, show_progress=False
    )
    base.train_from_iterator((_turn(rng) for _ in range(1000)), trainer)
    return chat_tokenizer(base, CHATML)


def save_talking_policy(folder: Path, steps: int = _STEPS, rows: int = _ROWS) -> Path:
    """Train the policy and write it, with its tokenizer."""
    tokenizer, rng = _tokenizer(), random.Random(0)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    config = Qwen3Config(
        **sizes,
        intermediate_size=128,
        vocab_size=_VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(steps):
        texts = ("".join(_talk(rng) for _ in range(8)) for _ in range(rows))
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)[:_TOKENS] for text in texts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
