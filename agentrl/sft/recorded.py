"""Recorded rollouts as training rows, for supervised fine-tuning: with the token ids and loss masks of the run."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from typing_extensions import override

from agentrl.batch.provenance import check_rows
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, ProvenanceError
from agentrl.core.types import Rollout
from agentrl.obs.rollouts import read_rollouts, rollout_files
from agentrl.render.recorded_prompts import tokenizer_fault
from agentrl.render.renderer import ChatRenderer
from agentrl.sft.base import EpochData, ImageRows, SftFile, row_checksum

KEY = "sft.rollouts.path"


@dataclass(slots=True)
class RecordedFile(SftFile):
    """The chosen rollouts of a run; ``numbers`` are their indices in ``rollouts``."""

    rollouts: list[ImageRows] = field(default_factory=list)
    """The rows of each."""
    read: int = 0
    """All rollouts."""
    unusable: int = 0
    """Those that were dropped, or without a token to train on."""
    low: int = 0
    """Those with a reward below ``sft.rollouts.min_reward``."""
    copies: int = 0
    """Those whose tokens another one of the same task has."""
    not_best: int = 0
    """Those that ``per_group`` and ``per_task`` leave out."""
    reward: float = 0.0
    """Mean reward of the chosen ones."""

    unit: ClassVar[str] = "rollouts"

    @property
    @override
    def left_out(self) -> list[str]:
        counts = {
            "dropped or without tokens to train on": self.unusable,
            "below sft.rollouts.min_reward": self.low,
            "copies of another one of their task": self.copies,
            "left out by sft.rollouts.per_group and per_task": self.not_best,
        }
        return [
            f"of {self.read:,} rollouts, mean reward {self.reward:.3f}",
            *(f"{count:,} {reason}" for reason, count in counts.items() if count),
        ]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A rollout that may be trained on."""

    location: str
    rollout: Rollout
    checksum: int
    """CRC-32 of ids, masks and images."""


def read_recorded(
    config: Config, make_renderer: Callable[[], ChatRenderer], vocabulary: int, context: int | None
) -> RecordedFile:
    """Read the rollouts that ``sft.rollouts`` chooses.

    Rewards are compared within a task alone. Of rollouts with the same tokens the first one counts.

    Args:
        config: of the run.
        make_renderer: builds the renderer of the model that is trained.
        vocabulary: number of tokens of the model.
        context: tokens that the model takes; None: not known.

    Raises:
        ConfigError: there are no rollouts, none is chosen, or they were sampled with another tokenizer; or the masks of a
            rollout contradict its tokens' provenance.
    """
    choice = config.sft.rollouts
    assert choice.path is not None, "prepare_sft reads chats or demonstrations then"
    file, by_task = RecordedFile(choice.path, KEY, np.empty(0, np.int64)), defaultdict[str, list[_Candidate]](list)
    renderer, identities = make_renderer(), set[tuple[str, int]]()
    for path in _files(choice.path):
        rollouts = read_rollouts(path)
        if fault := tokenizer_fault(rollouts, renderer):
            raise ConfigError(f"{KEY}: {path} {fault}")
        groups = defaultdict[str, list[_Candidate]](list)
        for candidate in _usable(file, path, rollouts, vocabulary):
            if choice.min_reward is not None and candidate.rollout.reward < choice.min_reward:
                file.low += 1
            elif (identity := (candidate.rollout.prompt_id, candidate.checksum)) in identities:
                file.copies += 1
            else:
                identities.add(identity)
                groups[candidate.rollout.prompt_id].append(candidate)
        for task, group in groups.items():
            by_task[task] = _best(file, [*by_task[task], *_best(file, group, choice.per_group)], choice.per_task)
    _fill(file, [candidate for candidates in by_task.values() for candidate in candidates], config, context)
    if not file.rollouts:
        raise ConfigError(f"{KEY}={choice.path} has no rollout to train on; {file.description}")
    return file


def _files(path: Path) -> list[Path]:
    path = path.expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{KEY}={path}: there is no such file or folder")
    files = [*rollout_files(path).values()]
    if not files:
        raise ConfigError(
            f"{KEY}={path} holds no rollouts: the run has written none (obs.rollouts=none), or it is another folder"
        )
    return files


def _usable(file: RecordedFile, path: Path, rollouts: Sequence[Rollout], vocabulary: int) -> Iterable[_Candidate]:
    """Yield the rollouts that were not dropped and have tokens to train on."""
    for rollout in rollouts:
        file.read += 1
        location = f"{path}, rollout {rollout.rollout_id}"
        if rollout.dropped or not math.isfinite(rollout.reward) or not any(row.mask.any() for row in rollout.rows):
            file.unusable += 1
            continue
        try:
            check_rows(rollout.rows)
        except ProvenanceError as error:
            raise ConfigError(f"{KEY}: {location}: {error}") from error
        checksum = 0
        for row in rollout.rows:
            if int(row.token_ids.max()) >= vocabulary:
                raise ConfigError(
                    f"{KEY}: {location} has the token id {int(row.token_ids.max())}, but the model knows {vocabulary} tokens; "
                    "set model.path to the model that sampled it"
                )
            checksum = row_checksum(row, checksum)
        yield _Candidate(location, rollout, checksum)


def _best(file: RecordedFile, candidates: list[_Candidate], count: int | None) -> list[_Candidate]:
    """Return so many candidates with the highest rewards, in their order; of equal ones the first."""
    if count is None or len(candidates) <= count:
        return candidates
    file.not_best += len(candidates) - count
    order = sorted(range(len(candidates)), key=lambda index: -candidates[index].rollout.reward)
    return [candidates[index] for index in sorted(order[:count])]


def _fill(file: RecordedFile, candidates: Sequence[_Candidate], config: Config, context: int | None) -> None:
    """Give the file the rows of the chosen rollouts."""
    rewards = []
    for candidate in candidates:
        rows = [row for row in candidate.rollout.rows if row.mask.any()]
        if not file.takes(candidate.location, max(len(row.token_ids) for row in rows), config, context):
            continue
        file.rollouts.append(ImageRows(rows, candidate.rollout.images))
        file.tokens += sum(len(row.token_ids) for row in rows)
        file.trained += sum(int(row.mask.sum()) for row in rows)
        file.checksum = zlib.crc32(candidate.checksum.to_bytes(4, "little"), file.checksum)
        rewards.append(candidate.rollout.reward)
    file.numbers = np.arange(len(file.rollouts))
    file.reward = float(np.mean(rewards)) if rewards else 0.0


class RecordedRollouts(EpochData):
    """The chosen rollouts by step; see `EpochData`. Their rows are those that the run trained."""

    file: RecordedFile

    @override
    async def make_rows(self, number: int, epoch: int) -> ImageRows:
        recorded = self.file.rollouts[number]
        rows = [replace(row, key=replace(row.key, rollout_id=f"{row.key.rollout_id}#{epoch}")) for row in recorded.rows]
        return ImageRows(rows, recorded.images)
