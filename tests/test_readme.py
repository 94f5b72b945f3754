"""The README's own example runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def example() -> str:
    match = re.search(r"<!-- example: brief.py -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match
    return match.group(1)


def test_example_is_short() -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 20


def test_example_passes_the_environment_check(tmp_path: Path) -> None:
    (tmp_path / "brief.py").write_text(example())
    command = [sys.executable, "-m", "agentrl.cli.main", "env", "check", "brief.py:Brief"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passes" in done.stdout


def test_readme_names_only_commands_that_exist() -> None:
    from agentrl.cli.main import COMMANDS

    named = set(re.findall(r"^agentrl (\w+)", README.read_text(), re.MULTILINE))
    assert named <= set(COMMANDS)
    assert set(COMMANDS) - named == set()
