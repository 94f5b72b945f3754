"""Images of messages: encoded bytes with a hash of their content, and their places among tokens.

The text of a message has `IMAGE_MARK` where an image stands, in the order of its ``images``. Pillow is imported only where an
image is decoded or encoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

IMAGE_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands in the text of a message for each of its images. In a message without images it is text."""


def without_marks(text: str) -> str:
    """Return a text from elsewhere that stands next to images: `IMAGE_MARK` in it becomes U+FFFD."""
    return text.replace(IMAGE_MARK, "\N{REPLACEMENT CHARACTER}")


_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image, such as the bytes of a PNG file. Two images with the same bytes are equal.

    Raises:
        ValueError: the bytes are of no known format: PNG, JPEG, GIF, BMP or WebP.
    """

    data: bytes = field(repr=False)
    """The encoded image."""
    digest: str = field(init=False)
    """SHA-256 of ``data`` as 64 hexadecimal digits: its identity in trajectories, rollouts and batches."""

    def __post_init__(self) -> None:
        """Check the format and compute the digest."""
        if not _media_type(self.data):
            raise ValueError(
                f"an image must be bytes of PNG, JPEG, GIF, BMP or WebP, these begin with {self.data[:12]!r}"
            )
        object.__setattr__(self, "digest", hashlib.sha256(self.data).hexdigest())

    @classmethod
    def from_data_url(cls, url: str) -> Image:
        """Return the image of a ``data:`` URL. Nothing else is read, so that the URL may come from elsewhere.

        Raises:
            ValueError: it is none, or holds no image.
        """
        header, comma, encoded = url.partition(",")
        if not comma or not header.startswith("data:") or not header.endswith(";base64"):
            raise ValueError(f"an image's data: URL must be data:image/…;base64,…, this one begins with {url[:40]!r}")
        try:
            return cls(base64.b64decode(encoded, validate=True))
        except binascii.Error as error:
            raise ValueError(f"the image's data: URL {url[:40]!r} is not valid base64: {error}") from error

    @property
    def media_type(self) -> str:
        """Its type, such as ``image/png``."""
        return _media_type(self.data)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels as the header of a PNG says them, which nothing decodes; ``(0, 0)`` in other formats."""
        if self.media_type != "image/png" or len(self.data) < 24:
            return 0, 0
        width, height = struct.unpack(">II", self.data[16:24])
        return int(width), int(height)

    @property
    def data_url(self) -> str:
        """The image as a ``data:`` URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode('ascii')}"

    def to_pil(self) -> PilImage:
        """Return the decoded image in RGB. Transparent pixels are those of a white background.

        Raises:
            ValueError: the bytes cannot be decoded.
        """
        from PIL import Image as pil

        try:
            image: PilImage = pil.open(io.BytesIO(self.data))
            image.load()
        except Exception as error:
            raise ValueError(f"the image {self.digest[:12]} ({self.media_type}) cannot be decoded: {error}") from error
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            background = pil.new("RGBA", image.size, "white")
            image = pil.alpha_composite(background, image)
        return image.convert("RGB")


ImageSource = Any
"""What `load_image` accepts: an `Image`, a PIL image, a path, bytes, a ``data:`` URL, or a row of a dataset's image column."""


def load_image(source: ImageSource) -> Image:
    """Return the image of a PIL image, a path, bytes, a ``data:`` URL, or of ``{"bytes": …, "path": …}`` as datasets store it.

    A PIL image is encoded as PNG, so that equal pixels have equal digests.

    Raises:
        ValueError: it is none of these, or no image.
        OSError: the file cannot be read.
    """
    if isinstance(source, Image):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return Image(bytes(source))
    if isinstance(source, str) and source.startswith("data:"):
        return Image.from_data_url(source)
    if isinstance(source, str | Path):
        return Image(Path(source).read_bytes())
    if isinstance(source, Mapping):
        if source.get("bytes") is not None:
            return Image(bytes(source["bytes"]))
        if source.get("path") is not None:
            return Image(Path(source["path"]).read_bytes())
    if hasattr(source, "save") and hasattr(source, "getbands"):
        buffer = io.BytesIO()
        source.save(buffer, format="PNG")
        return Image(buffer.getvalue())
    raise ValueError(f"an image is a PIL image, a path, bytes or a data: URL, not {source!r:.100}")


def _media_type(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((name for signature, name in _SIGNATURES.items() if data.startswith(signature)), "")


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens that stand for an image, such as ``ImageSpan(start=17, length=64, digest="9f86d0…")``."""

    start: int
    """The first of them, counted from the start of the prompt or row."""
    length: int
    """Number of tokens, those that the processor writes around the image's features included."""
    digest: str
    """`Image.digest`."""

    @property
    def end(self) -> int:
        """The token after the last."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a prompt, with its tokens."""

    span: ImageSpan
    """Its tokens in the prompt."""
    image: Image
    """The image."""

    def shift(self, tokens: int) -> PlacedImage:
        """Return it with ``tokens`` more tokens before it."""
        span = ImageSpan(self.span.start + tokens, self.span.length, self.span.digest)
        return PlacedImage(span, self.image)
