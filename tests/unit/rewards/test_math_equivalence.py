r"""Whether expressions mean the same, in worker processes that end."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from command_words import command_words
from deadlines import wait_for_exit

from agentrl.rewards import math_equivalence, notation
from agentrl.rewards.math_equivalence import WorkerPool


@pytest.fixture(scope="module")
def workers():
    pool = WorkerPool(size=2)
    yield pool
    pool.close()


def children():
    return [child for child in psutil.Process().children() if "agentrl.rewards.math_worker" in command_words(child)]


@pytest.mark.parametrize(
    ("answer", "label", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        ("x^2 + 2x + 1", "(x+1)^2", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        (r"\{2, 1\}", r"\{1, 2\}", True),
        (r"\text{A}", "A", True),
        ("3", "4", False),
        (r"\frac{1}{3}", "0.333333", True),
        (r"10\ \mathrm{cm}^{2}", "10 square centimeters", True),
        ("cos(x)", r"\cos x", True),
        (r"\langle 1, 2\rangle", r"\langle 1,2 \rangle", True),
        (r"(-\infty,0)\cup(1,2)", "(-∞,0)∪(1,2)", True),
        ("1/0", "3", False),
        ("((((", "3", False),
        ("", "3", False),
    ],
)
def test_meaning_not_spelling(workers, answer, label, same):
    assert workers.equivalent(answer, label) is same


def test_a_label_that_cannot_be_read(workers):
    with pytest.raises(ValueError, match="the label ' ' is no mathematical expression"):
        workers.equivalent("3", " ")
    assert workers.equivalent("3", "3")


def test_many_threads_share_few_processes(workers):
    other_processes = len(children()) - len(workers._idle)
    with ThreadPoolExecutor(8) as pool:
        same = list(pool.map(lambda number: workers.equivalent(f"x+{number}", "3+x"), range(8)))
    assert same == [number == 3 for number in range(8)]
    assert 1 <= len(children()) - other_processes <= 2


def test_what_takes_too_long_is_wrong_and_its_process_is_gone():
    processes_before = {child.pid for child in children()}
    pool = WorkerPool(size=1, limit_s=0.3)
    try:
        assert pool.equivalent("9^{9^{9^{9}}}", "3") is False
        assert {child.pid for child in children()} == processes_before, "killed, and waited for"
        pool.limit_s = 30
        assert pool.equivalent("x", "x"), "the pool goes on with another process"
        assert len(children()) == len(processes_before) + 1
    finally:
        pool.close()
    assert {child.pid for child in children()} == processes_before


class DyingWorker:
    """Dies in its comparison, as when the system's memory has run out, as long as ``deaths`` are left."""

    deaths = 0
    alive = True

    def compare(self, answer: str, label: str, limit_s: float) -> str:
        """Return that they are the same."""
        if DyingWorker.deaths:
            DyingWorker.deaths -= 1
            raise math_equivalence.WorkerDied(None)
        return math_equivalence.SAME

    def kill(self) -> None:
        """It has no process."""


def test_a_worker_that_dies_is_no_verdict_on_the_answer(monkeypatch):
    monkeypatch.setattr(math_equivalence, "_Worker", DyingWorker)
    for deaths, same in ((0, True), (1, True), (2, False)):
        DyingWorker.deaths = deaths
        assert WorkerPool(size=1).equivalent("x", "x") is same


def test_the_death_of_a_worker_is_noticed(workers):
    with workers.worker() as worker:
        worker._process.kill()
        with pytest.raises(math_equivalence.WorkerDied):
            worker.compare("3", "3", 30.0)
        worker.kill()


def test_workers_end_with_a_process_that_is_killed():
    code = (
        "import sys, psutil; from agentrl.rewards.math_equivalence import equivalent; assert equivalent('x', 'x');"
        "print(psutil.Process().children()[0].pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdin is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    wait_for_exit(worker, 20)


@pytest.mark.parametrize("text", ["10", "¹", "1 1/", "0.\\overline{", "\\text{", "**", "5 cm/", "sin "])
def test_no_notation_takes_long(text):
    start = time.process_time()
    notation.rewrite(text * 20_000)
    notation.compare_numbers(text * 20_000, "5")
    assert time.process_time() - start < 1
