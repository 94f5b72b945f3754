"""Images in trajectories, states of episodes and records. Token layout: ``p`` prompt, ``i`` image, ``a`` sampled."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as pil

from agentrl.audit.run import audit_files
from agentrl.core.errors import ConfigError
from agentrl.core.images import Image, ImageSpan, PlacedImage
from agentrl.core.types import FinishReason, Generation, Rollout, StopReason, message_from_dict, message_to_dict
from agentrl.core.types import message_with_images as with_images
from agentrl.episode.state import EpisodeState
from agentrl.episode.trajectory import Trajectory
from agentrl.obs.records import decode_record, encode_record
from agentrl.obs.rollout_format import row_checksum
from agentrl.obs.rollout_headers import read_rollout, scan_headers
from agentrl.obs.rollouts import SUFFIXES, Form, RolloutFile, RolloutRecorder, read_rollouts, rollout_files


def picture(color: str) -> Image:
    buffer = io.BytesIO()
    pil.new("RGB", (2, 2), color).save(buffer, "PNG")
    return Image(buffer.getvalue())


RED, BLUE = picture("red"), picture("blue")


def placed(image: Image, start: int, length: int = 3) -> PlacedImage:
    return PlacedImage(ImageSpan(start, length, image.digest), image)


def said(ids: list[int], request: str) -> Generation:
    return Generation(tuple(ids), (-0.5,) * len(ids), FinishReason.STOP, ((0, 0),), 0, request)


def two_pictures() -> Trajectory:
    """``p i i i p | a | i i i p | a``."""
    trajectory = Trajectory()
    prompt = [1, 7, 7, 7, 2]
    trajectory.extend_to(prompt, images=[placed(RED, 1)])
    trajectory.append_sampled(said([10], "r0"))
    prompt += [10, 7, 7, 7, 3]
    assert trajectory.extend_to(prompt, images=[placed(RED, 1), placed(BLUE, 6)]) == 6
    trajectory.append_sampled(said([11], "r1"))
    return trajectory


def test_rows_have_the_spans_of_their_images() -> None:
    (row,) = two_pictures().rows("task", "rollout")
    assert row.images == (ImageSpan(1, 3, RED.digest), ImageSpan(6, 3, BLUE.digest))
    assert row.mask.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert set(two_pictures().images) == {RED.digest, BLUE.digest}


def test_equal_tokens_of_another_image_fork_before_it() -> None:
    """The first two tokens are shared; the image after them is not."""
    trajectory = Trajectory()
    trajectory.extend_to([1, 2, 7, 7, 7, 3], images=[placed(RED, 2)])
    trajectory.append_sampled(said([10], "r0"))
    known_tokens = trajectory.extend_to([1, 2, 7, 7, 7, 3], images=[placed(BLUE, 2)])
    assert known_tokens == 2
    trajectory.append_sampled(said([11], "r1"))
    first, second = trajectory.rows("task", "rollout")
    assert first.images == (ImageSpan(2, 3, RED.digest),)
    assert second.images == (ImageSpan(2, 3, BLUE.digest),)
    assert second.token_ids.tolist() == [1, 2, 7, 7, 7, 3, 11]


def test_the_same_image_again_is_the_same_node() -> None:
    trajectory = Trajectory()
    trajectory.extend_to([1, 7, 7, 7, 3], images=[placed(RED, 1)])
    trajectory.append_sampled(said([10], "r0"))
    branch = trajectory.branch(-1)
    assert branch.extend_to([1, 7, 7, 7, 4], images=[placed(RED, 1)]) == 4
    branch.append_sampled(said([11], "r1"))
    assert [row.images for row in trajectory.rows("task", "rollout")] == 2 * [(ImageSpan(1, 3, RED.digest),)]


def test_a_conversation_whose_picture_changed_begins_a_row() -> None:
    trajectory = two_pictures()
    prompt = [*trajectory.token_ids, 5]
    assert trajectory.extend_to(prompt, images=[placed(BLUE, 1), placed(BLUE, 6)]) == 1
    trajectory.append_sampled(said([12], "r2"))
    first, second = trajectory.rows("task", "rollout")
    assert [span.digest for span in second.images] == 2 * [BLUE.digest]
    assert [span.digest for span in first.images] == [RED.digest, BLUE.digest]


def test_states_keep_images() -> None:
    state = EpisodeState("rollout", 0)
    state.trajectory = two_pictures()
    state.messages = [with_images("user", "x", RED)]
    state.prompt_ids, state.images = (*state.trajectory.token_ids, 4), state.trajectory.placed_images()
    restored, _ = EpisodeState.from_dict(json.loads(json.dumps(state.to_dict({}))))
    assert restored.images == (placed(RED, 1), placed(BLUE, 6))
    assert restored.messages == state.messages
    assert restored.trajectory.images == state.trajectory.images
    (row,), (expected,) = restored.trajectory.rows("t", "r"), state.trajectory.rows("t", "r")
    assert row.images == expected.images
    assert message_from_dict(message_to_dict(state.messages[0])) == state.messages[0]


def rollout() -> Rollout:
    trajectory = two_pictures()
    messages = (with_images("user", RED),)
    rows = trajectory.rows("task", "rollout")
    return Rollout(
        "task",
        "rollout",
        rows,
        1.0,
        StopReason.TERMINATED,
        sampled_tokens=2,
        messages=messages,
        images=dict(trajectory.images),
    )


@pytest.mark.parametrize("form", SUFFIXES)
def test_files_of_rollouts_have_each_image_once(tmp_path: Path, form: Form) -> None:
    """Two rollouts of two steps with the same two pictures: two files, and all that is read is as it was."""
    original = rollout()
    recorder = RolloutRecorder(tmp_path / "rollouts", form=form)
    for step in (1, 2):
        recorder.write(step, [original, replace(original, rollout_id="other")])
        recorder.finish(step, {})
    names = {path.name: path.read_bytes() for path in (tmp_path / "rollouts" / "images").iterdir()}
    assert names == {f"{image.digest}.png": image.data for image in (RED, BLUE)}
    path = rollout_files(tmp_path)[2]
    assert RED.data_url[30:60].encode() not in path.read_bytes()
    for reading in read_rollouts(path):
        assert reading.images == original.images
        assert [row.images for row in reading.rows] == [row.images for row in original.rows]
    [header, _] = scan_headers(path)
    scanned = read_rollout(path, header.start, header.end).rollout
    assert isinstance(scanned, Rollout)
    assert scanned.images == original.images
    assert not audit_files([path]).violations


@pytest.mark.parametrize("form", SUFFIXES)
@pytest.mark.parametrize("change", ["another image", "no image", "missing"])
def test_an_image_that_has_changed_is_an_error_that_names_it(tmp_path: Path, form: Form, change: str) -> None:
    file = RolloutFile(tmp_path / f"samples{SUFFIXES[form]}", [rollout()])
    path, image_path = file.finish(), tmp_path / "images" / f"{RED.digest}.png"
    if change == "missing":
        image_path.unlink()
    else:
        image_path.write_bytes(BLUE.data if change == "another image" else b"no")
    with pytest.raises(ConfigError, match=str(image_path)):
        read_rollouts(path)
    [violation] = audit_files([path]).violations
    assert str(image_path) in violation.fault.words


def test_an_incomplete_image_is_written_again(tmp_path: Path) -> None:
    """A run was killed as it wrote it, and begins again."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / f"{RED.digest}.png").write_bytes(RED.data[:20])
    assert read_rollouts(RolloutFile(tmp_path / "a.jsonl", [rollout()]).path)[0].images == rollout().images


def test_records_have_their_images(tmp_path: Path) -> None:
    """Between processes and in the journal: nothing lies next to them."""
    original = rollout()
    record = encode_record(original)
    reading = decode_record(record)
    assert (reading.images, reading.messages) == (original.images, original.messages)
    assert row_checksum(reading.rows[0]) == row_checksum(original.rows[0])
    with pytest.raises(ValueError, match="crc32"):
        decode_record(record[:-3] + b"\0\0\0")


@pytest.mark.parametrize("change", ["span", "digest"])
def test_checksums_cover_images(change: str) -> None:
    row = rollout().rows[0]
    span = row.images[0]
    other = ImageSpan(2, 3, span.digest) if change == "span" else ImageSpan(1, 3, BLUE.digest)
    assert row_checksum(replace(row, images=(other, row.images[1]))) != row_checksum(row)
    assert np.array_equal(row.token_ids, rollout().rows[0].token_ids)
