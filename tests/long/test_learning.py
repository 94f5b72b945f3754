"""The main job at full size, as docs/results.md reports it: about half an hour on two cores, the hard case as long again."""

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
from shared_runs import Running, agentrl, metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

MINUTES = 5
GIB = 2**30


def pss(root: psutil.Process) -> int:
    """Proportional set size of a process and all it started, bytes."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def train(cwd: Path, *words: str) -> tuple[float, int]:
    """Run to the end; return seconds from the command to the last line of ``metrics.jsonl``, and the peak of summed PSS."""
    start, peak = time.time(), 0
    run = Running("train", *words, "run.dir=run", "obs.progress=plain", cwd=cwd, fresh=True)
    try:
        while run.process.poll() is None:
            peak = max(peak, pss(psutil.Process(run.process.pid)))
            time.sleep(2)
        assert run.process.returncode == 0, run.output()
    finally:
        run.end()
    return (cwd / "run" / "metrics.jsonl").stat().st_mtime - start, peak


def evaluations(folder: Path) -> list[dict[str, float]]:
    return [row for row in metrics(folder) if "eval/exact_match" in row]


def show(name: str, row: dict[str, float]) -> None:
    hops = "  ".join(f"{key[-1]} hops {value:.3f}" for key, value in row.items() if "match/hops=" in key)
    print(f"{name}: exact match {row['eval/exact_match']:.3f}  {hops}  on {row['eval/episodes']:.0f}", flush=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_to_search_in_five_minutes(tmp_path: Path, seed: int) -> None:
    seconds, peak = train(tmp_path, "--env", "search_r1", f"run.seed={seed}")
    rows = evaluations(tmp_path / "run")
    for row in rows:
        show(f"seed {seed} step {row['step']:.0f}", row)
    print(f"seed {seed}: {seconds / 60:.2f} minutes, peak of summed PSS {peak / GIB:.2f} GiB", flush=True)
    assert rows[0]["eval/exact_match"] <= 0.4
    assert rows[-1]["eval/exact_match"] >= 0.95
    assert rows[-1]["eval/episodes"] >= 300
    assert seconds <= MINUTES * 60
    assert peak < 8 * GIB

    shuffled = tmp_path / "shuffled.json"
    words = ["--checkpoint", "run", "tasks.options.shuffle_titles=true", "--json", str(shuffled)]
    done = agentrl("eval", "--env", "search_r1", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    control = json.loads(shuffled.read_text())
    show(f"seed {seed} documents shuffled among titles", control)
    assert control["eval/exact_match"] <= 0.15


def test_more_of_its_own_data_does_not_do_it(tmp_path: Path) -> None:
    words = ["--config", "search_r1/sft_control", "run.dir=run", "sft.out=policy"]
    done = agentrl("sft", *words, cwd=tmp_path, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    done = agentrl("eval", "--env", "search_r1", "--checkpoint", "policy", "--json", "control.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    control = json.loads((tmp_path / "control.json").read_text())
    show("warm start, supervised for the same time", control)
    assert control["eval/exact_match"] < 0.5


def test_the_hard_case_is_reported(tmp_path: Path) -> None:
    train(tmp_path, "--config", "search_r1/cpu_discover")
    rows = evaluations(tmp_path / "run")
    for row in rows:
        show(f"discover step {row['step']:.0f}", row)
    assert rows[-1]["eval/exact_match/hops=2"] > rows[0]["eval/exact_match/hops=2"]
