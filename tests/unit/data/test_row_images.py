"""Images of datasets: columns, places in prompts, parts of contents, and what is said of rows that do not fit."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from PIL import Image as pil
from pyarrow import parquet

from agentrl.config.sft import SftConfig
from agentrl.config.tasks import DataConfig
from agentrl.core.errors import ConfigError
from agentrl.core.images import IMAGE_MARK, load_image
from agentrl.core.types import Message, message_with_images
from agentrl.data.chats import ChatConversion
from agentrl.data.file_tasks import FileTasks, read_tasks
from agentrl.data.rows import read_rows


def encode(colour: str, encoding: str = "PNG") -> bytes:
    file = io.BytesIO()
    pil.new("RGB", (5, 3), colour).save(file, encoding)
    return file.getvalue()


RED, BLUE, GREEN = encode("red"), encode("blue", "JPEG"), encode("green")
RED_URL = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
IMAGES = DataConfig(image_key="images")
PICTURES = {"red.png": RED, "sub/blue.jpg": BLUE}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    for name, data in PICTURES.items():
        (path.parent / name).parent.mkdir(exist_ok=True)
        (path.parent / name).write_bytes(data)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        head, cells = ",".join(rows[0]), (json.dumps(value) for row in rows for value in row.values())
        path.write_text(head + "\n" + ",".join('"' + cell.strip('"').replace('"', '""') + '"' for cell in cells))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_of(path: Path, data: DataConfig = IMAGES) -> tuple[Message, ...]:
    [task] = read_tasks(path, data)
    return task.prompt


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_column_of_images_stands_at_the_places_of_a_text(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"train{suffix}", {"prompt": "Is <image> like <image>?", "images": ["red.png", RED_URL]})
    red = load_image(RED)
    assert prompt_of(path) == (message_with_images("user", "Is ", red, " like ", red, "?"),)


def test_a_verl_row_has_stored_images_and_places_in_its_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": "<image><image>Which is red?"}]
    stored = [{"bytes": RED, "path": "gone.png"}, {"bytes": None, "path": "sub/blue.jpg"}]
    path = write(tmp_path / "train.parquet", {"prompt": messages, "images": stored})
    user = message_with_images("user", load_image(RED), load_image(BLUE), "Which is red?")
    assert prompt_of(path) == (Message("system", "Look."), user)
    stream = FileTasks(DataConfig(path=path, image_key="images", streaming=True)).stream
    assert stream is not None
    assert stream.sample(1)[0].prompt[1] == user


def test_parts_of_a_content_have_images_of_their_own_or_of_the_column(tmp_path: Path) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": RED_URL, "detail": "low"}},
        {"type": "text", "text": "or <image>"},
        {"type": "image"},
        {"type": "image", "image": "red.png"},
    ]
    row = {"prompt": [{"role": "user", "content": parts}], "images": "sub/blue.jpg"}
    red, blue = load_image(RED), load_image(BLUE)
    message = message_with_images("user", red, "or <image>", blue, red)
    assert prompt_of(write(tmp_path / "train.jsonl", row)) == (message,)
    text = {**row, "prompt": json.dumps(row["prompt"])}
    assert prompt_of(write(tmp_path / "train.parquet", text)) == (message,)


def test_without_a_place_images_begin_the_first_user_message(tmp_path: Path) -> None:
    rows = [
        {
            "id": 1,
            "prompt": [{"role": "system", "content": "!"}, {"role": "user", "content": "?"}],
            "images": ["red.png"],
        },
        {"id": 2, "prompt": "No picture: " + IMAGE_MARK, "images": []},
    ]
    path = write(tmp_path / "train.jsonl", *rows)
    with_image, without = read_tasks(path, DataConfig(image_key="images", id_key="id"))
    assert with_image.prompt[1] == message_with_images("user", load_image(RED), "?")
    assert without.prompt == (Message("user", "No picture: " + IMAGE_MARK),)


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_with_image_features_keep_the_stored_bytes(tmp_path: Path, streaming: bool) -> None:
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
    message = {"role": datasets.Value("string"), "content": datasets.List(part)}
    content = [{"type": "image", "text": None, "image": {"bytes": BLUE, "path": None}},
               {"type": "image", "text": None, "image": None},
               {"type": "text", "text": "?", "image": None}]  # fmt: skip
    dataset = datasets.Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": content}]], "images": [[{"bytes": BLUE, "path": None}]], "x": [1]},
        features=datasets.Features({"prompt": datasets.List(message), "images": datasets.List(datasets.Image()),
                                    "x": datasets.Value("int64")}),
    )  # fmt: skip
    blue = load_image(BLUE)
    if streaming:
        (tmp_path / "data").mkdir()
        dataset.to_parquet(tmp_path / "data" / "train.parquet")
        stream = FileTasks(DataConfig(path=Path(f"hf:{tmp_path}/data"), image_key="images", streaming=True)).stream
        assert stream is not None
        [task] = stream.sample(1)
        assert task.prompt == (message_with_images("user", blue, blue, "?"),)
    else:
        dataset.save_to_disk(tmp_path / "data")
        assert prompt_of(tmp_path / "data") == (message_with_images("user", blue, blue, "?"),)


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("<image><image>", ["red.png"], r"'prompt' \(data\.input_key\) has a place for image 2, and .* 'images' .* has 1"),
        ("<image>", [], r"place for image 1, and the column 'images' \(data\.image_key\) has 0 images"),
        ("<image>", ["red.png", "red.png"], r"has places for 1 of them, and the column 'images' .* has 2 images"),
        ("?", ["red.png", "none.png"], r"'images' \(data\.image_key\), image 2: .*none\.png cannot be read: No such file"),
        ("?", ["A" * 999], r"image 1: .{300} cannot be read: .* too long; base64 needs data:image/png;base64, before it$"),
        ("?", ["train.jsonl"], r"image 1: an image must be bytes of PNG.*begin with"),
        ("?", "https://x.org/a.png", r"image 1 is the address https://x\.org/a\.png: images are not downloaded"),
        ("?", "data:image/png;base64,!", r"image 1: the image's data: URL .* is not valid base64"),
        ("?", [{"path": "red.png", "max_pixels": 9}], "has max_pixels, which is not supported"),
        ("?", [{"name": "red.png"}], "has name, which is not supported"),
        ("?", [{"path": None}], r"has none of bytes, path, .*; it has: path"),
        ("?", [5], "an image is a PIL image, a path"),
        (f"<image>{IMAGE_MARK}", ["red.png"], r"has the character U\+FFFC next to images"),
        ([{"role": "system", "content": "?"}], ["red.png"], "has no message of the role user, and the column"),
        ([{"role": "user", "content": [{"type": "video"}]}], [], r"message 1 has a part of the type 'video'.*text, image"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}], [],
         r"message 1, its part of the type image_url is the address http://x/y"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_named(tmp_path: Path, prompt: object, images: object, message: str) -> None:
    path = write(tmp_path / "train.jsonl", {"prompt": prompt, "images": images})
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 1: .*" + message):
        read_tasks(path, IMAGES)


def test_keys_that_are_missing_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", {"prompt": "<image>?", "images": [RED]})
    with pytest.raises(
        ConfigError, match=r"row 1: .*has <image>, and the row a column 'images'; set data\.image_key=images"
    ):
        read_tasks(path, DataConfig())
    streamed = FileTasks(DataConfig(path=path, streaming=True)).stream
    assert streamed is not None
    with pytest.raises(ConfigError, match=r"set data\.image_key=images"):
        streamed.sample(1)
    with pytest.raises(ConfigError, match=r"'pictures' \(data\.image_key=pictures\) is missing"):
        read_tasks(path, DataConfig(image_key="pictures"))
    parts = write(tmp_path / "parts.jsonl", {"prompt": [{"role": "user", "content": [{"type": "image"}]}]})
    with pytest.raises(ConfigError, match=r"message 1 has a part for an image without the image; set data\.image_key"):
        read_tasks(parts, DataConfig())
    with pytest.raises(ValueError, match="only the chat template says how images are written"):
        DataConfig(image_key="images", apply_chat_template=False)
    plain = write(tmp_path / "plain.jsonl", {"prompt": "Write <image>."})
    assert prompt_of(plain, DataConfig()) == (Message("user", "Write <image>."),)


def test_chats_have_images_of_parts_and_of_the_column(tmp_path: Path) -> None:
    content = [{"type": "image", "image": RED_URL}, {"type": "image"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "!"}]
    [row] = read_rows(write(tmp_path / "chats.jsonl", {"messages": messages, "images": ["sub/blue.jpg"]}), "data.path")
    convert = ChatConversion(IMAGES, SftConfig())
    chat = convert(row)
    assert chat is not None
    assert chat.messages[0].images == (load_image(RED), load_image(BLUE))
    assert convert.columns is not None
    assert "images" in convert.columns
