"""Training runs whose processes are killed at random moments, and that must lose nothing.

::

    python -m tests.long.chaos --kills 200 --parallel 8 --out DIR

Each lane trains small runs, one after the other. While a run trains, a random process of it gets SIGKILL at a random moment; a
run that ends by it is resumed. After its end a run is audited. The report is JSON: kills by kind of process, what became of
the run, the seconds until it trained again, and every fault. The exit status is 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from chaos_audit import audit
from chaos_processes import KINDS, VARIABLE, RunProcesses, left_in_cgroups

BATCH, SAMPLES = 2, 2
STALL_S = 120.0
"""``obs.stall_warning_s`` of the runs: without progress for so long, the watchdog reports a hang."""
GONE_S = 5.0
"""Seconds that processes may outlive the run."""
_POLL_S = 0.1
_LOOK_S = 1.0
"""Seconds between two looks at all processes of a run."""

COMMON = (
    "run.dir=run",
    "train.eval_every=4",
    "train.eval_first=false",
    "train.save_every=3",
    "train.keep=3",
    "eval.size=4",
    f"rollout.batch_size={BATCH}",
    f"rollout.n_samples_per_prompt={SAMPLES}",
    "learner.threads=1",
    "sampler.embedded.threads=1",
    "sampler.health_interval_s=0.5",
    "sampler.max_restarts=100",
    "obs.progress=plain",
    "obs.tensorboard=false",
    f"obs.stall_warning_s={STALL_S}",
)
"""Keys of every run."""


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration."""

    name: str
    env: str
    keys: tuple[str, ...]
    on_gpus: bool = False
    """Whether it needs GPUs; from the others they are hidden."""


AGENT_FOLDER = Path(__file__).parents[2] / "examples" / "09_agent_program"
AGENT = (
    f"data.path={AGENT_FOLDER}/train.jsonl",
    f"data.eval_path={AGENT_FOLDER}/eval.jsonl",
    "data.label_key=answer",
    "data.metadata_key=facts",
    f"reward.function={AGENT_FOLDER}/page_rewards.py:score",
    "reward.key=score",
    "model.path=multihop-warm",
    "sampler.backend=embedded",
    "sampler.max_new_tokens=32",
    "rollout.max_turns=4",
    "rollout.max_tokens=512",
    f"rollout.agent.command={sys.executable} {AGENT_FOLDER}/agent.py",
    f"rollout.agent.env={{{VARIABLE}: '@RUN@'}}",
    "rollout.failure.agent=retry",
    "rollout.failure.max_retries=20",
)
"""An agent program, each attempt of which may be killed; its processes inherit no variable of the run."""
ASYNC = ("async.max_staleness=1", "algo.old_logprobs=sampler")
ON_GPUS = (
    "model.path=smollm2-135m",
    "sampler.backend=sglang",
    "sampler.engines=2",
    "sampler.sglang={dtype: bfloat16, attention_backend: triton, mem_fraction_static: 0.3, context_length: 1024, "
    "cuda_graph_max_bs_decode: 8, disable_prefill_cuda_graph: true, enable_fp32_lm_head: true}",
    "learner.device=cuda",
    "learner.ranks=2",
    "learner.precision=bfloat16",
    "learner.compile=false",
    "placement.mode=disaggregate",
    "weights.transport=distributed",
)
"""Two engines of SGLang and two ranks of the learner, a GPU each. ``--keys model.path=FOLDER`` sets a policy that knows the
task."""
CASES = (
    Case("search, synchronous", "search_r1", ()),
    Case("python, asynchronous", "python_math", ASYNC),
    Case("search, engines in a placement group", "search_r1", ("placement.mode=disaggregate", "sampler.engines=2")),
    Case("search, asynchronous, two ranks", "search_r1", (*ASYNC, "learner.ranks=2")),
    Case("python, synchronous, two engines", "python_math", ("sampler.engines=2",)),
    Case("search, asynchronous, two runners", "search_r1", (*ASYNC, "rollout.runners=2")),
    # A group has about 250 tokens.
    # The gateway is in the main process, and in runners.
    Case("agent program, synchronous", "single_turn", (*AGENT, "rollout.runners=0")),
    Case("agent program, asynchronous, two runners", "single_turn", (*AGENT, *ASYNC, "rollout.runners=2")),
    Case("search, streaming", "search_r1", ("async.streaming=true", "batch.tokens_per_micro=200")),
    Case("four GPUs, synchronous", "search_r1", ON_GPUS, on_gpus=True),
    Case("four GPUs, asynchronous", "search_r1", (*ON_GPUS, *ASYNC), on_gpus=True),
)


@dataclass(slots=True)
class Kill:
    """A process that was killed."""

    kind: str
    case: str
    phase: str
    """``start`` or ``training``."""
    at: float
    outcome: str = "open"
    """``itself``: the run trained on; ``resumed``: it ended and was resumed; ``finished``: it ended with status 0."""
    recover_s: float = 0.0
    """Seconds from the kill to the next metrics."""
    end_s: float = 0.0
    """Seconds from the kill to the end of the run, if it ended."""
    words: str = ""
    """The last line that an ended run printed."""


@dataclass(slots=True)
class Totals:
    """What all lanes share."""

    kills_left: int
    deadline: float
    kinds: Sequence[str]
    kills: list[Kill] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    lost: int = 0
    duplicated: int = 0
    hangs: int = 0
    finished: int = 0
    ended: list[ChaosRun] = field(default_factory=list)
    """Finished runs."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_kill(self) -> bool:
        """Return whether another process may be killed."""
        with self.lock:
            if self.kills_left <= 0 or time.monotonic() > self.deadline:
                return False
            self.kills_left -= 1
            return True

    def choose(self, rng: random.Random, living: dict[str, list[psutil.Process]]) -> tuple[str, psutil.Process] | None:
        """Choose a process: kinds that were killed least are more probable."""
        present = sorted(kind for kind in living if kind in self.kinds)
        if not present:
            return None
        counts = Counter(kill.kind for kill in self.kills)
        [kind] = rng.choices(present, [1 / (1 + counts[kind]) for kind in present])
        return kind, rng.choice(living[kind])


class ChaosRun:
    """One training run, which is killed and resumed until it has finished."""

    def __init__(
        self, case: Case, folder: Path, seed: int, steps: int, most_kills: int, totals: Totals, keys: Sequence[str]
    ) -> None:
        self._case, self._folder, self._steps, self._totals = case, folder, steps, totals
        self._rng = random.Random(seed)
        self._most_kills = most_kills
        of_case = [key.replace("@RUN@", str(folder)) for key in case.keys]
        self._keys = [*COMMON, *of_case, f"train.steps={steps}", f"run.seed={seed}", *keys]
        self._processes = RunProcesses(f"{folder}")
        self._open: list[Kill] = []
        """Kills since the run last trained."""
        self._attempt_kills: list[Kill] = []
        """Kills since the run was last started or resumed."""
        self._kills = 0
        """Kills so far."""
        self._main: subprocess.Popen[bytes] | None = None
        self._started = self._rows = 0
        self._start_s = 12.0
        self._output = folder / "output.txt"

    def run(self) -> None:
        """Train to the end, with kills."""
        self._folder.mkdir(parents=True)
        code, starts = None, 0
        while code != 0:
            starts += 1
            if starts > self._kills + 3:
                self._fault(f"not finished after {starts} starts and {self._kills} kills")
                return
            code = self._attempt()
            for kill in self._open:
                kill.end_s = time.monotonic() - kill.at
            self._check_gone()
            if code != 0:
                self._note_end(code)
        self._recovered("finished")
        self._check_end()

    def _note_end(self, code: int) -> None:
        """Note what ended the run: the kills since it last trained, or else the last kill."""
        blamed = self._open or self._attempt_kills[-1:]
        for kill in blamed:
            kill.outcome = kill.outcome if kill.outcome == "hang" else "resumed"
            kill.words = self._last_line()
        self._open = blamed
        kinds = [kill.kind for kill in self._attempt_kills]
        if code not in (1, -signal.SIGKILL) or (code == -signal.SIGKILL and not {"main", "hang"} & set(kinds)):
            self._fault(f"status {code} after kills of {kinds}: {self._last_line()}")
        elif not blamed:
            self._fault(f"status {code} without a kill: {self._last_line()}")

    def _attempt(self) -> int:
        """Start or resume the run, kill processes of it, and return its exit status."""
        run, self._attempt_kills = self._folder / "run", []
        words = (
            ["--resume", "run.dir=run"] if (run / "config.yaml").exists() else ["--env", self._case.env, *self._keys]
        )
        with self._output.open("ab") as output:
            output.write(f"\n---- {time.strftime('%H:%M:%S')} {' '.join(words[:2])}\n".encode())
            output.flush()
            self._main = subprocess.Popen(
                [sys.executable, "-m", "agentrl.cli.main", "train", *words],
                cwd=self._folder,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                    **({} if self._case.on_gpus else {"CUDA_VISIBLE_DEVICES": ""}),
                    **self._processes.environment,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        begun = time.monotonic()
        rows = self._count_rows()
        in_start = self._rng.random() < 0.3
        next_kill = begun + self._rng.uniform(0.5, self._start_s) if in_start else None
        progress, last, looked, stalls = begun, self._mark(), 0.0, self._stalls()
        while (code := self._main.poll()) is None:
            time.sleep(_POLL_S)
            now_s = time.monotonic()
            if now_s >= looked + _LOOK_S:
                looked = now_s
                self._living()
                if self._stalls() > stalls:
                    return self._hang()
            if (mark := self._mark()) != last:
                progress, last = now_s, mark
            if now_s - progress > 1.5 * STALL_S:
                return self._hang()
            new = self._count_rows()
            rows = min(rows, new)  # a resumed run removes the rows after its checkpoint
            if new > rows:
                if next_kill is None:
                    self._start_s = 0.5 * self._start_s + 0.5 * (now_s - begun)
                    next_kill = now_s + self._rng.uniform(0.0, 3.0)
                if any(now_s - kill.at > 1.0 for kill in self._open):  # the row is not of before the kill
                    self._recovered("itself")
                rows = new
            if next_kill is not None and now_s >= next_kill and self._strike("start" if in_start else "training"):
                in_start, next_kill, rows = False, time.monotonic() + self._rng.uniform(0.3, 6.0), self._count_rows()
        return code

    def _strike(self, phase: str) -> bool:
        """Kill a process, unless there are no kills left; return whether one was killed."""
        if (
            self._most_kills <= 0
            or (chosen := self._totals.choose(self._rng, self._living())) is None
            or not self._totals.take_kill()
        ):
            return False
        kind, process = chosen
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.Error:
            with self._totals.lock:
                self._totals.kills_left += 1
            return False
        self._most_kills -= 1
        self._kills += 1
        kill = Kill(kind, self._case.name, phase, time.monotonic())
        with self._output.open("a") as output:
            output.write(f"\n---- {time.strftime('%H:%M:%S')} SIGKILL to {kind} {process.pid}, in {phase}\n")
        self._open.append(kill)
        self._attempt_kills.append(kill)
        with self._totals.lock:
            self._totals.kills.append(kill)
        return True

    def _living(self) -> dict[str, list[psutil.Process]]:
        assert self._main is not None
        return self._processes.living(self._main.pid)

    def _hang(self) -> int:
        """Report and end a run without progress."""
        assert self._main is not None
        self._main.send_signal(signal.SIGUSR1)
        time.sleep(3)
        with self._totals.lock:
            self._totals.hangs += 1
        kinds = [kill.kind for kill in self._open]
        waits = self._output.read_text(errors="replace").rpartition("watchdog: ")[2].splitlines()[:6]
        self._fault(f"no progress for {STALL_S:g} s after kills of {kinds}: {' '.join(waits)}")
        self._main.kill()
        self._main.wait()
        for kill in self._open:
            kill.outcome = "hang"
        self._attempt_kills.append(Kill("hang", self._case.name, "hang", time.monotonic()))
        return -signal.SIGKILL

    def _recovered(self, outcome: str) -> None:
        for kill in self._open:
            kill.outcome = kill.outcome if kill.outcome != "open" else outcome
            kill.recover_s = time.monotonic() - kill.at
        self._open = []

    def _check_gone(self) -> None:
        """Check that all processes of the run have ended."""
        if leftovers := self._processes.left(GONE_S):
            self._fault(f"left {GONE_S:g} s after the end: {leftovers}; killed: {[kill.kind for kill in self._open]}")
            self._processes.end()

    def _check_end(self) -> None:
        faults = audit(self._folder / "run", self._steps, BATCH, SAMPLES)
        with self._totals.lock:
            self._totals.lost += len(faults.lost)
            self._totals.duplicated += len(faults.duplicated)
            self._totals.finished += 1
        for fault in faults.faults:
            self._fault(fault)
        for name in ("lost", "duplicated"):
            if groups := getattr(faults, name):
                self._fault(f"{name} groups: {groups}")
        with self._totals.lock:
            self._totals.ended.append(self)
        if leftovers := left_in_cgroups(self._processes.servers):
            self._fault(f"sandboxes left: {leftovers}")

    def _fault(self, words: str) -> None:
        with self._totals.lock:
            self._totals.faults.append(f"{self._case.name} ({self._folder.name}): {words}")

    def _stalls(self) -> int:
        """Return how often the watchdog has reported that nothing ended for `STALL_S`."""
        return self._output.read_text(errors="replace").count("watchdog: nothing has ended")

    def _mark(self) -> tuple[float, ...]:
        """Return what changes while the run does anything."""
        run = self._folder / "run"
        paths = (self._output, run / "metrics.jsonl", run / "rollouts", run / "checkpoints")
        return tuple(path.stat().st_mtime if path.exists() else 0.0 for path in paths)

    def _count_rows(self) -> int:
        """Return the number of the newest training step in the metrics."""
        file = self._folder / "run" / "metrics.jsonl"
        return file.read_bytes().count(b'"train/reward"') if file.exists() else 0

    def _last_line(self) -> str:
        text = self._output.read_text(errors="replace").splitlines()
        lines = [line for line in text if line.strip() and not line.startswith("----")]
        errors = [line for line in lines[-60:] if re.match(r"\w*(Error|error|stopped): ", line)]
        return (errors or lines or [""])[-1][:300]


def lane(number: int, cases: Sequence[Case], options: argparse.Namespace, totals: Totals, sandbox: str) -> None:
    """Train runs until there are no kills left."""
    count = 0
    while (totals.kills_left > 0 and time.monotonic() < totals.deadline) or not count:
        case = cases[(number + count * options.parallel) % len(cases)]
        folder = Path(options.out).absolute() / f"run-{number}-{count}"
        seed = options.seed + 1000 * number + count
        try:
            keys = [f"sandbox.backend={sandbox}", *options.keys]
            ChaosRun(case, folder, seed, options.steps, options.kills_a_run, totals, keys).run()
        except Exception as error:
            with totals.lock:
                totals.faults.append(f"{case.name} ({folder.name}): {type(error).__name__}: {error}")
        count += 1


def _summary(times: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 1), "max": round(max(times), 1)} if times else {}


def report(totals: Totals, seconds: float, sandbox: str) -> dict[str, object]:
    """Return the report of all lanes."""
    kinds: dict[str, object] = {}
    for kind in KINDS:
        kills = [kill for kill in totals.kills if kill.kind == kind]
        if not kills:
            continue
        times = [kill.recover_s for kill in kills if kill.recover_s]
        kinds[kind] = {
            "kills": len(kills),
            "in start": sum(kill.phase == "start" for kill in kills),
            "recovered by itself": sum(kill.outcome in ("itself", "finished") for kill in kills),
            "resumed": sum(kill.outcome == "resumed" for kill in kills),
            "hangs": sum(kill.outcome == "hang" for kill in kills),
            "seconds to recover": _summary(times),
            "seconds to the end": _summary([kill.end_s for kill in kills if kill.end_s]),
            "ends": dict(Counter(kill.words for kill in kills if kill.words).most_common(4)),
        }
    return {
        "kills": len(totals.kills),
        "runs finished": totals.finished,
        "lost groups": totals.lost,
        "duplicated groups": totals.duplicated,
        "hangs": totals.hangs,
        "faults": totals.faults,
        "sandbox": sandbox,
        "seconds": round(seconds, 1),
        "by kind": kinds,
        "by case": dict(Counter(kill.case for kill in totals.kills)),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the chaos test, and print its report."""
    parser = argparse.ArgumentParser(prog="python -m tests.long.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=8, help="runs at the same time")
    parser.add_argument("--out", type=Path, required=True, help="an empty folder for the runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24, help="training steps of a run")
    parser.add_argument("--kills-a-run", type=int, default=8, help="most kills of a run")
    parser.add_argument("--seconds", type=float, default=400, help="no kill and no new run begins after that")
    parser.add_argument(
        "--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="kinds of processes that are killed"
    )
    without_gpus = [number for number, case in enumerate(CASES) if not case.on_gpus]
    parser.add_argument("--cases", nargs="*", type=int, default=without_gpus, help="numbers of configurations")
    parser.add_argument("--keys", nargs="*", default=[], help="settings of all runs, over their own")
    options = parser.parse_args(words)
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out={options.out} is not empty")
    sandbox = "bubblewrap" if shutil.which("bwrap") else "unsafe_subprocess"
    if sandbox != "bubblewrap":
        print("bubblewrap is not installed: the Python tool runs without a sandbox", file=sys.stderr)
    begun = time.monotonic()
    totals = Totals(options.kills, begun + options.seconds, options.kinds)
    cases = [CASES[number] for number in options.cases]
    lanes = [
        threading.Thread(target=lane, args=(number, cases, options, totals, sandbox))
        for number in range(options.parallel)
    ]
    for each in lanes:
        each.start()
    for each in lanes:
        each.join()
    summary = report(totals, time.monotonic() - begun, sandbox)
    text = json.dumps(summary, indent=1)
    (options.out / "report.json").write_text(text)
    print(text)
    return int(bool(totals.faults or totals.lost or totals.duplicated or totals.hangs))


if __name__ == "__main__":
    sys.exit(main())
