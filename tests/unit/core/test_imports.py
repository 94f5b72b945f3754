"""From file.py:name and module:name to the object, and what is said where there is none."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.imports import load_object


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])  # without the current directory, as in a console script
    state_before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - state_before:
        del sys.modules[name]


def test_files_modules_and_what_lies_in_them(folder: Path) -> None:
    (folder / "own_helper.py").write_text("def half(x): return x / 2\n")
    (folder / "own_file.py").write_text(
        "from own_helper import half\nclass Judge:\n    def score(self): return half(4)\n"
    )
    (folder / "own_package").mkdir()
    (folder / "own_package" / "__init__.py").write_text("")
    (folder / "own_package" / "inner.py").write_text("def score(): return 3\n")
    judge = load_object("own_file.py:Judge", "k")
    assert judge().score() == 2
    assert load_object(f"{folder}/own_file.py:Judge", "k") is judge, "a file is loaded once"
    assert load_object("own_file.py:Judge.score", "k") is judge.score
    assert load_object("own_package.inner:score", "k")() == 3


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "gone.py:score",
            r"k=gone\.py:score: there is no file .*/gone\.py; the Python files there: broken\.py, some\.py",
        ),
        ("no/gone.py:score", "no Python files there either"),
        ("some.py:scor", r"some\.py has no 'scor'\. Did you mean 'score'\? It has: rate, score"),
        ("some:scor", r"some has no 'scor'\. Did you mean 'score'\? It has: rate, score"),
        ("gone_module:score", r"no module 'gone_module'; looked for gone_module\.py in .*installed package"),
        ("some.part:score", r"no module 'some\.part'; looked for some/part\.py"),
        ("broken.py:score", r"broken\.py fails: ZeroDivisionError: division by zero \(broken\.py:2\)"),
        ("broken:score", r"importing broken fails: ZeroDivisionError: division by zero \(broken\.py:2\)"),
        ("syntax.txt:score", "no module"),
        ("score", "write path/to/file.py:name or package.module:name"),
        (":score", "write path"),
        ("some.py:", "write path"),
    ],
)
def test_what_was_tried(folder: Path, reference: str, message: str) -> None:
    (folder / "some.py").write_text("from pathlib import Path\ndef score(): ...\ndef rate(): ...\n_x = 3\n")
    (folder / "broken.py").write_text("\n1 / 0\n")
    with pytest.raises(ConfigError, match=message):
        load_object(reference, "k")


def test_only_what_the_file_defines_is_listed(folder: Path) -> None:
    (folder / "own_tools.py").write_text(
        "import json\nfrom pathlib import Path as P\nfrom agentrl import register_tool, tool\n"
        "LIMIT: int = 3\n_hidden = 1\n"
        "@register_tool('own_adder')\n@tool(timeout_s=5)\nasync def add(a: int) -> str:\n    'Add.'\n    return 'x'\n"
        "first, (second, *rest) = 1, (2, 3)\n"
        "if LIMIT:\n    class Late: ...\n"
        "try:\n    import tomllib\nexcept ImportError:\n    fallback = None\n"
    )
    with pytest.raises(ConfigError, match=r"has no 'nope'; it has: LIMIT, Late, add, first, rest, second$"):
        load_object("own_tools.py:nope", "k")
    with pytest.raises(ConfigError, match=r"Did you mean 'add'\? It has"):
        load_object("own_tools.py:ad", "k")
    (folder / "only_imports.py").write_text("from agentrl import tool\nimport json\n")
    with pytest.raises(ConfigError, match=r"has no 'nope'; it has: nothing of its own, and imports: tool$"):
        load_object("only_imports.py:nope", "k")


def test_faults_within_a_module_are_its_own(folder: Path) -> None:
    (folder / "wants.py").write_text("import surely_not_installed\n")
    with pytest.raises(ConfigError, match=r"importing wants fails: ModuleNotFoundError: .*surely_not_installed"):
        load_object("wants:score", "k")
    (folder / "syntax.py").write_text("def score(:\n")
    with pytest.raises(ConfigError, match=r"SyntaxError: .* \(syntax\.py:1\)"):
        load_object("syntax.py:score", "k")
