"""`agentrl launch`: what is written for each scheduler holds by its own rules, and starts, resumes and ends runs."""

import io
import os
import re
import shlex
import socket
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from agentrl.cli.main import main
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.launch.job import machine_counts

SBATCH = {
    "account", "chdir", "constraint", "cpus-per-task", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node",
    "open-mode", "output", "partition", "qos", "requeue", "reservation", "signal", "time",
}  # fmt: skip
"""Options of sbatch(1), of Slurm 22.05 and newer."""
STUB = """#!/usr/bin/env python3
import json, re, sys
known, path = json.loads(KNOWN), sys.argv[-1]
lines = open(path).read().splitlines()
assert lines[0] == "#!/bin/bash", lines[0]
for number, line in enumerate(lines[1:]):
    if line.startswith("#SBATCH"):
        option = re.fullmatch(r"#SBATCH --([a-z-]+)(=\\S+)?", line)
        assert option and option[1] in known, line
        assert not any(text and not text.startswith("#") for text in lines[1 : number + 1]), f"{line} is after a command"
print("Submitted batch job 7")
"""
RECORD = 'printf "%s" "${0##*/}" >> "$CALLS"; printf " %q" "$@" >> "$CALLS"; echo >> "$CALLS"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with programs in ``bin`` that record how they are called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", f"{tmp_path}/calls")
    (tmp_path / "bin").mkdir()
    (tmp_path / "mine.yaml").write_text("env: {name: single_turn}\nlearner: {device: cpu}\n# \u00e9 'a' \"b\"\n")
    return tmp_path


def add_program(folder: Path, name: str, text: str) -> None:
    program = folder / "bin" / name
    program.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    program.chmod(0o755)


def launch(*words: str) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(["launch", *words]) == 0, output.getvalue()
    return output.getvalue()


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 2
    return " ".join(capsys.readouterr().err.split())


SETTINGS = (
    "partition=gpu", "account=a", "qos=q", "constraint=h100", "reservation=r", "cpus=8", "memory=64G", "time=1:00:00", "grace=60",
)  # fmt: skip


def test_a_script_for_slurm_is_one_that_sbatch_takes(folder: Path) -> None:
    add_program(folder, "sbatch", STUB.replace("KNOWN", repr(str(sorted(SBATCH)).replace("'", '"'))))
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    output = launch("slurm", "scale/qwen2.5_32b_4nodes", "--name", "big", *settings, "train.steps=7")
    assert "4 machines, 8 GPUs each" in output
    assert "Submitted batch job 7" in output
    text = (folder / "big.sbatch").read_text()
    assert subprocess.run(["bash", "-n", "big.sbatch"]).returncode == 0
    assert {line.split("=")[0][10:] for line in text.splitlines() if line.startswith("#SBATCH")} == SBATCH
    run_dir = folder / "runs" / "big"
    assert f"agentrl train --config scale/qwen2.5_32b_4nodes train.steps=7 run.dir={run_dir}" in text
    assert (folder / "runs" / "big-job").is_dir(), "of the output"


def run_script(folder: Path, script: str, train: str, signal_name: str = "") -> tuple[int, list[str]]:
    """Run the job's script with a fake agentrl, send it a signal once that runs, and return its status and the calls."""
    (folder / "runs" / "tiny-job").mkdir(parents=True, exist_ok=True)
    (folder / "calls").unlink(missing_ok=True)
    add_program(folder, "agentrl", RECORD + train)
    add_program(folder, "scontrol", RECORD)
    os.mkfifo(folder / "ready")
    (folder / "job").write_text(re.sub(r"(?m)^export PATH=.*$", "", script))
    process = subprocess.Popen(["bash", "job"], env={**os.environ, "SLURM_JOB_ID": "7"}, stdout=subprocess.DEVNULL)
    (folder / "ready").read_text()
    if signal_name:
        subprocess.run(["kill", f"-{signal_name}", str(process.pid)], check=True)
    status = process.wait(30)
    (folder / "ready").unlink()
    return status, (folder / "calls").read_text().splitlines()


UNTIL_TERM = "trap 'exit 1' TERM; echo > ready; while true; do read -t 0.05 <> <(:); done\n"


def test_a_job_of_slurm_saves_is_queued_again_and_resumes(folder: Path) -> None:
    launch("slurm", "mine.yaml", "--name", "tiny", "--dry-run")
    script, run_dir = (folder / "tiny.sbatch").read_text(), folder / "runs" / "tiny"
    start = f"agentrl train --config {folder}/mine.yaml run.dir={run_dir}"
    assert run_script(folder, script, UNTIL_TERM, "USR1") == (1, [start, "scontrol requeue 7"])
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()
    resume = f"agentrl train --resume run.dir={run_dir}"
    assert run_script(folder, script, UNTIL_TERM, "TERM") == (1, [resume]), "Slurm decides what follows"
    assert run_script(folder, script, "echo > ready\n") == (0, [resume])
    assert run_script(folder, script, "echo > ready; exit 2\n") == (2, [resume])


@pytest.mark.parametrize("config", ["mine.yaml", "scale/qwen2.5_32b_4nodes"])
def test_manifests_are_valid_by_the_schemas_of_kubernetes(folder: Path, config: str) -> None:
    settings = ("image=team/agentrl:1", "namespace=rl", "secret=keys", "claim=shared", "cpus=16", "memory=64Gi")
    words = [word for setting in settings for word in ("--set", setting)]
    output = launch("kubernetes", config, "--name", "tiny", "--dry-run", *words)
    assert "kubectl apply -f tiny.yaml" in output
    manifests = list(yaml.safe_load_all((folder / "tiny.yaml").read_text()))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.33", strict=True)
    nodes = 1 if config == "mine.yaml" else 4
    *others, job = manifests
    kinds = ["ConfigMap", "Service"] if config == "mine.yaml" else ["Secret", "Service"]
    assert [manifest["kind"] for manifest in others] == kinds
    if config == "mine.yaml":
        assert others[0]["data"] == {"0-mine.yaml": (folder / "mine.yaml").read_text()}
    assert (job["spec"]["completions"], job["spec"]["successPolicy"]["rules"]) == (nodes, [{"succeededIndexes": "0"}])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"].get("limits") == ({"nvidia.com/gpu": 8} if nodes > 1 else None)
    (script,) = container["args"]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    name = "/etc/agentrl/0-mine.yaml" if config == "mine.yaml" else config
    assert f"agentrl train --config {name} run.dir=/runs/tiny" in script
    assert ("ray start --head" in script) == (nodes > 1)


@pytest.mark.parametrize("config", ["mine.yaml", "scale/qwen2.5_32b_4nodes"])
def test_a_task_of_skypilot_has_its_keys(folder: Path, config: str) -> None:
    settings = (
        "accelerator=H200",
        "bucket=runs",
        "spot=true",
        "image=docker:agentrl:1",
        "setup=pip install 'agentrl: x'",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    launch("skypilot", config, "--name", "tiny", "--dry-run", *words)
    task = yaml.safe_load((folder / "tiny.sky.yaml").read_text())
    nodes = 1 if config == "mine.yaml" else 4
    gpus = {"accelerators": "H200:8"} if nodes > 1 else {}
    assert task.pop("resources") == {**gpus, "use_spot": True, "image_id": "docker:agentrl:1"}
    assert task.pop("file_mounts") == {"/runs": {"name": "runs", "mode": "MOUNT"}}
    script = task.pop("run")
    assert task == {"name": "tiny", "num_nodes": nodes, "workdir": ".", "setup": "pip install 'agentrl: x'"}
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    if nodes == 1:
        (line,) = re.findall(r"(?s)printf %s (.*) > /etc/agentrl/0-mine.yaml", script)
        assert shlex.split(line) == [(folder / "mine.yaml").read_text()]


def test_a_run_over_ssh_starts_ray_on_all_machines_and_ends_with_its_process(folder: Path) -> None:
    """ssh is a program that runs the command here; what the machines do is one after the other then."""
    add_program(folder, "ssh", f'host=$1; shift\n{RECORD}cd /; bash -c "$*"\n')
    add_program(folder, "ray", RECORD + "[ $2 != --head ] || exec sleep 1000\n")
    add_program(folder, "python3", "echo 2\n")
    add_program(folder, "agentrl", RECORD + "echo trained\n")
    (folder / "hosts.txt").write_text("me@127.0.0.1  # the head\n\nsecond\n")
    listener = socket.create_server(("127.0.0.1", 0))  # where the head's Ray listens
    port = listener.getsockname()[1]
    words = ["--hosts", "hosts.txt", "--set", f"port={port}", "--name", "tiny", "placement.mode=disaggregate"]
    launch("ssh", "mine.yaml", *words, "--dry-run")
    script = (folder / "tiny.sh").read_text()
    script = re.sub(r"(?m)^export PATH=.*$", "", script)
    (folder / "tiny.sh").write_text(script.replace("setsid nohup", "").replace("& echo", "; echo"))
    with listener:
        done = subprocess.run(["bash", "tiny.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stop: ssh me@127.0.0.1 kill -TERM" in done.stdout
    calls = [line for line in (folder / "calls").read_text().splitlines() if not line.startswith("ssh")]
    assert sorted(calls[:2], reverse=True) + calls[2:] == [
        f"ray start --head --node-ip-address=127.0.0.1 --port={port} --block",
        f"agentrl train --config {folder}/mine.yaml placement.mode=disaggregate run.dir={folder}/runs/tiny",
        f"ray start --address=127.0.0.1:{port} --block",
    ]
    log = (folder / "runs" / "tiny-job" / "head.log").read_text()
    assert log.startswith("trained\n")
    assert log.endswith("the run ended with status 0\n")


def test_a_template_of_ones_own(folder: Path) -> None:
    template = launch("slurm", "--print-template")
    assert template.startswith("#!/bin/bash\n")
    requeue = "#SBATCH --requeue\n"
    (folder / "mine.j2").write_text(
        template.replace(requeue, f"{requeue}#SBATCH --nice={{{{ settings.nice or 3 }}}}\n")
    )
    launch("slurm", "mine.yaml", "--template", "mine.j2", "--dry-run", "--out", "job", "--set", "nice=9")
    assert "#SBATCH --nice=9\n" in (folder / "job").read_text()
    assert not (folder / "mine-job").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "mine.yaml", "--set", "partion=a"], "--set partion: the template has no such setting; it has account,"),
        (["slurm", "mine.yaml", "--set", "partition"], "--set partition: settings of a template are NAME=VALUE"),
        (["slurm", "mine.yaml", "--name", "My Run"], "--name My Run: a job's name has small letters, digits and dashes"),
        (["slurm", "mine.yaml", "--nodes", "2"], "--nodes 2: placement.mode=separate is for one machine"),
        (["slurm", "scale/qwen2.5_32b_4nodes", "--nodes", "2", "--gpus", "8"], "--nodes 2 --gpus 8 are 16 GPUs, and the"),
        (["slurm", "mine.yaml", "--template", "none.j2"], "--template none.j2 cannot be read"),
        (["slurm", "mine.yaml", "--template", "broken.j2"], "the template has a mistake in line 2"),
        (["slurm", "mine.yaml", "--template", "unknown.j2"], "the template has a mistake: 'jobname' is undefined"),
        (["slurm", "mine.yaml"], "there is no command sbatch here; mine.sbatch is written"),
        (["ssh", "mine.yaml"], "agentrl launch ssh needs --hosts FILE"),
        (["slurm", "mine.yaml", "--hosts", "hosts.txt"], "--hosts hosts.txt is for agentrl launch ssh"),
        (["kubernetes", "mine.yaml", "run.dir=runs/a"], "run.dir=runs/a: machines of kubernetes need a whole path"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_the_option_to_change(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setenv("PATH", str(folder / "bin"))
    (folder / "broken.j2").write_text("a\n{% if %}\n")
    (folder / "unknown.j2").write_text("{{ jobname }}\n")
    assert message in refusal(capsys, *words)


COLOCATED = {"placement": {"mode": "colocate"}, "learner": {"ranks": 16}, "sampler": {"backend": "sglang"}}


@pytest.mark.parametrize(
    ("values", "nodes", "gpus", "counts"),
    [
        ({"learner": {"device": "cpu"}}, None, None, (1, 0)),
        ({}, None, None, (1, 2)),
        ({}, None, 1, (1, 1)),
        (COLOCATED, None, None, (2, 8)),
        (COLOCATED, 4, None, (4, 4)),
        (COLOCATED, None, 4, (4, 4)),
    ],
)
def test_machines_are_counted_by_the_placement(
    values: dict, nodes: int | None, gpus: int | None, counts: tuple
) -> None:
    assert machine_counts(Config.model_validate(values), nodes, gpus) == counts


@pytest.mark.parametrize(("option", "counts"), [("--nodes 0", (0, None)), ("--gpus -1", (None, -1))])
def test_a_job_has_machines(option: str, counts: tuple) -> None:
    with pytest.raises(ConfigError, match=f"{option}: at least"):
        machine_counts(Config(), *counts)
