"""Images of a row's messages: parts of their content, and an image column at the places that a prompt has for it."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.images import IMAGE_MARK, Image, ImageSource, load_image
from agentrl.core.types import Message

IMAGE_PLACE = "<image>"
"""Stands in a text for the next image of the column ``data.image_key``, as in datasets of verl."""
IMAGE_KEY = "data.image_key"
"""The configuration key of the column."""
_USUAL_COLUMNS = ("images", "image")
_PART_TYPES = ("text", "image", "image_url")
_SOURCES = ("bytes", "path", "image", "image_url", "url")
"""Keys of an image in a part of a content, in the order in which they are used; a value may be a mapping again."""
_HINTS = ("type", "text", "detail")
"""Further keys of such a part that change nothing; ``detail`` is OpenAI's."""


class RowImages:
    """Reads the contents of a row's messages, from the first to the last, and places the images of a column in them.

    Args:
        location: of the row, for messages.
        folder: where relative paths begin; None: nowhere, as in a dataset of the hub.
        columns: names of all columns of the row.
        column: ``data.image_key``, the column of its images; None: contents have their own images alone.
        sources: the images of the column.

    Raises:
        ConfigError: an image of the column cannot be read.
    """

    def __init__(
        self,
        location: str,
        folder: Path | None,
        columns: Sequence[str],
        column: str | None,
        sources: Sequence[ImageSource],
    ) -> None:
        self._folder = folder
        self._columns = columns
        self._column = column
        where = f"{location}: {column!r} ({IMAGE_KEY})"
        self._images = tuple(self._load(source, f"{where}, image {number}") for number, source in enumerate(sources, 1))
        self._placed = 0

    def read_content(self, content: object, where: str) -> tuple[object, tuple[Image, ...]]:
        """Return the text of a content with `IMAGE_MARK` at its images, and the images.

        Args:
            content: a text, or a list of parts ``{"type": "text" | "image" | "image_url", …}``; another value is returned as
                it is.
            where: the message's place, for messages.

        Raises:
            ConfigError: a part is of another type, an image cannot be read, or there is none for a place.
        """
        if isinstance(content, str):
            return self.read_text(content, where)
        if isinstance(content, list | tuple) and content and all(isinstance(block, Mapping) for block in content):
            return self._join([self._read_block(block, where) for block in content], where)
        return content, ()

    def read_text(self, text: str, where: str) -> tuple[str, tuple[Image, ...]]:
        """Return a text with `IMAGE_MARK` for each `IMAGE_PLACE`, and the images; see `read_content`."""
        if IMAGE_PLACE not in text:
            return text, ()
        if self._column is not None:
            start, *texts = text.split(IMAGE_PLACE)
            return self._join([start, *(piece for text in texts for piece in (self._next(where), text))], where)
        if column := next((name for name in _USUAL_COLUMNS if name in self._columns), None):
            raise ConfigError(
                f"{where} has {IMAGE_PLACE}, and the row a column {column!r}; set {IMAGE_KEY}={column}, or remove the column "
                "with data.convert"
            )
        return text, ()

    def _read_block(self, block: Mapping[str, object], where: str) -> str | Image:
        block = {name: value for name, value in block.items() if value is not None}  # parquet fills with nulls
        kind = block.get("type")
        if kind not in _PART_TYPES:
            raise ConfigError(
                f"{where} has a part of the type {kind!r:.40} in its content; types are {', '.join(_PART_TYPES)}"
            )
        if kind == "text":
            return str(block.get("text") or "")
        if not any(name in block for name in _SOURCES):
            return self._next(where)
        return self._load(block, f"{where}, its part of the type {kind}")

    def _next(self, where: str) -> Image:
        if self._column is None:
            raise ConfigError(
                f"{where} has a part for an image without the image; set {IMAGE_KEY} to the column of images"
            )
        if self._placed == len(self._images):
            raise ConfigError(
                f"{where} has a place for image {self._placed + 1}, and the column {self._column!r} ({IMAGE_KEY}) has "
                f"{len(self._images)} images; places are {IMAGE_PLACE} in a text and parts of the type image"
            )
        self._placed += 1
        return self._images[self._placed - 1]

    def _join(self, pieces: Sequence[str | Image], where: str) -> tuple[str, tuple[Image, ...]]:
        images = tuple(piece for piece in pieces if isinstance(piece, Image))
        if images:
            self._refuse_marks([piece for piece in pieces if isinstance(piece, str)], where)
        return "".join(IMAGE_MARK if isinstance(piece, Image) else piece for piece in pieces), images

    def _refuse_marks(self, texts: Sequence[str], where: str) -> None:
        if any(IMAGE_MARK in text for text in texts):
            raise ConfigError(f"{where} has the character U+FFFC next to images, for which it stands; remove it")

    def place_all(self, messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
        """Return the messages with all images of the column: without any place for them they begin the first user message.

        Raises:
            ConfigError: there are places for some of them, or there is no user message.
        """
        images = self._images
        if self._placed == len(images):
            return messages
        first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
        if self._placed or first is None:
            reason = f"places for {self._placed} of them" if self._placed else "no message of the role user"
            raise ConfigError(
                f"{where} has {reason}, and the column {self._column!r} ({IMAGE_KEY}) has {len(images)} images; places are "
                f"{IMAGE_PLACE} in a text and parts of the type image"
            )
        message = messages[first]
        if not message.images:
            self._refuse_marks([message.content], where)
        content = IMAGE_MARK * len(images) + message.content
        begun = replace(message, content=content, images=(*images, *message.images))
        return (*messages[:first], begun, *messages[first + 1 :])

    def _load(self, source: ImageSource, where: str) -> Image:
        """Return the image of a value of a dataset.

        Raises:
            ConfigError: it has none, or it cannot be read.
        """
        while isinstance(source, Mapping):
            fields = {name: value for name, value in source.items() if value is not None}
            if more := sorted(fields.keys() - {*_SOURCES, *_HINTS}):
                raise ConfigError(
                    f"{where} has {', '.join(more)}, which is not supported: sizes are those of the model's image processor"
                )
            name = next((name for name in _SOURCES if name in fields), None)
            if name is None:
                raise ConfigError(
                    f"{where} has none of {', '.join(_SOURCES)}; it has: {', '.join(source) or 'nothing'}"
                )
            source = fields[name]
        if isinstance(source, str | Path) and not str(source).startswith("data:"):
            source = self._path(str(source), where)
        try:
            return load_image(source)
        except OSError as error:
            hint = "; base64 needs data:image/png;base64, before it" if error.errno == errno.ENAMETOOLONG else ""
            raise ConfigError(f"{where}: {source!s:.300} cannot be read: {error.strerror or error}{hint}") from error
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error

    def _path(self, name: str, where: str) -> Path:
        if "://" in name:
            raise ConfigError(
                f"{where} is the address {name:.100}: images are not downloaded; use paths, bytes or data: URLs"
            )
        path = Path(name).expanduser()
        if path.is_absolute():
            return path
        if self._folder is None:
            raise ConfigError(
                f"{where} is the relative path {name:.100}, and a dataset of the hub has no folder; use bytes or data: URLs"
            )
        return self._folder / path
