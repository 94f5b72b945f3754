"""Why a run is dead or hangs: its process, what it waits for, engines, tool servers, disk and memory."""

from __future__ import annotations

import errno
import os
import re
import shlex
import time
from collections.abc import Iterator
from itertools import groupby
from statistics import median

from agentrl.doctor.record import Finding, RunRecord, Severity, age
from agentrl.obs.expected_steps import expected_steps
from agentrl.obs.host_memory import GIB, NEAR_LIMIT, STEPS, grows

QUIET_STEPS = 5
"""A run that has written nothing for as long as so many steps hangs, unless `obs.stall_warning_s` is longer."""
SHOWN_WAITS = 6
LEAST_FREE_GIB = 1.0
DISK_ADVICE = "train.keep sets how many checkpoints are kept, obs.rollouts which rollouts are written; or move run.dir"
MEMORY_ADVICE = {
    "trainer": "a reward function, environment or callback may keep what it gets; or lower rollout.concurrency",
    "learner": "a checkpoint is copied to host memory first (train.save_every); on a CPU lower batch.tokens_per_micro",
    "engine": "lower sampler.max_running or sampler.sglang.mem_fraction_static",
    "tool_server": "lower the server's max_sessions, or restart it",
    "sandbox": "lower sandbox.limits.memory_mb",
}
"""By kind of process."""
_FAULTS = re.compile(
    r"out of memory|OutOfMemoryError|CUDA error|NCCL error|No space left|Traceback \(most recent|Segmentation fault|Killed"
)
"""What a line of a log has if the process failed."""


def process_findings(run: RunRecord) -> Iterator[Finding]:
    """Yield the state of the run's process, and what may have stopped it."""
    yield _state(run)
    yield from _engines(run)
    yield from _logs(run)
    yield from _disk(run)
    yield from _memory(run)
    yield from _failures(run)


def _state(run: RunRecord) -> Finding:
    """Return whether the run is in progress, hangs, has finished or is dead."""
    done = f"{run.step} of {_expected_steps(run)} steps are finished"
    ago = f"the last file was written {age(run.diagnosed_at - run.last_write)} ago"
    if run.runs:
        limit = _quiet_limit(run)
        if run.diagnosed_at - run.last_write <= limit:
            return Finding("state", "the run is going on", (done, ago, *_process(run)))
        why = f"{ago}, more than {age(limit)}"
        return Finding("problem", "the run hangs", (done, why, *_process(run), *_waits(run)), _hang_advice(run))
    if run.end is not None and not run.end.error:
        return Finding("state", "the run has finished", (done,))
    if run.end is not None:
        title = "the run was stopped" if run.end.error == "RunStopped" else "the run has failed"
        first = run.end.message.strip().splitlines() or [""]
        evidence = (done, f"{run.end.error}: {first[0]}", f"at {_clock(run.end.time)}")
        if os.strerror(errno.ENOSPC) in run.end.message:
            return Finding("problem", f"{title}, because the disk is full", evidence, (DISK_ADVICE, _resume(run)))
        return Finding("problem", title, evidence, (_resume(run),))
    if run.holder is None:
        return Finding("state", "no process has run here yet", (f"{run.folder} has no lock",))
    if not run.holder.is_here:
        where = f"the run is on {run.holder.host}; this machine cannot see its process"
        return Finding("state", where, (done, ago), (f"run `agentrl doctor` on {run.holder.host}",))
    killed = "it left no record of its end: it was killed (SIGKILL, out of memory) or the machine was restarted"
    advice = ("sudo dmesg | grep -i 'killed process' shows what the kernel has killed", _resume(run))
    return Finding(
        "problem", "the process of the run is gone", (done, ago, *_process(run), killed, *_waits(run)), advice
    )


def _quiet_limit(run: RunRecord) -> float:
    """Return the seconds without a written file after which a run hangs."""
    rows = [row["time/step_s"] for row in run.steps[-20:]] + [row["time/eval_s"] for row in run.evaluations[-3:]]
    slowest = max(median(rows), *rows[-3:]) if rows else 600.0
    return max(run.config.obs.stall_warning_s, QUIET_STEPS * slowest)


def _process(run: RunRecord) -> tuple[str, ...]:
    holder = run.holder
    return () if holder is None else (f"process {holder.pid} on {holder.host} since {holder.since}",)


def _waits(run: RunRecord) -> tuple[str, ...]:
    """Return what the run waited for at last, by its watchdog or, without a report, by its trace."""
    last = run.stalls[-1] if run.stalls else None
    if last is not None and last.time >= run.last_write:
        waits = last.waits[: SHOWN_WAITS + 1]
        return (f"watchdog at {_clock(last.time)}: {last.why}", *(f"  {wait}" for wait in waits))
    spans = run.open_spans[-SHOWN_WAITS:]
    return (
        ("spans that were open for long at the end of the newest trace:", *(f"  {span}" for span in spans))
        if spans
        else ()
    )


def _hang_advice(run: RunRecord) -> tuple[str, ...]:
    waits = " ".join(run.stalls[-1].waits) if run.stalls else ""
    pid = run.holder.pid if run.holder is not None else 0
    advice = [f"kill -USR1 {pid} prints what it waits for now; logs/watchdog.log has the stacks of its threads"]
    for words, text in (
        ("request to the engine|engine ", "logs/engine-*.log; sampler.request_timeout_s limits the time of a request"),
        (
            "tool ",
            "the log of the tool's server in logs/; the tool's timeout_s and rollout.max_seconds limit the time of a call",
        ),
        ("environment ", "the environment's method blocks: rollout.max_seconds limits the time of an episode"),
        ("reward", "the reward function blocks"),
        ("event loop is blocked", "a coroutine calls something that blocks: its file and line are above"),
    ):
        if re.search(words, waits):
            advice.append(text)
    return tuple(advice)


def _resume(run: RunRecord) -> str:
    if not run.checkpoints:
        return "there is no whole checkpoint: start again with another run.dir; train.save_every sets how often one is written"
    command = shlex.join(["agentrl", "train", "--resume", f"run.dir={run.folder}"])
    return f"resume it from {run.checkpoints[-1].name}: {command}"


def _engines(run: RunRecord) -> Iterator[Finding]:
    restarts = run.values("rollout/engine_restarts")
    if restarts and restarts[-1] > 0:
        first = next(row for row in run.steps if row.get("rollout/engine_restarts", 0) > 0)
        evidence = f"rollout/engine_restarts is {restarts[-1]:.0f}; the first was in step {first['step']:.0f}"
        advice = (
            "logs/engine-*.log has the cause",
            "out of GPU memory: lower sampler.sglang.mem_fraction_static or sampler.max_running",
        )
        yield Finding("problem", "engines died or hung and were restarted", (evidence,), advice)


def _logs(run: RunRecord) -> Iterator[Finding]:
    for name, text in run.logs.items():
        lines = text.splitlines()
        fault_lines = [number for number, line in enumerate(lines) if _FAULTS.search(line)]
        if fault_lines:
            last = fault_lines[-1]
            end = (
                next((line for line in lines[last + 1 :] if line[:1].strip()), "") if "Traceback" in lines[last] else ""
            )
            shown = tuple(line.strip()[:300] for line in (lines[last], end) if line)
            yield Finding(
                "problem", f"logs/{name} has an error", (f"{len(fault_lines)} lines like this; the last:", *shown)
            )


def _disk(run: RunRecord) -> Iterator[Finding]:
    newest = run.checkpoints[-1] if run.checkpoints else None
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) if newest is not None else 0
    free = run.free_bytes / GIB
    if free < max(LEAST_FREE_GIB, size / GIB):
        evidence = f"{free:.2f} GiB are free; the newest checkpoint has {size / GIB:.2f} GiB"
        yield Finding("problem", "the disk of the run folder is full", (evidence,), (DISK_ADVICE,))


def _memory(run: RunRecord) -> Iterator[Finding]:
    used = run.recent("host_memory/used_share", 3)
    sizes = {
        key[12:-4]: key
        for row in run.steps[-1:]
        for key in row
        if key.startswith("host_memory/") and key.endswith("_gib")
    }
    sizes.pop("total", None)
    if used and used[-1] >= NEAR_LIMIT:
        largest = max(sizes, key=lambda kind: run.steps[-1][sizes[kind]])
        shares = (
            f"host_memory/used_share is {used[-1]:.2f} in step {run.step}",
            f"most of it: {sizes[largest]} is {run.steps[-1][sizes[largest]]:.2f}",
        )
        yield Finding("problem", "the machine or its container has little memory left", shares, _memory_advice(largest))
    for kind, key in sizes.items():
        values = run.recent(key, STEPS)
        # Memory is measured every few seconds, so that short steps have equal values. The first is that of the start.
        measured = [value for value, _ in groupby(run.values(key))][1:]
        if len(values) == STEPS and (grows(values) or (len(measured) in range(4, STEPS) and grows(measured))):
            rate = (values[-1] - values[0]) / (len(values) - 1)
            evidence = (f"{key}: {values[0]:.2f} → {values[-1]:.2f} over {STEPS} steps, {rate:.3f} GiB a step",)
            severity: Severity = "problem" if _memory_runs_out(run) else "hint"
            yield Finding(severity, f"the memory of the processes of kind {kind} grows", evidence, _memory_advice(kind))


def _memory_runs_out(run: RunRecord) -> bool:
    """Return whether little memory is left before the last step, if it continues as in the last steps."""
    shares = run.recent("host_memory/used_share", STEPS)
    steps_left = _expected_steps(run) - run.step
    return shares[-1] + (shares[-1] - shares[0]) / (STEPS - 1) * steps_left >= NEAR_LIMIT if shares else False


def _expected_steps(run: RunRecord) -> int:
    return expected_steps(run.config.train, run.step, next(iter(run.recent("data/epoch", 1)), None))


def _memory_advice(kind: str) -> tuple[str, ...]:
    return (MEMORY_ADVICE[kind],) if kind in MEMORY_ADVICE else ()


def _failures(run: RunRecord) -> Iterator[Finding]:
    dropped = [
        row.get("rollout/dropped", 0.0) / row["rollout/episodes"]
        for row in run.steps[-10:]
        if row.get("rollout/episodes")
    ]
    if dropped and sum(dropped) / len(dropped) > 0.1:
        share = sum(dropped) / len(dropped)
        evidence = (f"{share:.0%} of the episodes of the last {len(dropped)} steps were dropped (rollout/dropped)",)
        advice = ("`agentrl view` shows their failures", "rollout.failure sets what follows a failure")
        yield Finding("problem", "many episodes fail", evidence, advice)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


LATE = 5
"""A group hangs if it takes as many times as long as the others did, and longer than `obs.stall_warning_s`."""
RECENT = 100
"""Finished groups that it is compared with."""


def journal_findings(run: RunRecord) -> Iterator[Finding]:
    """Yield what is wrong with the groups of a run."""
    if run.journal is None:
        return
    if faults := run.journal.faults():
        advice = (
            "the run's results are not those of its configuration: start it again",
            "docs/reference/checkpoints.md, Journal",
        )
        yield Finding("problem", "not every group was trained once", tuple(faults), advice)
    yield from _late(run)


def _late(run: RunRecord) -> Iterator[Finding]:
    """Yield the groups of a living run that take far longer than others."""
    assert run.journal is not None, "the caller has checked it"
    groups = [group for group in run.journal.waiting if not group.finished]
    took = [group.finished_at - group.admitted for group in run.journal.groups.values() if group.finished][-RECENT:]
    limit = max(run.config.obs.stall_warning_s, LATE * median(took) if took else 0.0)
    late = [group for group in groups if run.diagnosed_at - group.admitted > limit]
    if not run.runs or not late:
        return
    first = late[0]
    evidence = [
        f"group {first.position}, admitted {age(run.diagnosed_at - first.admitted)} ago with policy version {first.version}, "
        "has not ended",
        f"{len(groups)} groups run, {len(late)} of them for more than {age(limit)}",
    ]
    if took:
        evidence.append(f"the last {len(took)} groups took {age(median(took))} (median), at most {age(max(took))}")
    advice = (
        "the waits of the process, if it hangs, name the episode and the turn",
        "rollout.max_seconds and rollout.max_turns end long episodes",
    )
    yield Finding("problem", "a group of episodes does not end", tuple(evidence), advice)
