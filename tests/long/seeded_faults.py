"""Training runs with one fault each, and what `agentrl doctor` must name first: ``python -m tests.long.seeded_faults``.

Each run trains the shipped policy for a few dozen steps. The fault is in the user's reward function, tool, environment,
configuration or data, or comes from outside: a kill, a full disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from agentrl.doctor.diagnose import diagnose
from agentrl.doctor.record import Finding

REPOSITORY = Path(__file__).parents[2]
SETTINGS = (
    *(
        "train.steps=24",
        "eval.size=48",
        "run.dir=disk/run",
        "run.seed=7",
        "obs.progress=plain",
        "obs.tensorboard=false",
    ),
    *("learner.threads=1", "sampler.embedded.threads=1"),
)
HANG_S = 40.0
"""Seconds without a step after which a run that hangs is looked at: more than five steps take on a busy machine."""
LIMIT_S = 180.0
"""Seconds without a step after which a run is given up."""
PROGRAM = "import sys; from in_process_learner import main; sys.exit(main())"

End = Literal["itself", "kill", "alive"]
"""How a run is left to the doctor: it has ended, was killed with SIGKILL, or is still alive, and writes nothing more."""


@dataclass(frozen=True)
class SeededFault:
    """A fault, and the right diagnosis."""

    name: str
    title: str
    """A regular expression of the title of the first problem or hint."""
    advice: str
    """A regular expression of its evidence and advice: the key or the place to change."""
    settings: Sequence[str] = ()
    """Of the configuration."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of the project that take the place of the example's, by name."""
    replaced: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Text of the example's files, and what takes its place."""
    example: str = "01_own_reward"
    """The folder of ``examples/`` that is the project."""
    end: End = "itself"
    disk_mib: int | None = None
    """Size of the disk of the run folder."""
    kills_engine_every: int | None = None
    """Steps between kills of the engine."""


REWARD = """
import re

MOVE = re.compile(r"<think> (?P<thought>[^<]*) </think><search> (?P<name>[^<]*) </search>")


def first_move(sample):
    move = MOVE.match(sample.final)
    name = float(move is not None and move["name"] == sample.label)
    thought = float(move is not None and move["thought"] == sample.metadata["first"])
    return {"score": (name + thought) / 2}
"""


def reward(code: str, head: str = "") -> dict[str, str]:
    """Return a reward function that is ``code``, with the right score as ``score`` and a count of calls as ``calls``."""
    body = "\n".join(f"    {line}" for line in code.strip().splitlines())
    return {
        "rewards.py": REWARD.replace("def first_move", "def _first_move")
        + f"""
{head}
calls = 0


def first_move(sample):
    global calls
    calls += 1
    score = _first_move(sample)["score"]
{body}
"""
    }


JUDGE = """
import urllib.request


def judge(score):
    if calls > 600:
        urllib.request.urlopen("http://127.0.0.1:9/judge", timeout=5).read()
    return score
"""

TOOL = '''
async def ask_registry(name: str, fact: Literal["birthplace", "employer", "spouse"]) -> str:
    """Return one fact about a person."""
'''

FAULTS = (
    SeededFault(
        "reward without variance", "every reward is 0.5", r"reward\.function", files=reward("return {'score': 0.5}")
    ),
    SeededFault(
        "dead judge, errors",
        "many episodes fail|stopped|failed",
        r"rewards\.py.*(refused|judge)",
        files=reward("return {'score': judge(score)}", JUDGE),
    ),
    SeededFault(
        "dead judge, errors swallowed as 0",
        "every reward",
        r"reward\.function",
        files=reward("try:\n    return {'score': judge(score)}\nexcept OSError:\n    return {'score': 0.0}", JUDGE),
    ),
    SeededFault("truncated ends", "limits cut", r"sampler\.max_new_tokens", ("sampler.max_new_tokens=5",)),
    SeededFault("too high rate", "", r"learner\.optimizer\.lr", ("learner.optimizer.lr=0.03",)),
    SeededFault("too low rate", "", r"learner\.optimizer\.lr", ("learner.optimizer.lr=1.0e-9",)),
    SeededFault(
        "entropy collapse",
        "entropy has collapsed",
        r"algo\.entropy_coef",
        ("learner.optimizer.lr=1.0e-3", "train.steps=40"),
        reward("return {'score': 1 - len(sample.final) / 200 + (calls % 7) / 700}"),
    ),
    SeededFault(
        "slow tool",
        "tool",
        "ask_registry",
        ("rollout.concurrency=16",),
        replaced={
            "registry_env.py": [
                (TOOL, TOOL + "    await asyncio.sleep(1)\n"),
                ("import re\n", "import asyncio\nimport re\n"),
            ]
        },
        example="03_own_tool",
    ),
    SeededFault(
        "broken tool",
        "tool",
        "ask_registry",
        replaced={
            "registry_env.py": [(TOOL, TOOL + '    if len(name) % 2:\n        raise RuntimeError("no connection")\n')]
        },
        example="03_own_tool",
    ),
    SeededFault("starved engine", "concurrency", r"rollout\.concurrency", ("rollout.concurrency=2",)),
    SeededFault("full disk", "disk", "run.dir", ("train.save_every=1", "train.keep=20"), disk_mib=90),
    SeededFault("engine that dies", "engines died", "engine", kills_engine_every=6),
    SeededFault("killed", "is gone", "resume it from", ("train.save_every=4",), end="kill"),
    SeededFault(
        "reward function that hangs",
        "hangs",
        "reward",
        ("obs.stall_warning_s=5",),
        reward("if calls > 700:\n    time.sleep(1000)\nreturn {'score': score}", "import time"),
        end="alive",
    ),
    SeededFault(
        "reward that is no number",
        "many episodes fail|stopped",
        r"nan|finite",
        (),
        reward("return {'score': float('nan') if calls % 4 == 0 else score}"),
    ),
    SeededFault(
        "reward for length",
        "longer answers get higher rewards",
        r"reward\.function.*\n.*algo\.overlong",
        ("sampler.max_new_tokens=200", "learner.optimizer.lr=1.0e-3", "train.steps=40"),
        reward("return {'score': min(1.0, len(sample.final) / 1500)}"),
    ),
    SeededFault(
        "rollouts that are too old",
        "not trained",
        r"async\.mask_older_than",
        ("async.max_staleness=6", "async.mask_older_than=1"),
    ),
    SeededFault(
        "engine samples from another distribution",
        "disagree",
        r"sampler\.top_p",
        ("sampler.top_p=0.5", "sampler.allow_unnormalised=true"),
    ),
    SeededFault(
        "memory leak",
        "memory .*grows",
        "trainer",
        (),
        reward("leak.append(bytes([calls % 256]) * 1_000_000)\nreturn {'score': score}", "leak = []"),
    ),
    SeededFault(
        "rewards of a large scale",
        "gradient norm",
        "reward",
        ("algo.advantage.options={std_normalise: false}",),
        reward("return {'score': 1e5 * score}"),
    ),
    SeededFault(
        "few tasks, learned by heart",
        "only 2 tasks",
        r"by heart.*data\.path",
        ("data.path=few.jsonl", "learner.optimizer.lr=2.0e-3", "train.eval_every=4"),
    ),
    SeededFault(
        "a filter that drops almost all",
        "filters drop|stopped",
        r"filter_groups",
        ("rollout.filter_groups.filters=[filters.py:rare]",),
        {
            "filters.py": "calls = 0\n\n\ndef rare(group):\n    global calls\n    calls += 1\n    return calls % 12 != 0\n"
        },
    ),
)


def diagnosis(fault: SeededFault, folder: Path) -> tuple[bool, Finding]:
    """Run a fault in a new folder; returns whether its first finding names it, and the finding."""
    project = folder / "project"
    shutil.copytree(
        REPOSITORY / "examples" / fault.example, project, ignore=shutil.ignore_patterns("runs", "__pycache__")
    )
    rows = (project / "train.jsonl").read_text().splitlines() if (project / "train.jsonl").exists() else []
    (project / "few.jsonl").write_text("\n".join(rows[:2]))
    for name, text in fault.files.items():
        (project / name).write_text(text)
    for name, changes in fault.replaced.items():
        text = (project / name).read_text()
        for before, after in changes:
            assert before in text, f"{name} has no {before!r}"
            text = text.replace(before, after, 1)
        (project / name).write_text(text)
    with _disk(project / "disk", fault.disk_mib), _running(fault, project):
        findings = diagnose(project / "disk" / "run")
    findings = [finding for finding in findings if finding.severity != "state"]
    if not findings:
        return False, Finding("state", "no problem", ())
    first = findings[0]
    words = "\n".join((*first.evidence, *first.advice))
    return bool(re.search(fault.title, first.title) and re.search(fault.advice, words)), first


@contextlib.contextmanager
def _disk(folder: Path, mib: int | None) -> Iterator[None]:
    """Have a small disk in a folder."""
    folder.mkdir()
    if mib is None:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def _running(fault: SeededFault, project: Path) -> Iterator[None]:
    """Have a run as its fault leaves it."""
    command = [sys.executable, "-c", PROGRAM, "train", "--config", "config.yaml", *SETTINGS, *fault.settings]
    path = os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (project / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=project, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            _follow(fault, process, project / "disk" / "run")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _follow(fault: SeededFault, process: subprocess.Popen[bytes], run: Path) -> None:
    """Wait for the end of a run, or bring about what the fault says."""
    quiet_since, steps, killed_at = time.monotonic(), 0, 0
    while process.poll() is None:
        time.sleep(0.2)
        if (now := _steps(run)) != steps:
            quiet_since, steps = time.monotonic(), now
        if fault.end == "kill" and steps >= 8:
            os.killpg(process.pid, signal.SIGKILL)
        if fault.kills_engine_every and steps >= killed_at + fault.kills_engine_every and steps < 20:
            killed_at = steps
            for child in psutil.Process(process.pid).children(recursive=True):
                if "agentrl.inference.embedded" in child.cmdline():
                    child.kill()
        if fault.end == "alive" and time.monotonic() - quiet_since > HANG_S and steps:
            return
        if time.monotonic() - quiet_since > LIMIT_S:
            raise TimeoutError(f"{fault.name}: no step for {LIMIT_S:.0f} s")


def _steps(run: Path) -> int:
    with contextlib.suppress(OSError):
        return (run / "metrics.jsonl").read_bytes().count(b"time/step_s")
    return 0


def main() -> int:
    """Run the faults, print each diagnosis and the hit rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="words of the names of faults; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/seeded_faults"), help="a new folder for the projects")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if not arguments.names or any(name in fault.name for name in arguments.names)]
    arguments.out.mkdir(parents=True)
    hits = 0
    for fault in faults:
        started = time.monotonic()
        hit, finding = diagnosis(fault, arguments.out / re.sub(r"\W+", "_", fault.name))
        hits += hit
        print(
            f"{'named ' if hit else 'MISSED'} {fault.name} ({time.monotonic() - started:.0f} s): {finding.title}",
            flush=True,
        )
        for line in (*finding.evidence, *finding.advice):
            print(f"           {line}", flush=True)
    print(json.dumps({"faults": len(faults), "named_first": hits}))
    return int(hits < len(faults))


if __name__ == "__main__":
    sys.exit(main())
