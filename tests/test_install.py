"""What docs/install.md and the Dockerfile say is what the code has."""

import ast
import re
import tomllib
from pathlib import Path

from pydantic import BaseModel

from agentrl.cli.main import COMMANDS
from agentrl.config.schema import Config

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "install.md").read_text()


def said() -> str:
    """Return every text in agentrl's code, with … for what an f-string fills in."""
    texts = []
    for path in (ROOT / "agentrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_every_message_is_one_of_the_code() -> None:
    table = PAGE.split("## When something does not work")[1].split("\n### ")[0]
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(messages) > 10
    everything = said()
    for message in messages:
        for part in filter(None, (part.strip(" ,") for part in message.split("…"))):
            assert part in everything, f"no message of agentrl says {part!r}"


def test_every_key_and_command_exists() -> None:
    keys = {tuple(found.split(".")) for found in re.findall(r"[`\s\"]([a-z]+(?:\.[a-z_]+)+)(?==|`)", PAGE)}
    sections = {key for key in keys if key[0] in Config.model_fields}
    assert len(sections) > 8
    for key in sections:
        at: object = Config
        for name in key:
            if not (isinstance(at, type) and issubclass(at, BaseModel)):
                break  # options that are passed on
            assert name in at.model_fields, ".".join(key)
            at = at.model_fields[name].annotation
    named = set(re.findall(r"^\s*\S*agentrl (\w+)", PAGE, re.MULTILINE))
    assert {"train", "tools", "models"} <= named
    assert named <= set(COMMANDS)


def test_every_extra_is_listed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = PAGE.split("## Extras")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(extras)


def test_the_image_gets_all_that_the_package_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"agentrl", "pyproject.toml", "LICENSE", project["project"]["readme"]}
    needed |= set(project["tool"]["setuptools"]["package-dir"].values())
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == needed
    for version in re.findall(r"ARG SGLANG_VERSION=(\S+)", (ROOT / "Dockerfile").read_text()):
        assert f"sglang=={version}" in PAGE
