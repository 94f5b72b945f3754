"""Real tokenizers for tests, offline: Qwen's, and the first part of its BPE with the added tokens of other families.

The BPE is ``qwen.tiktoken``, which ``dashscope`` ships. Which of a family's tokens are *special* is as in its published
tokenizer: DeepSeek's role markers, for one, are not.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen cuts text before its BPE."""


PART = 20_000
"""Tokens of the BPE that families other than Qwen get: all of it in each would take a gigabyte."""


class Added(NamedTuple):
    """What a family adds to the BPE, in the order of ids."""

    special: tuple[str, ...]
    plain: tuple[str, ...]
    """Tokens that are added, and not special."""
    eos: str
    pad: str
    bos: str | None = None


_QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_QWEN25_PLAIN = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
_QWEN3_PLAIN = (*_QWEN25_PLAIN, "<tool_response>", "</tool_response>", "<think>", "</think>")
_QWEN25 = Added(_QWEN_SPECIAL, _QWEN25_PLAIN, "<|im_end|>", "<|endoftext|>")
_QWEN3 = Added(_QWEN_SPECIAL, _QWEN3_PLAIN, "<|im_end|>", "<|endoftext|>")
_SMOLLM2 = Added(
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>"),
    (),
    "<|im_end|>",
    "<|im_end|>",
    "<|im_start|>",
)
_LLAMA3 = Added(
    ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    (),
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|begin_of_text|>",
)
_LLAMA31 = Added(
    ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>",
     "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    (),
    "<|eot_id|>",
    "<|finetune_right_pad_id|>",
    "<|begin_of_text|>",
)  # fmt: skip
_DEEPSEEK_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_DEEPSEEK_PLAIN = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
_DEEPSEEK_V3 = Added(
    _DEEPSEEK_SPECIAL, _DEEPSEEK_PLAIN, "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜begin▁of▁sentence｜>"
)
_DEEPSEEK_R1 = _DEEPSEEK_V3._replace(plain=(*_DEEPSEEK_PLAIN, "<think>", "</think>"))
_GLM4 = Added(
    ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
     "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
    (),
    "<|endoftext|>",
    "<|endoftext|>",
)  # fmt: skip
_GLM45 = _GLM4._replace(
    plain=("/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
           "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)  # fmt: skip
_KIMI = Added(
    ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "[EOT]", "<|im_system|>", "<|im_middle|>",
     "[UNK]", "[PAD]"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
     "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "[EOS]",
    "[PAD]",
    "[BOS]",
)  # fmt: skip

_FOREIGN = (
    "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>",
    "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<end_of_utterance>",
    "<image>", "</s>",
)  # fmt: skip
"""Special tokens of models whose chat templates ``trl`` ships, in other brackets than ``<|…|>``."""


def qwen_tokenizer_with(markers: Sequence[str], chat_template: str) -> PreTrainedTokenizerFast:
    """Return Qwen3's tokenizer with ``markers`` as special tokens, as a model with that chat template has them."""
    known_names = {*_QWEN_SPECIAL, *_QWEN3_PLAIN}
    more = tuple(marker for marker in (*_FOREIGN, *markers) if marker not in known_names)
    added = Added((*_QWEN_SPECIAL, *dict.fromkeys(more)), _QWEN3_PLAIN, "<|im_end|>", "<|endoftext|>", "<bos>")
    made = copy.copy(_tokenizer(added))
    made.chat_template = chat_template
    return made


FAMILIES: Mapping[str, Added] = {
    "chatml": _SMOLLM2,
    "smollm2": _SMOLLM2,
    "qwen2.5": _QWEN25,
    "qwen3": _QWEN3,
    "qwen3-thinking": _QWEN3,
    "qwen3-instruct": _QWEN3,
    "llama3": _LLAMA3,
    "llama3.1": _LLAMA31,
    "llama3.2": _LLAMA31,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_R1,
    "glm-4": _GLM4,
    "glm-4.5": _GLM45,
    "kimi-k2": _KIMI,
}
"""By the name of the chat format (``render.format``)."""

MARKERS = tuple(sorted({token for added in FAMILIES.values() for token in (*added.special, *added.plain)}))
"""The added tokens of every family, as text."""


def qwen_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of Qwen3, with a chat template if one is given."""
    return family_tokenizer("qwen3", chat_template)


def family_tokenizer(name: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the family whose chat format is ``name``: Qwen's, or as much of it as has its tokens.

    The BPE is shared by all callers; the chat template is this caller's own.
    """
    made = copy.copy(_tokenizer(FAMILIES[name]))
    made.chat_template = chat_template
    return made


@cache
def _tokenizer(added: Added) -> PreTrainedTokenizerFast:
    base = Tokenizer(_bpe(None if added.special[: len(_QWEN_SPECIAL)] == _QWEN_SPECIAL else PART))
    base.normalizer = normalizers.NFC()
    base.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    base.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in added.special]
    plain = [AddedToken(text, special=False, normalized=False) for text in added.plain]
    base.add_tokens(special + plain)
    return PreTrainedTokenizerFast(
        tokenizer_object=base, eos_token=added.eos, pad_token=added.pad, bos_token=added.bos, name_or_path="family"
    )


@cache
def _bpe(size: int | None) -> models.BPE:
    """Build the model of the first ``size`` tokens, or of all.

    A token's rank is its id, and it is the merge of the two that BPE of lower ranks leaves of it.
    """
    known_ranks = dict(list(ranks().items())[:size])
    stand_ins = map(chr, range(256, 512))
    letters = {byte: chr(byte) if chr(byte).isprintable() and byte != 32 else next(stand_ins) for byte in range(256)}

    def spelt(token: bytes) -> str:
        return token.decode("latin-1").translate(letters)

    merges = [
        tuple(map(spelt, _halves(token, known_ranks)))
        for token in sorted(known_ranks, key=known_ranks.__getitem__)
        if token[1:]
    ]
    return models.BPE({spelt(token): rank for token, rank in known_ranks.items()}, merges)


def ranks() -> dict[bytes, int]:
    """Return the tokens of Qwen's BPE, each with its rank."""
    package = find_spec("dashscope")
    assert package is not None, "pip install dashscope (part of agentrl-framework[dev])"
    lines = (Path(str(package.origin)).parent / "resources" / "qwen.tiktoken").read_bytes().split()
    return {base64.b64decode(token): int(rank) for token, rank in zip(lines[::2], lines[1::2], strict=True)}


def _halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    parts = [token[index : index + 1] for index in range(len(token))]
    unknown = len(ranks)
    pair_ranks = [
        ranks.get(token[index : index + 2], unknown) for index in range(len(token) - 1)
    ]  # of parts and the next
    while len(parts) > 2:
        at = pair_ranks.index(min(pair_ranks))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del pair_ranks[at]
        if at:
            pair_ranks[at - 1] = ranks.get(parts[at - 1] + parts[at], unknown)
        if at < len(pair_ranks):
            pair_ranks[at] = ranks.get(parts[at] + parts[at + 1], unknown)
    return parts
