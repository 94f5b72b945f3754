"""The text of single tokens, exact to the byte."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece writes a byte that is no token."""


def token_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], list[str | bytes]]:
    """Return what gives each id its text, or its bytes where they are no whole characters.

    The texts in a row are the text of the row. Decoding ids one by one is not: a decoder takes the space before the first
    word away, and makes replacement characters of half a character.
    """

    @cache
    def before() -> tuple[int, str]:
        found = tokenizer.encode("a", add_special_tokens=False)
        return found[-1], _decoded(tokenizer, found[-1:])

    @cache
    def text(token: int) -> str | bytes:
        anchor, start = before()
        both = _decoded(tokenizer, [anchor, token])
        found = both[len(start) :] if both.startswith(start) else _decoded(tokenizer, [token])
        if "\ufffd" not in found:
            return found
        raw = _bytes(tokenizer, token)
        return found if raw is None else raw

    return lambda ids: [text(int(token)) for token in ids]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes | None:
    """Return the bytes of a token, or None where its form is not known."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str):
        return None
    single = _BYTE.fullmatch(piece)
    if single:
        return bytes([int(single[1], 16)])
    table = _byte_level()
    return bytes(table[character] for character in piece) if all(character in table for character in piece) else None


@cache
def _byte_level() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE: printable Latin-1 as it is, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
