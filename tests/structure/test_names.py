"""Names and signatures of agentrl and its plugins say what they are; the figures may fall, and never rise."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.structure.layers import REPOSITORY
from tests.structure.names import FOLDERS, TESTS, Names, bindings, is_participle, python_files, read_names
from tests.structure.nodes import list_nodes, read_nodes
from tests.structure.signatures import Signatures, read_signatures

MOST_CONTEXT_WORDS, MOST_IN_TESTS = 2.0, 12.0
"""For 1,000 bindings."""
MOST_PARTICIPLES, MOST_NAMED_BY_OF = 9, 3
MOST_UNTYPED = 702
"""Annotations with ``Any`` in the signatures of ``agentrl``."""


@cache
def read_folder(folder: str) -> tuple[Names, Signatures]:
    """Return what a folder's files name, and their signatures; each file is parsed once for both."""
    names, signatures = Names(), Signatures()
    for path in python_files(REPOSITORY / folder):
        nodes = read_nodes(path)
        names.add(path, nodes)
        signatures.add(path, nodes)
    return names, signatures


@pytest.mark.parametrize(
    ("folder", "most"), [*((folder, MOST_CONTEXT_WORDS) for folder in FOLDERS), (TESTS, MOST_IN_TESTS)]
)
def test_bindings_say_what_they_bind(folder: str, most: float) -> None:
    names, _ = read_folder(folder)
    assert names.bindings
    assert names.context_rate <= most, names.context


def test_functions_say_what_they_do() -> None:
    names, _ = read_folder("agentrl")
    assert len(names.participles) <= MOST_PARTICIPLES, names.participles
    assert len(names.named_by_of) <= MOST_NAMED_BY_OF, names.named_by_of


@pytest.mark.parametrize("folder", FOLDERS)
def test_signatures_have_at_most_eight_parameters_or_a_reason(folder: str) -> None:
    assert read_folder(folder)[1].long == []


def test_signatures_are_typed() -> None:
    assert len(read_folder("agentrl")[1].untyped) <= MOST_UNTYPED


def test_names_of_a_small_module(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(
        "def kept(one, *, rows):\n"
        "    for found in rows:\n"
        "        part = [each for each in found]\n"
        "    try: pass\n"
        "    except OSError as what: pass\n"
        "def weight_of(row): ...\n"
        "def seed(): ...\n"
    )
    names = read_names([file])
    assert sorted(line.rpartition(" ")[2] for line in names.context) == ["each", "found", "one", "part", "what"]
    assert names.bindings == 7
    assert [line.rpartition(" ")[2] for line in names.participles] == ["kept"]
    assert [line.rpartition(" ")[2] for line in names.named_by_of] == ["weight_of"]
    assert not is_participle("need")
    assert [name for name, _ in bindings(list_nodes(ast.parse("a, b = 1, 2")))] == ["a", "b"]


def test_long_and_untyped_signatures_of_a_small_module(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(
        "from typing import Any\n"
        "def long(a, b, c, d, e, f, g, h, i): ...\n"
        "def reasoned(a, b, c, d, e, f, g, h, i):  # a table of nine columns\n    return 1\n"
        "def method(self, a: dict[str, Any], b: int) -> Any: ...\n"
    )
    signatures = read_signatures([file])
    assert [line.partition(": ")[2] for line in signatures.long] == ["long (9)"]
    assert [line.partition(": ")[2] for line in signatures.untyped] == ["method: dict[str, Any]", "method: Any"]
