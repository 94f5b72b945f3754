"""The byte-level BPE tokenizer of the shipped policies, trained on the text that they read and write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from agentrl import Message, make_env
from agentrl_tasks.small_policy import train_bpe, wrap_tokenizer

from .data import Multihop

VOCABULARY = 1536
TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
"""The protocol's tags, one token each. They are ordinary text for the template, and no merge crosses them."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_WORLDS = range(9000, 9008)
"""Training worlds on which merges are learned; names of other worlds have the same syllables."""
_QUESTIONS = 300


def save_tokenizer(folder: Path) -> Any:
    """Train the tokenizer, save it in the format of Transformers with its chat template, and return it."""
    bpe = train_bpe(_texts(), VOCABULARY, TAGS, pre_tokenizers.ByteLevel(add_prefix_space=False))
    return wrap_tokenizer(folder, bpe, CHAT_TEMPLATE)


def _texts() -> Iterator[str]:
    """Yield documents, prompts and the environment's other texts, without the tags."""
    cut = re.compile("|".join(map(re.escape, TAGS)))
    env = make_env("search_r1")
    for seed in _WORLDS:
        tasks = Multihop(seed=seed)
        for index, document in enumerate(tasks.train_world.documents):
            yield f'Doc {1 + index % 3}(Title: "{document.title}") {document.text}\n'
        for task in tasks.split("train")[:_QUESTIONS]:
            observation, _ = env.reset(options={"task": task})
            assert isinstance(observation, tuple), "a prompt comes before any search"
            yield from cut.split(f"user\n{observation[-1].content}assistant\n")
            yield from (f" {relation} " for relation in (*task.metadata["relations"], "answer"))
        invalid, *_ = env.step(Message("assistant", ""))
        assert isinstance(invalid, tuple), "an empty turn searches nothing"
        yield from cut.split(invalid[-1].content)
