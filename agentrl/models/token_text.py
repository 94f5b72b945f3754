"""Decoding of single tokens, exact to the byte."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from agentrl.core.errors import ModelError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte token in SentencePiece's notation."""

TOKENIZER_FILE = "tokenizer.json"
"""The file that is read, without torch or transformers, which take seconds to import."""


def token_decoder(folder: Path) -> Callable[[Sequence[int]], list[str | bytes]]:
    """Return a function that decodes ids to one text per id, or to bytes if they are not whole characters.

    The concatenated texts are the text of all ids. Decoding ids one by one would not give that: decoders strip the space
    before the first word and replace incomplete characters. An id unknown to the tokenizer becomes ``<id 123>``.

    Raises:
        ModelError: the folder has no readable ``tokenizer.json``.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelError(f"{folder} holds no {TOKENIZER_FILE}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    anchor_text = _decode(tokenizer, anchor)

    @cache
    def text(token: int) -> str | bytes:
        piece = tokenizer.id_to_token(token)
        if piece is None:
            return f"<id {token}>"
        anchored = _decode(tokenizer, [*anchor, token])
        decoded = anchored[len(anchor_text) :] if anchored.startswith(anchor_text) else _decode(tokenizer, [token])
        return decoded if "\ufffd" not in decoded else _bytes(piece) or decoded

    return lambda ids: [text(int(token)) for token in ids]


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _bytes(piece: str) -> bytes | None:
    """Return the bytes of a vocabulary piece in SentencePiece or byte-level BPE notation, or None if it is neither."""
    single = _BYTE.fullmatch(piece)
    if single:
        return bytes([int(single[1], 16)])
    table = byte_level()
    return bytes(table[character] for character in piece) if all(character in table for character in piece) else None


@cache
def byte_level() -> dict[str, int]:
    """Return the byte of each character of tokens in byte-level BPE: printable Latin-1 unchanged, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(unprintable)}
