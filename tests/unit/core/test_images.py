"""Images of messages: formats, identity, and marks in texts."""

import io
from pathlib import Path

import pytest
from PIL import Image as pil

from agentrl.core.images import IMAGE_MARK, Image, load_image
from agentrl.core.types import Message, message_with_images


def encode(color: tuple[int, ...], mode: str = "RGB", format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    pil.new(mode, (3, 2), color).save(buffer, format=format)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("format", "media_type"),
    [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("GIF", "image/gif"), ("BMP", "image/bmp"), ("WEBP", "image/webp")],
)
def test_formats_are_known_by_their_bytes(format: str, media_type: str) -> None:
    image = Image(encode((200, 10, 10), format=format))
    assert image.media_type == media_type
    assert image.to_pil().mode == "RGB"
    assert image.to_pil().size == (3, 2)


def test_every_source_of_the_same_bytes_is_the_same_image(tmp_path: Path) -> None:
    data = encode((1, 2, 3))
    path = tmp_path / "image.png"
    path.write_bytes(data)
    image = Image(data)
    sources = [
        data,
        path,
        str(path),
        image,
        image.data_url,
        {"bytes": data, "path": None},
        {"bytes": None, "path": str(path)},
    ]
    assert {load_image(source).digest for source in sources} == {image.digest}


def test_equal_pixels_of_pil_images_are_the_same_image() -> None:
    assert load_image(pil.new("RGB", (4, 4), "red")) == load_image(pil.new("RGB", (4, 4), "red"))
    assert load_image(pil.new("RGB", (4, 4), "red")) != load_image(pil.new("RGB", (4, 4), "blue"))


def test_transparent_pixels_are_white() -> None:
    assert Image(encode((255, 0, 0, 0), mode="RGBA")).to_pil().getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"no image", "begin with b'no image'"),
        (7, "not 7"),
        ("data:image/png,abc", "must be data:image"),
        ("data:image/png;base64,###", "not valid base64"),
    ],
)
def test_what_is_no_image_is_refused(source: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_image(source)


def test_bytes_that_cannot_be_decoded_are_refused_with_the_digest() -> None:
    image = Image(encode((1, 2, 3))[:30])
    with pytest.raises(ValueError, match=image.digest[:12]):
        image.to_pil()


def test_a_message_has_a_mark_for_each_image() -> None:
    image = Image(encode((1, 2, 3)))
    message = message_with_images("user", "Compare ", image, " and ", image, ".")
    assert message.content == f"Compare {IMAGE_MARK} and {IMAGE_MARK}."
    assert message.images == (image, image)
    with pytest.raises(ValueError, match="1 image marks"):
        Message("user", f"one {IMAGE_MARK}", images=(image, image))
    with pytest.raises(ValueError, match="U\\+FFFC"):
        message_with_images("user", f"text {IMAGE_MARK}", image)
    assert Message("user", IMAGE_MARK).images == (), "without images the mark is text"


def test_a_data_url_from_elsewhere_reads_no_file(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(encode((1, 2, 3)))
    with pytest.raises(ValueError, match="must be data:image"):
        Image.from_data_url(str(path))
