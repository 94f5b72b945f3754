"""The byte-level BPE tokenizer of the shipped policies, trained on the text that they read and write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl import Message, make_env

from .data import Multihop

VOCABULARY = 1536
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
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


def train_tokenizer() -> Tokenizer:
    """Return the tokenizer: 256 bytes, the tags and control tokens, and merges up to `VOCABULARY`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return tokenizer


def save_tokenizer(folder: str) -> Any:
    """Train the tokenizer, save it in the format of Transformers with its chat template, and return it."""
    from transformers import PreTrainedTokenizerFast

    make_tokenizer: Any = PreTrainedTokenizerFast
    wrapped = make_tokenizer(tokenizer_object=train_tokenizer(), pad_token=PAD, eos_token=END)
    wrapped.add_special_tokens({"additional_special_tokens": [START]})
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return wrapped


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
