"""A machine of a Ray cluster is lost with all of its processes: the run goes on without an engine's, and ends and is resumed
after a learner rank's. Machines are addresses of the loopback, each with a raylet."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
sys.path.insert(0, str(Path(__file__).parent))
from chaos import BATCH, COMMON, SAMPLES
from chaos_audit import audit
from chaos_processes import kind_of
from shared_runs import Running

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 20
WATCHDOG_S = 60.0
KEYS = (*COMMON, "placement.mode=disaggregate", "sampler.engines=2", "learner.device=cpu", f"train.steps={STEPS}")
MODES = {"synchronous": (), "asynchronous": ("async.max_staleness=1", "algo.old_logprobs=sampler")}


class Machines:
    """The machines of a cluster, without the head, on which nothing is placed."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        small: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
        cluster.add_node(num_cpus=0, num_gpus=0, **small)
        self._nodes = [
            cluster.add_node(node_ip_address=f"127.0.0.{number + 2}", num_cpus=2, num_gpus=0, **small)
            for number in range(count)
        ]

    def kinds(self) -> list[set[str]]:
        """The kinds of processes on each living machine."""
        return [{kind for _, kind in self._processes(node)} for node in self._nodes]

    def lose(self, machine: int) -> None:
        """End all processes of a machine at once."""
        node = self._nodes.pop(machine)
        processes = [process for process, _ in self._processes(node)]
        for process in processes:
            process.suspend()  # none may see the end of another
        for process in processes:
            process.kill()

    def _processes(self, node: Any) -> list[tuple[psutil.Process, str]]:
        processes: list[tuple[psutil.Process, str]] = []
        for started in [
            started_process.process.pid for several in node.all_processes.values() for started_process in several
        ]:
            parents: dict[int, str] = {}
            root = psutil.Process(started)
            for process in [root, *root.children(recursive=True)]:
                parents[process.pid] = kind_of(process, parents)
                processes.append((process, parents[process.pid]))
        return processes


@pytest.fixture
def machines() -> Iterator[Machines]:
    # Ray notes its address in a folder that all Rays of a machine share; its sockets want a short path.
    folder = tempfile.mkdtemp(prefix="agentrl-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        started = Cluster()
        machines = Machines(started, 4)
        patch.setenv("RAY_ADDRESS", started.address)
        yield machines
        started.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_a_machine(machines: Machines, tmp_path: Path, mode: str) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"

    def rows() -> list[dict[str, Any]]:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [row for row in map(json.loads, lines) if "train/reward" in row]

    keys = [*KEYS, *MODES[mode], f"obs.stall_warning_s={WATCHDOG_S}"]
    run = Running("train", "--env", "search_r1", *keys, cwd=tmp_path, fresh=True)
    try:
        run.wait_for(lambda: len(rows()) >= 2)
        kinds = machines.kinds()
        machines.lose(next(at for at, kind in enumerate(kinds) if "engine" in kind and "learner rank" not in kind))
        run.wait_for(lambda: any(row.get("rollout/engine_restarts", 0) >= 1 for row in rows()))
        trained = len(rows())
        run.wait_for(lambda: len(rows()) > trained)
        machines.lose(next(at for at, kind in enumerate(machines.kinds()) if "learner rank" in kind))
        assert run.finish() == 1, run.output()
        assert "--resume" in run.output()
        assert len(rows()) < STEPS
    finally:
        run.end()
    resumed = Running("train", "--resume", "run.dir=run", cwd=tmp_path, fresh=True)
    try:
        assert resumed.finish(400) == 0, resumed.output()
        assert "watchdog: nothing has ended" not in resumed.output()
    finally:
        resumed.end()
    actual = audit(tmp_path / "run", STEPS, BATCH, SAMPLES)
    assert (actual.lost, actual.duplicated, actual.faults) == ([], [], [])
