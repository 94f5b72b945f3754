"""The steps of docs/how_to/algorithm.md, carried out on a copy of the repository: one file and one row of a table."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import example

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how_to" / "algorithm.md"
NAME = "best_of_group"
SEEN = """
import runpy
from agentrl.algo.registry import algorithm_faults
from agentrl.algo.registry import compares_groups, make_estimator, needs_critic
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError

def load(*settings):
    config = load_config(None, [f"algo.advantage.name={name}", *settings])
    if faults := algorithm_faults(config):
        raise ConfigError(str(faults))
    return config

config = load("async.streaming=true", "algo.advantage.options.margin=0.1")
estimator = make_estimator(config.algo.advantage)
assert (estimator.name, estimator.options.margin, estimator.state()) == (name, 0.1, {})
assert compares_groups(config.algo) and not needs_critic(config.algo)
for settings, message in {
    ("algo.advantage.options.marign=1",): "Did you mean 'algo.advantage.options.margin'?",
    ("algo.advantage.options.margin=-1",): "algo.advantage.options.margin=-1: ",
    ("algo.critic.warmup_steps=1",): f"algo.advantage.name={name} has no critic",
}.items():
    try:
        load(*settings)
    except ConfigError as error:
        assert message in str(error), error
    else:
        raise AssertionError(settings)
"""
LISTED = """
page = runpy.run_path("docs/make_configuration.py")["reference"]()
assert f"| `algo.advantage.options.margin` | `float` | `0.0` | {name}: Rewards that are lower" in page
"""


def in_table(table: str, row: str) -> str:
    """Return a table's module with the import and the row of the page."""
    import_line, entry = row.strip("\n").split("\n")
    table = table.replace("from agentrl.algo.base", f"{import_line}\nfrom agentrl.algo.base", 1)
    head, brace, tail = table.rpartition("\n}\n")
    return f"{head}\n{entry}{brace}{tail}"


@pytest.mark.long
def test_a_new_algorithm_is_one_file_and_one_row(tmp_path: Path) -> None:
    for name in ("agentrl", "tests/unit/algo", "tests/unit/learner", "tests/unit/testing", "docs"):
        shutil.copytree(
            ROOT / name, tmp_path / name
        )  # with what is compiled, which files of the same age stay valid for
    for path in [*ROOT.glob("tests/*.py"), *ROOT.glob("tests/unit/*.py"), ROOT / "pyproject.toml"]:
        target = tmp_path / path.relative_to(ROOT)
        shutil.copy(path, target)
    (file, row) = re.search(r"<!-- row: (\S+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL).groups()
    table = tmp_path / file
    (table.parent / f"{NAME}.py").write_text(example(f"{NAME}.py", PAGE))
    table.write_text(in_table(table.read_text(), row))
    suites = ["tests/unit/testing/test_check_algorithm.py", "tests/unit/learner/test_metamorphic.py"]
    words = ["-q", "-p", "no:cacheprovider", "-k", NAME, *suites]
    tests = f"import pytest, sys\nsys.exit(pytest.main({words}))"
    command = [sys.executable, "-c", f"name = {NAME!r}{SEEN}{LISTED}{tests}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("reference", ["best_of_group.py:BestOfGroup", "best_of_group:BestOfGroup"])
def test_an_algorithm_by_import_path_is_seen_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    (tmp_path / "best_of_group.py").write_text(example("best_of_group.py", PAGE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        exec(SEEN, {"name": reference})
    finally:
        sys.modules.pop("best_of_group", None)
