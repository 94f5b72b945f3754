"""Rollouts as compressed bytes, with all that is trained: what the journal stores and what runner processes send.

::

    magic, CRC-32, length of the content, length of its header      16 bytes, little-endian
    content, compressed with zlib: header, arrays

The header is JSON: the rollout as files of rollouts have it, without the arrays of its rows, plus what these files leave out.
Images are in it once; a file of records has them next to it. Of each array come first the lowest bytes of all its values, then
the second ones, and so on: in ids and log-probabilities these are alike.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import orjson

from agentrl.core.experts import from_dict as experts_from_dict
from agentrl.core.experts import to_dict as experts_to_dict
from agentrl.core.images import Image
from agentrl.core.tool import Tool
from agentrl.core.types import Message, Rollout, json_state, message_from_dict, message_to_dict
from agentrl.obs.image_files import image_name
from agentrl.obs.rollout_format import ARRAYS, portable_json, rollout_from_dict, rollout_to_dict

_MAGIC = b"ARL1"
_FRAME = struct.Struct("<4sIII")
FRAME_BYTES = _FRAME.size
"""Bytes before the content of a record."""
_LEVEL = 1
"""Compression level of zlib: higher ones take several times as long, and save little of log-probabilities."""


def encode_record(rollout: Rollout, *, with_images: bool = True) -> bytes:
    """Return a rollout as a record.

    Args:
        rollout: to encode.
        with_images: have the content of images in the record, and not only the names of their files.
    """
    record = rollout_to_dict(rollout)
    arrays: list[bytes] = []
    for row in record["rows"]:
        row["tokens"] = len(row["token_ids"])
        for name, dtype in ARRAYS.items():
            array_T = np.ascontiguousarray(row.pop(name), np.dtype(dtype).newbyteorder("<"))
            arrays.append(array_T.view(np.uint8).reshape(len(array_T), array_T.itemsize).T.tobytes())
    tools = [
        {"name": tool.name, "description": tool.description, "parameters": json_state(tool.parameters)}
        for tool in rollout.tools
    ]
    images = all_images(rollout)
    unlisted = {
        "messages": [_message_to_dict(message) for message in rollout.messages],
        "tools": tools,
        "experts": [experts_to_dict(row.experts) for row in rollout.rows],
        "graded": rollout.graded,
        **({"images": [image.data_url for image in images]} if with_images and images else {}),
    }
    header = portable_json({"rollout": record, "unlisted": unlisted})
    content = zlib.compress(b"".join((header, *arrays)), _LEVEL)
    return _FRAME.pack(_MAGIC, _checksum(content, len(content), len(header)), len(content), len(header)) + content


def all_images(rollout: Rollout) -> list[Image]:
    """Return the images of a rollout's rows and messages, each once."""
    of_messages = {image.digest: image for message in rollout.messages for image in message.images}
    return list({**rollout.images, **of_messages}.values())


def _message_to_dict(message: Message) -> dict[str, Any]:
    """Return a message as JSON-able data with the names of its images' files in place of the images."""
    data = message_to_dict(replace(message, images=()))
    return data | ({"images": [image_name(image) for image in message.images]} if message.images else {})


def _message_from_dict(data: Mapping[str, object], read_image: Callable[[str], Image]) -> Message:
    message = message_from_dict({**data, "images": ()})
    names = cast(Sequence[str], data.get("images", ()))
    return replace(message, images=tuple(map(read_image, names)))


def _checksum(content: bytes, size: int, header_size: int) -> int:
    return zlib.crc32(content, zlib.crc32(struct.pack("<II", size, header_size)))


def split_records(data: bytes, *, may_be_torn: bool = False) -> list[bytes]:
    """Return the records of a file.

    Args:
        data: of the file.
        may_be_torn: leave out an incomplete last record, which a killed process may leave.

    Raises:
        ValueError: another record begins with other bytes than one does, or the last is incomplete.
    """
    records, start = list[bytes](), 0
    while start < len(data):
        header = data[start : start + FRAME_BYTES]
        end = start + FRAME_BYTES + (_FRAME.unpack(header)[2] if len(header) == FRAME_BYTES else 0)
        if not header.startswith(_MAGIC[: len(header)]):
            raise ValueError(f"record {len(records) + 1} begins with other bytes than a record")
        if len(header) < FRAME_BYTES or end > len(data):
            if may_be_torn:
                break
            raise ValueError(f"record {len(records) + 1} is incomplete")
        records.append(data[start:end])
        start = end
    return records


def record_size(frame: bytes) -> int:
    """Return the bytes of a record from its first `FRAME_BYTES`.

    Raises:
        ValueError: they are those of no record.
    """
    magic, _, size, _ = _FRAME.unpack(frame)
    if magic != _MAGIC:
        raise ValueError("it begins with other bytes than a record")
    return FRAME_BYTES + int(size)


def record_header(record: bytes) -> dict[str, Any]:
    """Return the rollout of a record without the arrays of its rows, each of which has ``tokens``; nothing else is decompressed.

    Raises:
        ValueError: it is damaged.
    """
    header_size = check_record(record)
    header = zlib.decompressobj().decompress(memoryview(record)[FRAME_BYTES:], header_size)
    return dict(orjson.loads(header)["rollout"])


def check_record(record: bytes) -> int:
    """Check the checksum of a record, and return the size of its header.

    Raises:
        ValueError: it is damaged.
    """
    _, checksum, size, header_size = _FRAME.unpack_from(record)
    if _checksum(record[FRAME_BYTES:], size, header_size) != checksum:
        raise ValueError("the checksum (crc32) is wrong")
    return int(header_size)


def decode_record(record: bytes, read_image: Callable[[str], Image] | None = None) -> Rollout:
    """Return the rollout of a record.

    Args:
        record: of the rollout.
        read_image: returns an image by the name of its file; None: the record has them.

    Raises:
        ValueError: it is damaged, or lacks an image.
    """
    header_size = check_record(record)
    content = zlib.decompress(memoryview(record)[FRAME_BYTES:])
    header = orjson.loads(memoryview(content)[:header_size])
    start = header_size
    for row in header["rollout"]["rows"]:
        for name, dtype in ARRAYS.items():
            little_endian = np.dtype(dtype).newbyteorder("<")
            size = row["tokens"] * little_endian.itemsize
            bytes_N = np.frombuffer(content, np.uint8, size, start)
            bytes_T_N = bytes_N.reshape(little_endian.itemsize, row["tokens"]).T.copy(order="C")
            row[name] = bytes_T_N.view(little_endian).reshape(row["tokens"])
            start += size
    unlisted = header["unlisted"]
    images = {image_name(image): image for image in map(Image.from_data_url, unlisted.get("images", ()))}
    read_image = read_image or images.__getitem__
    rollout = rollout_from_dict(header["rollout"], read_image)
    experts = map(experts_from_dict, unlisted["experts"])
    rollout.rows = [replace(row, experts=row_experts) for row, row_experts in zip(rollout.rows, experts, strict=True)]
    rollout.messages = tuple(_message_from_dict(message, read_image) for message in unlisted["messages"])
    rollout.tools = tuple(Tool(**tool) for tool in unlisted["tools"])
    rollout.graded = unlisted["graded"]
    return rollout
