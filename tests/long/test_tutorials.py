"""The tutorials as a reader follows them: their files are written, their commands run in order, and their results are reached.

Left out are commands that need what a laptop has not, or that change the machine: see `LEFT_OUT`.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_commands import TUTORIALS, blocks

PAGES = sorted(TUTORIALS.glob("*.md"))
LEFT_OUT = re.compile(
    r"(sudo |pip |ray |~/|python3 -m venv|agentrl tools serve|agentrl (tune|bench|models get) )"
    r"|agentrl view .*--serve|.*(smollm2_1gpu|_4nodes|runs/large)(?!.*--dry-run)"
)
"""Installation, a Ray cluster of the machine, servers that run until Ctrl-C, and runs on GPUs."""


def test_there_are_seven() -> None:
    assert [page.name[0] for page in PAGES] == list("1234567")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with the files of all, since later tutorials use those of earlier ones."""
    folder = tmp_path_factory.mktemp("tutorials")
    for page in PAGES:
        for name, content in re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL):
            (folder / name).write_text(content)
    return folder


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial(page: Path, folder: Path) -> None:
    text = page.read_text()
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    for line in (line for block in blocks(page) for line in block.splitlines()):
        if line.strip() and not LEFT_OUT.match(line):
            words = shlex.split(line, comments=True)
            done = subprocess.run(
                words, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for run, metric, least in re.findall(r"<!-- check: (\S+) (\S+) (\S+) -->", text):
        rows = [json.loads(row) for row in (folder / run / "metrics.jsonl").read_text().splitlines()]
        assert [row[metric] for row in rows if metric in row][-1] >= float(least), (run, metric)
