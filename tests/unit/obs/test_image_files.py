"""Files of images next to those of rollouts."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image as Picture

from agentrl.core.images import Image
from agentrl.obs.image_files import IMAGES, ImageFiles, image_name


def test_a_file_without_its_content_is_written_again(tmp_path: Path) -> None:
    """A machine that fails may leave a file of the right size that is not the image."""
    data = io.BytesIO()
    Picture.new("RGB", (3, 2), (1, 2, 3)).save(data, "PNG")
    image = Image(data.getvalue())
    ImageFiles(tmp_path).write([image])
    path = tmp_path / IMAGES / image_name(image)
    path.write_bytes(bytes(len(image.data)))
    ImageFiles(tmp_path).write([image])
    assert ImageFiles(tmp_path).read(path.name) == image
