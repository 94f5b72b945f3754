"""The import graph of a small made-up package, and the check of its layers."""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.structure.graph import Graph, Kind, public_methods, read_graph, strongly_connected, violations
from tests.structure.layers import BEGIN, END, insert, package_docs, render_layers

RUNTIME, LAZY, TYPING = Kind.RUNTIME, Kind.LAZY, Kind.TYPING


def write(folder: Path, files: Mapping[str, str]) -> Graph:
    for name, source in files.items():
        path = folder / "demo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return read_graph(folder / "demo")


BASE = {"__init__.py": "", "low/__init__.py": "", "low/a.py": "NAME = 1\n", "low/b.py": "", "top/__init__.py": ""}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import demo.low.a", [("demo.low.a", RUNTIME)]),
        ("import demo.low.a as short, json", [("demo.low.a", RUNTIME), ("json", RUNTIME)]),
        ("from demo.low import a, b", [("demo.low.a", RUNTIME), ("demo.low.b", RUNTIME)]),
        ("from demo.low.a import NAME", [("demo.low.a", RUNTIME)]),
        ("from demo.low import NAME", [("demo.low", RUNTIME)]),
        ("from ..low import a as other", [("demo.low.a", RUNTIME)]),
        ("from ..low.a import NAME", [("demo.low.a", RUNTIME)]),
        ("from .. import low", [("demo.low", RUNTIME)]),
        ("from . import NAME", [("demo.top", RUNTIME)]),
        ("try:\n    import ray.util\nexcept ImportError:\n    ray = None", [("ray.util", RUNTIME)]),
        ("class A:\n    from demo.low import a", [("demo.low.a", RUNTIME)]),
        ("def f():\n    from demo.low import a", [("demo.low.a", LAZY)]),
        ("async def f():\n    class A:\n        import demo.low.b", [("demo.low.b", LAZY)]),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from demo.low import a\nelse:\n    import demo.low",
            [("typing", RUNTIME), ("demo.low.a", TYPING), ("demo.low", RUNTIME)],
        ),
        (
            "import typing\ndef f():\n    if typing.TYPE_CHECKING:\n        from demo.low import a",
            [("typing", RUNTIME), ("demo.low.a", TYPING)],
        ),
    ],
)
def test_each_form_of_import_is_seen(tmp_path: Path, source: str, expected: list[tuple[str, Kind]]) -> None:
    graph = write(tmp_path, {**BASE, "top/user.py": source})
    assert [(imported.imported, imported.kind) for imported in graph.imports] == expected


def test_relative_imports_in_a_package_start_at_the_package(tmp_path: Path) -> None:
    graph = write(tmp_path, {**BASE, "low/__init__.py": "from .a import NAME\nfrom . import b\nfrom ..top import x\n"})
    assert graph.edges()["demo.low"] == {"demo.low.a", "demo.low.b", "demo.top"}
    assert graph.package_edges() == {"low": {"top"}, "top": set()}


def test_tests_and_templates_are_no_modules(tmp_path: Path) -> None:
    extra = ["low/test_a.py", "low/a_test.py", "low/tests/helper.py", "top/conftest.py", "top/template/env.py"]
    graph = write(tmp_path, BASE | dict.fromkeys(extra, "import demo"))
    assert sorted(graph.modules) == ["demo", "demo.low", "demo.low.a", "demo.low.b", "demo.top"]


def test_a_package_inside_a_package_has_its_full_name(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    graph = write(tmp_path, {**BASE, "top/user.py": f"from {tmp_path.name}.demo.low import a"})
    assert graph.root == f"{tmp_path.name}.demo"
    assert graph.package_edges() == {"low": set(), "top": {"low"}}


def test_cycles_by_kind(tmp_path: Path) -> None:
    graph = write(
        tmp_path,
        {
            **BASE,
            "low/a.py": "from demo.low import b",
            "low/b.py": "def f():\n    from demo.low import c",
            "low/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from demo.low.a import x",
        },
    )
    assert strongly_connected(graph.edges()) == [["demo.low.a", "demo.low.b", "demo.low.c"]]
    assert strongly_connected(graph.edges([RUNTIME])) == []
    assert strongly_connected(graph.edges([RUNTIME, LAZY])) == []


def test_strongly_connected_components() -> None:
    edges = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d", "f"], "f": ["f"], "g": ["a"]}
    assert strongly_connected(edges) == [["a", "b", "c"], ["d", "e"]]


def test_public_methods_count_properties_once() -> None:
    source = """
class A:
    field: int = 0
    def run(self): ...
    async def stop(self): ...
    def _private(self): ...
    def __len__(self): ...
    @property
    def size(self): ...
    @size.setter
    def size(self, value): ...
"""
    assert public_methods(ast.parse(source)) == {"A": ["run", "size", "stop"]}


LAYERS = [["low"], ["left", "right"], ["top"]]
PACKAGES = {f"{name}/__init__.py": "" for name in ("low", "left", "right", "top")} | {"__init__.py": "import demo.left"}


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("top/x.py", "import demo, demo.low, demo.right", None),
        ("right/x.py", "from demo.low import a", None),
        ("low/x.py", "import demo.top", "low/x.py:1 (runtime): low imports demo.top, which is not below it"),
        ("low/x.py", "\ndef f():\n    import demo.left", "low/x.py:3 (lazy): low imports demo.left"),
        ("left/x.py", "from demo.right import a", "left imports demo.right"),
        ("right/x.py", "from demo import low, name", "right imports demo, which"),
        ("__init__.py", "from demo.top import a", "demo imports demo.top"),
        ("loose.py", "", "loose is in no layer"),
    ],
)
def test_violations(tmp_path: Path, name: str, source: str, message: str | None) -> None:
    actual_violations = violations(write(tmp_path, {**PACKAGES, name: source}), LAYERS)
    assert len(actual_violations) == (message is not None)
    assert message is None or message in actual_violations[0]


def test_a_layer_without_a_package_is_a_violation(tmp_path: Path) -> None:
    actual_violations = violations(write(tmp_path, PACKAGES), [*LAYERS, ["absent"]])
    assert actual_violations == ["absent is in the layers, and there is no such package"]


def test_the_tree_is_written_between_the_markers(tmp_path: Path) -> None:
    write(tmp_path, PACKAGES | {"low/__init__.py": '"""The types.\n\nMore.\n"""', "left/__init__.py": '"""Left."""'})
    tree = render_layers([["low"], ["left"]], package_docs(tmp_path / "demo"), root="demo")
    assert tree == "```text\ndemo/\n  low/   The types.\n  left/  Left.\n```"
    page = insert(f"# Title\n{BEGIN}\nold\n{END}\nAfter.\n", tree)
    assert page == f"# Title\n{BEGIN}\n{tree}\n{END}\nAfter.\n"
    assert insert(page, tree) == page


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="the page needs one line"):
        insert(page, "text")
