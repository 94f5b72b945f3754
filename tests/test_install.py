"""What docs/start/install.md and the Dockerfile say is what the code has."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.structure.nodes import list_nodes

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "start" / "install.md").read_text()


@cache
def sources() -> dict[Path, str]:
    """Return the text of each file of agentrl."""
    return {path: path.read_text() for path in (ROOT / "agentrl").rglob("*.py")}


@cache
def texts(path: Path) -> str:
    """Return every text in the code of a file, with … for what an f-string fills in."""
    texts = []
    for node in list_nodes(ast.parse(sources()[path])):
        if isinstance(node, ast.JoinedStr):
            parts = (value.value if isinstance(value, ast.Constant) else "…" for value in node.values)
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return "\n".join(texts)


def is_said(phrase: str) -> bool:
    """Return whether a text in agentrl's code has a phrase; only files with all of its words are parsed."""
    words = re.findall(r"\w+", phrase)
    return any(phrase in texts(path) for path, source in sources().items() if all(word in source for word in words))


@pytest.mark.parametrize(("page", "least"), [("troubleshooting.md", 15), ("how_to/scale.md", 4)])
def test_every_message_is_one_of_the_code(page: str, least: int) -> None:
    """Tables of messages have the header ``message | what to do``."""
    tables = (ROOT / "docs" / page).read_text().split("| message | what to do |")[1:]
    messages = [
        actual for table in tables for actual in re.findall(r"^\| `(.+?)` \|", table.split("\n\n")[0], re.MULTILINE)
    ]
    assert len(messages) >= least
    for message in messages:
        for phrase in filter(None, (phrase.strip(" ,") for phrase in message.split("…"))):
            assert is_said(phrase), f"no message of agentrl says {phrase!r}"


def test_every_extra_is_listed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = PAGE.split("## Extras")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == set(extras)


def test_the_image_gets_all_that_the_package_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed_files = {"agentrl", "pyproject.toml", "LICENSE", project["project"]["readme"]}
    needed_files |= set(project["tool"]["setuptools"]["packages"]["find"]["where"]) - {"."}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == needed_files
    for version in re.findall(r"ARG SGLANG_VERSION=(\S+)", (ROOT / "Dockerfile").read_text()):
        assert f"sglang=={version}" in PAGE
