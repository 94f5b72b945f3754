"""New projects: the files under ``template/``, with the project's name put in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from agentrl.core.errors import ConfigError

TEMPLATE = Path(__file__).parent / "template"
TEMPLATE_NAME = "my_project"
"""What the template calls itself, and what the project's name takes the place of."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def template_files() -> Iterator[Path]:
    """Iterate over the template's files, relative to its folder, in the order of their names."""
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and not any(part.endswith(("__pycache__", "_cache")) for part in path.parts):
            yield path.relative_to(TEMPLATE)


def create_project(folder: Path) -> list[Path]:
    """Write a project into ``folder``, whose last part is its name, and return the files written.

    Raises:
        ConfigError: the name is none for a project, or the folder is a file or not empty.

    """
    folder = folder.expanduser().resolve()
    if not _NAME.fullmatch(folder.name):
        raise ConfigError(
            f"agentrl init: {folder.name!r} is no name for a project: it starts with a letter, and has letters, "
            f"digits, '_' and '-' only, such as {TEMPLATE_NAME}"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"agentrl init: {folder} is a file; take another name")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"agentrl init: {folder} is not empty; take another name, or empty it first")
    written = []
    for file in template_files():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (TEMPLATE / file).read_text(encoding="utf-8")
        path.write_text(text.replace(TEMPLATE_NAME, folder.name), encoding="utf-8")
        written.append(path)
    return written
