"""The rollouts of an evaluation on disk, with which an interrupted one is resumed (``agentrl eval --rollouts FILE --resume``)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import orjson

from agentrl.config.layers import Difference, leaf_texts
from agentrl.config.recorded import CONTENT, FIXED, SAMPLED, changed_keys, recorded_keys
from agentrl.config.schema import Config
from agentrl.config.secret_values import redact
from agentrl.core.atomic_files import write_atomically
from agentrl.core.errors import ConfigError
from agentrl.core.reading import reading
from agentrl.core.task import task_to_dict
from agentrl.core.types import Rollout
from agentrl.evaluation.evaluate import episode_id, make_jobs
from agentrl.evaluation.sets import EvalTasks
from agentrl.models.resolve import model_contents, resolve_model
from agentrl.obs.rollouts import RolloutFile, read_rollouts
from agentrl.rewards.grader import make_grader

_ENDPOINT = "model.endpoint"
_SETS = "eval"


def keys_path(samples: Path) -> Path:
    """Return the file next to the samples that says what they were made with: ``samples.eval.json``."""
    return samples.with_suffix(".eval.json")


def evaluation_keys(config: Config, sets: Sequence[EvalTasks]) -> dict[str, str]:
    """Return the keys that decide what the episodes of an evaluation are, with their values and checksums as text.

    Args:
        config: of the evaluation.
        sets: whose tasks and sampling parameters are among them.
    """
    keys = recorded_keys(config)
    if config.model.endpoint is None:
        keys |= model_contents(resolve_model(config.model.path))
    else:
        endpoint = redact(config.model.endpoint.model_dump(mode="json"))
        keys |= {f"{_ENDPOINT}.{key}": text for key, text in leaf_texts(endpoint).items()}
    for eval_set in sets:
        checksum = 0
        for task in eval_set.tasks:
            checksum = zlib.crc32(orjson.dumps(task_to_dict(task), option=orjson.OPT_SORT_KEYS), checksum)
        plan = eval_set.plan
        keys |= {
            f"{CONTENT}{_SETS} {eval_set.label}": f"{len(eval_set.tasks)} tasks, crc32 {checksum:08x}",
            f"{_SETS}.{eval_set.label}": (
                f"{eval_set.samples} samples, {eval_set.decoding}, max_new_tokens {plan.max_new_tokens or 'of the sampler'}"
            ),
        }
    return keys


class SavedSamples:
    """The file of an evaluation's rollouts, to which each is appended when it ends.

    Args:
        path: ``….jsonl`` or ``….parquet``.
        config: of the evaluation.
        sets: of the evaluation.
        resume: keep the episodes that the file has; without a file there are none.

    Raises:
        ConfigError: the file's rollouts were made with other values, or it cannot be read.
    """

    def __init__(self, path: Path, config: Config, sets: Sequence[EvalTasks], *, resume: bool) -> None:
        keys = evaluation_keys(config, sets)
        self.finished: dict[str, list[Rollout]] = {}
        """Rollouts of episodes that are not played again, by the episode's id."""
        lines = path.with_suffix(".jsonl")
        recorded = lines if lines.exists() else path
        if resume and recorded.exists():
            _check_keys(keys_path(path), keys)
            self.finished = _finished_episodes(config, sets, read_rollouts(recorded))
        self.file = RolloutFile(path, [rollout for rollouts in self.finished.values() for rollout in rollouts])
        """Has the rollouts of `finished`, and takes others."""
        with write_atomically(keys_path(path)) as partial:
            partial.write_text(json.dumps(keys, indent=1) + "\n", encoding="utf-8")


def _check_keys(path: Path, keys: Mapping[str, str]) -> None:
    if not path.exists():
        raise ConfigError(
            f"--resume: there is no {path}, which says what the samples next to it were made with; leave out --resume to "
            "evaluate from the start"
        )
    with reading(path, "record of an evaluation"):
        recorded: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    changes: list[Difference] = changed_keys(recorded, keys, (*FIXED, *SAMPLED, _ENDPOINT, _SETS))
    if changes:
        lines = "\n".join(f"  {change}" for change in changes)
        raise ConfigError(
            f"--resume: the samples next to {path} were made with other values:\n{lines}\nTake the change back, or leave out "
            "--resume to evaluate from the start"
        )


def _finished_episodes(
    config: Config, sets: Sequence[EvalTasks], rollouts: Iterable[Rollout]
) -> dict[str, list[Rollout]]:
    """Return the rollouts of the episodes that have ended as they would in an evaluation without an interrupt.

    Episodes that a failure has dropped are played again, and if a task's rollouts are graded in one call, all of a task of which
    one is missing.
    """
    jobs = {job.rollout_id: (eval_set.full_name, job.task.id) for eval_set in sets for job in make_jobs(eval_set)}
    episodes: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        episodes.setdefault(episode_id(rollout, jobs), []).append(rollout)
    last = next(reversed(episodes), "")  # of those with any number of rollouts, it may lack some
    finished = {
        name: members
        for name, members in episodes.items()
        if name in jobs and _is_complete(config, members, is_last=name == last)
    }
    graded = [make_grader(source.reward) for source in config.by_source().values()]
    if any(grader is not None and grader.group for grader in graded):
        unfinished_tasks = {jobs[name] for name in jobs.keys() - finished.keys()}
        return {name: members for name, members in finished.items() if jobs[name] not in unfinished_tasks}
    return finished


def _is_complete(config: Config, members: Sequence[Rollout], *, is_last: bool) -> bool:
    """Return whether these are all rollouts of an episode, and none of them has failed."""
    if any(rollout.dropped and rollout.failure is not None for rollout in members):
        return False
    seats = members[0].seats
    if seats:
        return len(members) == (sum(seat.trained for seat in seats) or len(seats))
    return not is_last or config.rollout.generate is None
