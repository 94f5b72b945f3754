"""What a run's cluster, league and diagnosis say, as JSON-able data."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from agentrl.config.secret_values import hide_secrets
from agentrl.core.errors import AgentrlError, ConfigError, UserError
from agentrl.core.reading import DECODE_ERRORS
from agentrl.dashboard.metrics_file import metric_keys
from agentrl.dashboard.run_summary import flatten
from agentrl.dashboard.runs import DashboardRun
from agentrl.doctor.diagnose import diagnose
from agentrl.inference.launch.kept_engines import engines_folder, read_record
from agentrl.learner.checkpoints import complete_checkpoints
from agentrl.obs.journal import read_journal
from agentrl.self_play.games import POLICY, WinTable
from agentrl.self_play.league import last_evaluation, read_league
from agentrl.self_play.league_plot import shown_players
from agentrl.self_play.ratings import Ratings

LOG_BYTES = 100_000
"""What is sent of the end of a log."""
_CLUSTER_KEYS = (
    "cluster.",
    "sampler.",
    "async.",
    "rollout.concurrency",
    "rollout.runners",
    "learner.backend",
    "weights.",
)
_GAUGES = (
    "host_memory/",
    "engine_idle/",
    "learner_idle/",
    "slot_idle/",
    "rollout/engine",
    "rollout/cache",
    "sync/",
    "rollout/max_running",
)
_SHOWN_RATINGS = 400
"""Most steps of the ratings' curves."""


def league(run: DashboardRun) -> dict[str, object]:
    """Return ratings over steps and after the last, and the payoff of each player against each other.

    Raises:
        ConfigError: the run has no self-play, or its record is damaged.
    """
    rows = read_league(run.folder)
    last = rows[-1]
    ratings, results = Ratings.from_state(last["ratings"]), WinTable.from_state(last["results"])
    players = shown_players(ratings, results)
    evaluation = last_evaluation(run.folder)
    shown_rows = rows[:: -(-len(rows) // _SHOWN_RATINGS)]
    return {
        "step": last["step"],
        "policy": POLICY,
        "ratings": [
            {"player": player, "rating": rating.mu, "sigma": rating.sigma, "low": rating.low}
            for player, rating in ((player, ratings.rating(player)) for player in ratings.ranking())
        ],
        "players": players,
        "seats": sorted({seat for _, _, seat in results.records}),
        "payoff": [[_record(results, player, opponent, None) for opponent in players] for player in players],
        "by_seat": {
            seat: [[_record(results, player, opponent, seat) for opponent in players] for player in players]
            for seat in sorted({seat for _, _, seat in results.records})
        },
        "asymmetry": {
            opponent: results.asymmetry(POLICY, opponent)
            for opponent in players
            if results.record(POLICY, opponent).games
        },
        "curves": {
            player: {
                "steps": [row["step"] for row in shown_rows if player in row["ratings"]],
                "values": [row["ratings"][player][0] for row in shown_rows if player in row["ratings"]],
            }
            for player in players
        },
        "evaluation": None if evaluation is None else {"step": evaluation["step"], "sets": evaluation["evaluation"]},
    }


def _record(results: WinTable, player: str, opponent: str, seat: int | None) -> dict[str, float] | None:
    record = results.record(player, opponent, seat)
    if not record.games:
        return None
    return {"wins": record.wins, "draws": record.draws, "losses": record.losses, "score": record.score}


def cluster(run: DashboardRun) -> dict[str, object]:
    """Return the process, the settings of engines and learner, their measurements, logs, checkpoints and the journal."""
    holder, end = run.holder, run.end
    last = metric_keys(run.metrics.rows())
    try:
        free_gib = shutil.disk_usage(run.folder).free / 2**30
    except OSError:
        free_gib = None
    return {
        "state": run.state(),
        "process": None if holder is None else {"pid": holder.pid, "host": holder.host, "since": holder.since},
        "end": None if end is None else {"error": end.error, "message": end.message, "time": end.time},
        "settings": {key: text for key, text in flatten(run.config).items() if key.startswith(_CLUSTER_KEYS)},
        "metrics": {key: value for key, value in last.items() if key.startswith(_GAUGES)},
        "logs": _logs(run.folder / "logs"),
        "checkpoints": [path.name for path in complete_checkpoints(run.folder / "checkpoints")],
        "journal": _journal(run.folder),
        "kept_engines": _kept_engines(),
        "free_gib": free_gib,
    }


def _logs(folder: Path) -> list[dict[str, object]]:
    if not folder.is_dir():
        return []
    entries = sorted(
        (entry for entry in os.scandir(folder) if entry.name.endswith(".log")), key=lambda entry: entry.name
    )
    return [
        {"name": entry.name, "bytes": entry.stat().st_size, "age_s": max(0.0, time.time() - entry.stat().st_mtime)}
        for entry in entries
        if entry.is_file(follow_symlinks=False)
    ]


def log_tail(run: DashboardRun, name: str) -> str:
    """Return the end of a log of a run, without what has the form of a secret.

    Raises:
        UserError: it has no such log.
    """
    folder = run.folder / "logs"
    if name not in {log["name"] for log in _logs(folder)}:
        raise UserError(f"{folder} has no log {name!r}")
    with (folder / name).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
        return hide_secrets(file.read().decode("utf-8", errors="replace"))


def _journal(folder: Path) -> dict[str, object] | None:
    try:
        state = read_journal(folder)
    except ConfigError as error:
        return {"error": str(error)}
    if state is None:
        return None
    untaken = state.untaken
    return {
        "trained": state.trained,
        "admitted": len(state.groups),
        "in_progress": sum(not group.finished for group in untaken),
        "waiting": len([group for group in state.waiting if group.finished]),
    }


def _kept_engines() -> list[dict[str, object]]:
    """Return the engines that stay on this machine (`sampler.keep_minutes`); reading them locks none."""
    try:
        records = [read_record(folder) for folder in sorted(engines_folder().iterdir())]
    except (OSError, AgentrlError):
        return []
    return [
        {"url": record.url, "text": record.text, "gpus": list(record.gpus), "log": str(record.log)}
        for record in records
        if record is not None
    ]


def advice(run: DashboardRun) -> dict[str, object]:
    """Return the findings of the doctor, or why there are none."""
    try:
        findings = diagnose(run.folder)
    except AgentrlError as error:
        return {"findings": [], "error": str(error)}
    except DECODE_ERRORS as error:  # of metrics that a run of another version lacks, or has otherwise
        return {"findings": [], "error": f"the run cannot be diagnosed: {type(error).__name__}: {error}"}
    return {
        "findings": [
            {
                "severity": finding.severity,
                "title": finding.title,
                "evidence": list(finding.evidence),
                "advice": list(finding.advice),
            }
            for finding in findings
        ],
        "error": "",
    }
