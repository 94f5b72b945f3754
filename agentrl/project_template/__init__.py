"""New projects: the files under ``template/``, with the project's name put in."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.extras import DISTRIBUTION

TEMPLATE = Path(__file__).parent / "template"
TEMPLATE_NAME = "my_project"
"""What the template calls itself, and what the project's name takes the place of."""

TEMPLATE_PACKAGE = "my_package"
"""What the template calls its Python package."""

TEMPLATE_DISTRIBUTION = "agentrl_distribution"
"""What the template depends on, and what `DISTRIBUTION` takes the place of."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def template_files() -> Iterator[Path]:
    """Iterate over the template's files, relative to its folder, in the order of their names."""
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and not any(folder_name.endswith(("__pycache__", "_cache")) for folder_name in path.parts):
            yield path.relative_to(TEMPLATE)


def create_project(folder: Path) -> list[Path]:
    """Write a project into ``folder``, whose last part is its name, and return the files written.

    Raises:
        ConfigError: the name is none for a project or its package, or the folder is a file or not empty.
    """
    folder = folder.expanduser().resolve()
    if not _NAME.fullmatch(folder.name):
        raise ConfigError(
            f"agentrl init: {folder.name!r} is no name for a project: it starts with a letter, and has letters, "
            f"digits, '_' and '-' only, such as {TEMPLATE_NAME}"
        )
    package = _package_name(folder.name)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"agentrl init: {folder} is a file; take another name")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"agentrl init: {folder} is not empty; take another name, or empty it first")
    written = []
    for file in template_files():
        path = folder / str(file).replace(TEMPLATE_PACKAGE, package)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (TEMPLATE / file).read_text(encoding="utf-8")
        project_text = text.replace(TEMPLATE_NAME, folder.name).replace(TEMPLATE_PACKAGE, package)
        project_text = project_text.replace(TEMPLATE_DISTRIBUTION, DISTRIBUTION)
        path.write_text(project_text, encoding="utf-8")
        written.append(path)
    return written


def _package_name(project: str) -> str:
    """Return the name of a project's Python package: ``first-steps`` has ``first_steps``."""
    package = project.replace("-", "_").lower()
    spec = None if keyword.iskeyword(package) else find_spec(package)
    # A folder without code, such as that of the project, has a spec without an origin.
    if keyword.iskeyword(package) or (spec is not None and spec.origin is not None):
        raise ConfigError(f"agentrl init: {project!r}: Python has a module {package!r} already; take another name")
    return package
