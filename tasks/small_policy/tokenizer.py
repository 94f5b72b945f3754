"""A byte-level BPE tokenizer with single digits, and a ChatML template with calls as Hermes and Qwen write them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<tool_call>", "</tool_call>", "\\n", '\\"')
"""One token each, and plain text for the template: what calls stand between, and what JSON makes of code's line ends
and quotes, which would else melt into the words beside them."""

CHAT_TEMPLATE = (
    "{%- set first = messages[0] if messages[0].role == 'system' else none %}"
    "{%- if first or tools %}"
    "{{- '<|im_start|>system\\n' + (first.content if first else '') }}"
    "{%- if tools %}"
    "{{- ('\\n' if first else '') + 'Tools:' }}"
    "{%- for tool in tools %}"
    "{{- ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{%- endfor %}"
    "{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in (messages[1:] if first else messages) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{\"name\": \"' + call.function.name }}"
    "{{- '\", \"arguments\": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Of a tool it says no more than ``name(arguments)``: a small policy learns from examples what a tool is for, and a
schema would be most of what it reads."""


_TURNS = ("system\nTools:", "user\n", "assistant\n", "tool\n")
"""What the template writes around texts."""


def tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Return a tokenizer whose merges are learned on ``texts``: the same texts give the same tokenizer.

    Args:
        texts: what the policy will read and say, without the template's markers.
        vocabulary: tokens in all: 256 bytes, control tokens and `MARKERS`, and merges as far as there is room. A digit
            is always a token of its own, so that numbers are copied digit by digit.

    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKERS),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_without_markers(texts), trainer)
    made.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return made


def save_tokenizer(folder: Path, texts: Iterable[str], vocabulary: int = VOCABULARY) -> Any:
    """Save a `tokenizer` of ``texts`` as Transformers reads it, chat template included, and return it as loaded."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer(texts, vocabulary), pad_token=PAD, eos_token=END)
    wrapped.add_special_tokens({"additional_special_tokens": [START]})
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return wrapped


def _without_markers(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for marker in MARKERS:
            text = text.replace(marker, " ")
        yield text
        yield from _TURNS
