"""Prints the section of a version from CHANGELOG.md: ``python .github/release_notes.py 0.2.0``."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def release_notes(version: str, changelog: str, project: str) -> str:
    """Return the section of a version.

    Args:
        version: such as ``0.2.0``.
        changelog: the text of CHANGELOG.md.
        project: the text of pyproject.toml.

    Raises:
        ValueError: the package has another version, or the changelog no section of this one.
    """
    packaged = tomllib.loads(project)["project"]["version"]
    if packaged != version:
        raise ValueError(f"the tag is v{version}, and pyproject.toml has version {packaged}")
    section = re.search(rf"(?ms)^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog)
    if section is None or not section[1].strip():
        raise ValueError(f"CHANGELOG.md has no section ## [{version}]")
    return section[1].strip() + "\n"


if __name__ == "__main__":
    try:
        notes = release_notes(
            sys.argv[1], (ROOT / "CHANGELOG.md").read_text("utf-8"), (ROOT / "pyproject.toml").read_text("utf-8")
        )
    except ValueError as error:
        sys.exit(str(error))
    sys.stdout.write(notes)
