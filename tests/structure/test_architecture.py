"""``docs/explanation/architecture.md`` is true to the code: its tree of packages, and every function in its walks."""

import ast
import re

import pytest

from tests.structure.layers import PAGE, REPOSITORY, up_to_date
from tests.structure.nodes import FUNCTIONS

LIMITS = {"A sampled token": (22, 14, 8), "A tool call": (19, 13, 8)}
"""By section, the most functions, files and representations: what they are now, so that they do not grow."""


def walk(title: str) -> list[tuple[str, str, str]]:
    """The rows of a walk: data, function, file. A section is one table with the columns step, data, function, file."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert rows[0] == ["step", "data", "function", "file"]
    return [(data, function.strip("`"), file.strip("`")) for _, data, function, file in rows[2:]]


def find_definitions(tree: ast.AST, prefix: str = "") -> set[str]:
    """Dotted names of all functions and methods of a module, those in other functions included."""
    names = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            names |= {name} | find_definitions(node, f"{name}.")
    return names


def test_the_page_has_the_tree_of_packages() -> None:
    page = PAGE.read_text()
    assert page == up_to_date(page), "run make docs"


@pytest.mark.parametrize("title", LIMITS)
def test_every_function_of_a_walk_exists(title: str) -> None:
    for _, function, file in walk(title):
        path = REPOSITORY / file
        assert path.exists(), file
        assert function in find_definitions(ast.parse(path.read_text())), f"{file} has no {function}"


@pytest.mark.parametrize("title", LIMITS)
def test_walks_stay_short(title: str) -> None:
    rows = walk(title)
    data = {name for cell, _, _ in rows for name in re.findall(r"`([^`]+)`", cell)}
    counts = len({row[1:] for row in rows}), len({file for _, _, file in rows}), len(data)
    assert all(count <= most for count, most in zip(counts, LIMITS[title], strict=True)), counts
