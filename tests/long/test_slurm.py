"""Runs of `agentrl launch slurm` on a real Slurm of one machine: the signal of a time limit, resume, scancel with two nodes."""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import wait_until

from agentrl.cli.main import main

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
KillWait=60
ReturnToService=2
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool_%n
StateSaveLocation={folder}/state
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
TINY = """
env: {name: single_turn}
data: {path: tasks.jsonl, label_key: a}
reward: exact_match
model: {path: multihop-warm}
sampler: {backend: embedded, max_new_tokens: 8, embedded: {slots: 16, context: 256, threads: 1}}
rollout: {batch_size: 2, n_samples_per_prompt: 2, max_turns: 1, max_tokens: 128}
learner: {device: cpu}
train: {steps: 10000, eval_every: 0, eval_first: false, save_every: 0}
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm of this user: controller and two nodes."""
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    missing = [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} are missing here (Debian: slurmctld, slurmd and slurm-client)")
    if os.getuid() != 0:
        pytest.skip("only root can start slurmd")
    for name in ("spool_n1", "spool_n2", "state"):
        (tmp_path / name).mkdir()
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        CONF.format(host=socket.gethostname(), ports=free_ports(3), user="root", folder=tmp_path, cpus=os.cpu_count())
    )
    monkeypatch.setenv("SLURM_CONF", str(conf))
    with (tmp_path / "daemons.log").open("wb") as log:
        daemons = [
            subprocess.Popen(command, stdout=log, stderr=log)
            for command in (
                ["slurmctld", "-D", "-f", str(conf)],
                *(["slurmd", "-D", "-N", node, "-f", str(conf)] for node in ("n1", "n2")),
            )
        ]
    try:
        wait_until(lambda: "2 idle" in run("sinfo", "--noheader", "--format=%D %T"), 60)
        yield
    finally:
        run("scancel", "--user=root")
        wait_until(lambda: not run("squeue", "--noheader"), 120)
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(60)


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def steps(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def start_run(folder: Path, *words: str) -> tuple[Path, str, Path]:
    """Submit a run; returns its folder, the job, and the job's log."""
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "tasks.jsonl").write_text("\n".join(f'{{"prompt": "Who is {i}?", "a": "{i}"}}' for i in range(40)))
    settings = ("--set", "cpus=1", "--set", "memory=2000")
    assert main(["launch", "slurm", "tiny.yaml", "--name", "tiny", *settings, *words]) == 0
    (job,) = run("squeue", "--noheader", "--format=%A").split()
    return folder / "runs" / "tiny", job, folder / "runs" / "tiny-job" / f"slurm-{job}.log"


def test_a_run_is_queued_again_and_resumes(slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, job, log = start_run(tmp_path)
    wait_until(lambda: len(steps(folder)) > 5, 240)
    run("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: "PENDING" in run("squeue", "--noheader", "--format=%T"), 120)
    assert "the run ended with status 1" in log.read_text()
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    run("scontrol", "update", f"jobid={job}", "StartTime=now")  # Slurm lets a job wait two minutes
    wait_until(lambda: "resumes from step" in log.read_text(), 240)
    (step,) = re.findall(r"resumes from step (\d+)", log.read_text())
    assert checkpoint.name == f"step_{int(step):06}"
    wait_until(lambda: max(steps(folder)) > int(step) + 5, 240)
    run("scancel", job)
    wait_until(lambda: log.read_text().count("the run ended with status 1") == 2, 120)
    assert steps(folder) == list(range(1, len(steps(folder)) + 1)), "each step once"


def test_scancel_lets_a_run_on_two_nodes_save(slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes are in other steps, which scancel ends at the same time."""
    monkeypatch.chdir(tmp_path)
    folder, job, log = start_run(tmp_path, "--nodes", "2", "placement.mode=disaggregate")
    wait_until(lambda: len(steps(folder)) > 5, 400)
    run("scancel", job)
    wait_until(lambda: "the run ended with status 1" in log.read_text(), 120)
    assert "SIGTERM: the run saves and ends" in log.read_text()
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    assert checkpoint.name == f"step_{max(steps(folder)):06}"
    wait_until(lambda: not run("squeue", "--noheader"), 200)


def test_a_run_on_two_nodes_ends_with_its_ray(slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, _, log = start_run(tmp_path, "--nodes", "2", "placement.mode=disaggregate", "train.steps=2")
    wait_until(lambda: not run("squeue", "--noheader"), 400)
    assert "the run ended with status 0" in log.read_text()
    assert steps(folder) == [1, 2]
    assert "task 0: Killed" in log.read_text(), "Ray, before the job's end"
