"""Measures of a small made-up package, and counts of words in a small tree."""

from pathlib import Path

from tests.structure.measure import measure
from tests.structure.words import counts, split_words


def test_measures_of_a_small_package(tmp_path: Path) -> None:
    package, tests = tmp_path / "demo", tmp_path / "tests"
    files = {
        package / "__init__.py": '"""A package."""\n',
        package / "loose.py": 'def public():\n    """Doc."""\n\n\n    return 1\ndef _private(): ...\n',
        package / "inner" / "__init__.py": "",
        package / "inner" / "first.py": (
            "import demo.loose\nfrom demo.inner import second\nclass First:\n    def run(self): ...\n"
        ),
        package / "inner" / "second.py": "def start():\n    from demo.inner import first\n",
        tests / "test_demo.py": "# A comment.\n\nassert 1\nassert 2\n",
    }
    for path, source in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    measured = measure("small", package, tests)
    assert measured.cells == {
        "package": "small",
        "modules": "5",
        "lines per file: median, max": "2, 6",
        "lines per function: median, max": "2, 5",
        "functions > 60": "0 (0.0%)",
        "public names with docstring": "25%",
        "loose modules": "1",
        "most imports by one module": "2 (inner.first)",
        "classes > 15 public methods": "0",
        "modules in import cycles: at import": "0",
        "lazy and type-only too": "2",
        "top-level packages": "2",
        "arrows between them": "1",
        "top-level packages in cycles": "0",
        "test lines per code line": "0.22",
    }
    assert measured.details["cycles, all"] == ["demo.inner.first, demo.inner.second"]
    assert measured.details["loose"] == ["demo.loose"]


def test_words_are_found_in_identifiers_comments_and_pages(tmp_path: Path) -> None:
    (tmp_path / "agentrl").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / ".venv").mkdir()
    code = '"""Beside it, of its\nown."""\ndef make_way(): ...\nclass MakeWay:\n    """Yes."""\n'
    code += "# of\n# its own, besides\nparts = 1\n"
    (tmp_path / "agentrl" / "choice.py").write_text(code)
    (tmp_path / "docs" / "page.md").write_text("Somebody is told; BESIDE, somebodys.")
    (tmp_path / ".venv" / "page.md").write_text("told")
    actual = {row: cells for row, cells in counts(tmp_path).items() if any(cells)}
    assert actual == {
        "make way": (2, 0),
        "told": (0, 1),
        "somebody": (0, 1),
        "of its own": (2, 0),
        "beside": (1, 1),
        "all of these": (5, 3),
        "docstrings of three words or fewer": (1, None),
        "modules named choice, collect, control, session, show, source, stack": (1, None),
        "identifiers with part": (1, None),
        "part (mostly ordinary)": (1, 0),
    }


def test_identifiers_are_split_into_words() -> None:
    assert split_words("StepFigures.step_figures\n  # in_flight") == "Step Figures.step figures in flight"
