"""The README's own example runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import preloaded

README = Path(__file__).parent.parent / "README.md"


def example(name: str = "brief.py", page: Path = README) -> str:
    match = re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL)
    assert match
    return match.group(1)


def test_example_is_short() -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 20


def test_example_passes_the_environment_check(tmp_path: Path) -> None:
    (tmp_path / "brief.py").write_text(example())
    words = ["env", "check", "brief.py:Brief"]
    done = preloaded.run("agentrl.cli.main:main", words, cwd=tmp_path, env=dict(os.environ), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passes" in done.stdout


CHECK = """
from agentrl.core.registry import lookup_tool
from agentrl.testing import check_tool
import my_tools
assert lookup_tool("weather") is my_tools.weather
check_tool(my_tools.weather, {"city": "Rome"})
"""


def test_tool_of_ten_lines_keeps_the_contract(tmp_path: Path) -> None:
    code = example("my_tools.py")
    assert code == example("my_tools.py", README.parent / "docs" / "how_to" / "tools.md")
    assert len(code.splitlines()) <= 10
    (tmp_path / "my_tools.py").write_text(code)
    command = [sys.executable, "-c", CHECK]  # in a process of its own: what it registers stays there
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_readme_names_only_commands_that_exist() -> None:
    from agentrl.cli.main import COMMANDS

    named = set(re.findall(r"^agentrl (\w+)", README.read_text(), re.MULTILINE))
    assert named <= set(COMMANDS)
