"""From file.py:name and module:name to the object, and what is said where there is none."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config.load import validate
from agentrl.config.recorded import recorded_keys
from agentrl.core import registry
from agentrl.core.errors import ConfigError
from agentrl.core.imports import imported_files, load_object
from agentrl.core.registry import ENVS, MODELS, plugin_code


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


def test_the_files_of_a_project_that_a_file_imports(folder: Path) -> None:
    """In functions, relatively, by packages and from a folder without __init__; not installed ones, and no cycle hangs."""
    codes = {
        "mine.py": "import pack.deep.leaf, torch, json\nfrom plain.low import NAME\ndef f():\n    import lazy\n",
        "lazy.py": "import mine, absent\n",
        "plain/low.py": "NAME = 1\n",
        "pack/__init__.py": "",
        "pack/deep/__init__.py": "from . import sibling\n",
        "pack/deep/leaf.py": "from ..base import *\n",
        "pack/deep/sibling.py": "",
        "pack/base.py": "this is no Python\n",
        "pack/unused.py": "",
    }
    for name, code in codes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    assert sorted(imported_files(folder / "mine.py")) == sorted({*codes} - {"pack/unused.py"})
    assert sorted(imported_files(folder / "pack/deep/leaf.py")) == ["pack/base.py", "pack/deep/leaf.py"]


@pytest.mark.parametrize("site", ["site-packages", "sources"])
def test_the_code_of_a_plugin_is_its_version_or_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    """Installed: the version; from a project's own folder, as of an editable installation: its files too."""
    root, info = tmp_path / site, tmp_path / site / "coins-2.5.dist-info"
    (root / "coins_package").mkdir(parents=True)
    (root / "coins_package" / "__init__.py").write_text("")
    (root / "coins_package" / "env.py").write_text("class Coins: ...\n")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coins\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(f"[{ENVS}]\ncoins = coins_package.env:Coins\n")
    monkeypatch.syspath_prepend(root)
    caches = (registry._entry_points, registry._shared_names, registry._all_entry_points)
    for cached_function in caches:
        cached_function.cache_clear()
    try:
        version, files = plugin_code(ENVS, "coins")
        keys = recorded_keys(validate({"env": {"name": "coins"}}))
    finally:
        for cached_function in caches:
            cached_function.cache_clear()
    assert version == keys["code of env.name"] == "coins 2.5"
    expected = ["__init__.py", "env.py"] if site == "sources" else []
    assert [file.name for file in files] == expected
    assert [key for key in keys if key.startswith("code of coins_package")] == [
        f"code of coins_package/{name}" for name in expected
    ]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a package with entry points, given its name and the text of their file."""
    monkeypatch.syspath_prepend(tmp_path)
    caches = (registry._entry_points, registry._shared_names, registry._all_entry_points)

    def install(name: str, points: str) -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        for cached_function in caches:
            cached_function.cache_clear()

    yield install
    for cached_function in caches:
        cached_function.cache_clear()


def test_a_plugin_that_cannot_be_imported_is_named_and_the_others_are_listed(
    plugin: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugin("coins", f"[{ENVS}]\ncoins = no_such_package:Coins\n[{MODELS}]\nsmall = no_such_package:F\none = math:pi\n")
    with pytest.raises(
        ConfigError, match=r"env.name=coins: importing no_such_package:Coins of coins 1.0 fails: .*no_such"
    ):
        registry.env_class("coins")
    with pytest.raises(ConfigError, match=r"model.path=one is registered as 3.14.*, and no path"):
        registry.model_folder("one")
    for words in (("env", "list"), ("models", "list")):
        assert main(words) == 0
        assert "no_such_package" in (out := capsys.readouterr().out)
        assert {"env": "search_r1", "models": "multihop-warm"}[words[0]] in out


def test_a_name_that_two_packages_register_is_refused(plugin: Callable[[str, str], None]) -> None:
    plugin("coins", f"[{ENVS}]\nsearch_r1 = math:pi\n")
    with pytest.raises(ConfigError, match=r"env.name=search_r1: .*coins 1.0.* register this name in agentrl.envs"):
        registry.env_class("search_r1")
