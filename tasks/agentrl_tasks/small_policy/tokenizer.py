"""A byte-level BPE tokenizer with one token per digit, and a ChatML template with tool calls in the format of Hermes and Qwen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<tool_call>", "</tool_call>", "\\n", '\\"')
"""One token each, and ordinary text for the template: the tags around calls, and the escapes of JSON for line ends and quotes
in code, which would otherwise merge with the words next to them."""

CHAT_TEMPLATE = (
    "{%- set first = messages[0] if messages[0].role == 'system' else none %}"
    "{%- if first or tools %}"
    "{{- '<|im_start|>system\\n' + (first.content if first else '') }}"
    "{%- if tools %}"
    "{{- ('\\n' if first and first.content else '') + 'Tools:' }}"
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
"""Tools are shown as ``name(arguments)`` only: a small policy learns from examples what a tool does, and a schema would be
most of its prompt."""


_TURNS = ("system\nTools:", "user\n", "assistant\n", "tool\n")
"""Texts that the template adds around messages."""


def tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Return a tokenizer whose merges are learned on ``texts``: the same texts give the same tokenizer.

    Args:
        texts: examples of what the policy reads and writes, without the template's markers.
        vocabulary: number of tokens: 256 bytes, control tokens, `MARKERS`, and merges for the rest. A digit is always a
            separate token, so that numbers are copied digit by digit.
    """
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return train_bpe(_without_markers(texts), vocabulary, MARKERS, digits)


def train_bpe(
    texts: Iterable[str], vocabulary: int, markers: Sequence[str], pre_tokenizer: pre_tokenizers.PreTokenizer
) -> Tokenizer:
    """Return a byte-level BPE tokenizer of ``vocabulary`` tokens: 256 bytes, control tokens, ``markers``, and merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(markers),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in markers])
    return bpe


def marker_bpe(markers: Sequence[str]) -> Tokenizer:
    """Return a byte-level tokenizer without merges: each of the ``markers`` is one token, and other texts are bytes."""
    control_tokens = (PAD, START, END)
    size = len(pre_tokenizers.ByteLevel.alphabet()) + len(control_tokens) + len(markers)
    return train_bpe((), size, markers, pre_tokenizers.ByteLevel(add_prefix_space=False))


def save_tokenizer(folder: Path, texts: Iterable[str], vocabulary: int = VOCABULARY) -> Any:
    """Save a `tokenizer` of ``texts`` in the format of Transformers with its chat template, and return it."""
    return wrap_tokenizer(folder, tokenizer(texts, vocabulary), CHAT_TEMPLATE)


def wrap_tokenizer(folder: Path, bpe: Tokenizer, chat_template: str) -> Any:
    """Save a tokenizer in the format of Transformers with a chat template, and return it."""
    from transformers import PreTrainedTokenizerFast

    make_tokenizer: Any = PreTrainedTokenizerFast
    wrapped = make_tokenizer(tokenizer_object=bpe, pad_token=PAD, eos_token=END)
    wrapped.add_special_tokens({"additional_special_tokens": [START]})
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    return wrapped


def _without_markers(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for marker in MARKERS:
            text = text.replace(marker, " ")
        yield text
        yield from _TURNS
