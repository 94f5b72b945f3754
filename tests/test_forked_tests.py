"""``pytest --forks N`` reports what pytest reports, and the end of a fork."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ENDS = """
import os, signal, warnings
import pytest

@pytest.fixture(scope="session")
def service():
    yield
    raise ValueError("at the end of the session")

def test_passes(): print("of a test that passes")
def test_fails():
    print("of a test that fails")
    assert 1 == 2
def test_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_exits(): os._exit(0)
def test_is_skipped(): pytest.skip("for a reason")
def test_warns(): warnings.warn("heed this", DeprecationWarning)
@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
def test_has_a_folder_of_its_process(tmp_path): assert tmp_path.parent.name.startswith("fork")
def test_last(service): pass
"""
MEETING = """
import os
from pathlib import Path

def test_the_other_file_runs_at_the_same_time():
    process = Path(f"{Path(__file__).stem}.pid")
    process.write_text(str(os.getpid()))
    while len(list(Path().glob("*.pid"))) < 2:
        pass
"""


def run(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    words = ["-c", os.devnull, "--rootdir", str(folder), "-p", "forked_tests", "--forks", "2", *arguments]
    command = [sys.executable, "-m", "pytest", *words, str(folder)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_each_outcome_is_reported_and_tests_after_the_end_of_a_fork_run(tmp_path: Path) -> None:
    done = run(tmp_path, test_ends=ENDS)
    assert done.returncode == 1, done.stderr
    assert "3 failed, 4 passed, 1 skipped, 1 xfailed, 1 warning, 1 error in" in done.stdout
    assert done.stdout.count("DeprecationWarning: heed this") == 1
    assert "of a test that fails" in done.stdout
    assert "of a test that passes" not in done.stdout
    assert "test_ends.py::test_is_killed - the process of this test ended with status -9" in done.stdout
    assert "test_ends.py::test_exits - the process of this test ended with status 0" in done.stdout
    assert "ERROR test_ends.py::test_last - ValueError: at the end of the session" in done.stdout


def test_files_run_at_the_same_time_in_processes_of_their_own(tmp_path: Path) -> None:
    done = run(tmp_path, test_left=MEETING, test_right=MEETING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({(tmp_path / f"{name}.pid").read_text() for name in ("test_left", "test_right")}) == 2


def test_the_first_failure_ends_all_and_fixtures_are_closed(tmp_path: Path) -> None:
    waiting = """
import pytest, signal
from pathlib import Path

@pytest.fixture(scope="session")
def service():
    yield
    Path("closed").touch()

def test_waits(service):
    Path("ready").touch()
    signal.pause()
"""
    failing = (
        "from pathlib import Path\ndef test_fails():\n    while not Path('ready').exists(): pass\n    assert 1 == 2"
    )
    done = run(tmp_path, "-x", test_failing=failing, test_waiting=waiting)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(r"^1 failed in|^=* 1 failed in", done.stdout, re.MULTILINE), done.stdout
    assert (tmp_path / "closed").exists()
