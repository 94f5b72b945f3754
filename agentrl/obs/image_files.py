"""Images of rollout files: each is written once, to ``images/`` next to the files, named by the hash of its content.

::

    rollouts/
      step_000012.jsonl        its lines name their images: "images": ["9f86d0….png"]
      images/
        9f86d0….png            of all steps; the name is `agentrl.core.images.Image.digest`
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from agentrl.core.atomic_files import PARTIAL, names_file
from agentrl.core.errors import ConfigError
from agentrl.core.images import Image
from agentrl.core.reading import reading

IMAGES = "images"
"""Folder next to files of rollouts."""


def image_name(image: Image) -> str:
    """Return the name of an image's file."""
    return f"{image.digest}.{image.media_type.removeprefix('image/')}"


class ImageFiles:
    """The images of the rollout files in a folder.

    Args:
        folder: of the files of rollouts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / IMAGES
        self._written: set[str] = set()
        self._images: dict[str, Image] = {}

    def write(self, images: Iterable[Image]) -> None:
        """Write the images that are not there.

        Raises:
            OSError: such as of a full disk; it names the file.
        """
        for image in images:
            if image.digest in self._written:
                continue
            path = self._folder / image_name(image)
            # A machine that failed may have left a file of the right size without its content.
            if not path.exists() or path.read_bytes() != image.data:
                self._folder.mkdir(exist_ok=True)
                # Of its own for each writer: an evaluation may write the same image at the same time.
                partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{PARTIAL}")
                try:
                    with names_file(path):
                        partial.write_bytes(image.data)
                    os.replace(partial, path)
                finally:
                    partial.unlink(missing_ok=True)
            self._written.add(image.digest)

    def read(self, name: str) -> Image:
        """Return the image of a file, and keep it.

        Raises:
            ConfigError: the file is missing, is no image, or has changed since it was written.
        """
        if name not in self._images:
            path = self._folder / Path(name).name
            with reading(path, "image of a rollout"):
                image = Image(path.read_bytes())
            if image_name(image) != name:
                raise ConfigError(
                    f"{path} has changed since it was written: the SHA-256 of its content is {image.digest}, not that of its "
                    "name. The rollouts that have it cannot be used"
                )
            self._images[name] = image
        return self._images[name]
