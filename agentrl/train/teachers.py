"""Teachers of on-policy distillation: log-probabilities of the sampled tokens, also with privileged contexts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.batch.groups import RolloutGroups
from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.config.algo import DistillationConfig
from agentrl.config.checks import is_context_template
from agentrl.config.engine_groups import other_model_sampler, training_engines, training_gpus
from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError, ConfigError, EngineError, RunStopped
from agentrl.core.images import IMAGE_MARK, Image, ImageSpan, PlacedImage
from agentrl.core.imports import load_object
from agentrl.core.types import MaskReason, Message, Prompt, Provenance, Rollout, Row, RowKey
from agentrl.core.user_code import describe, user_code
from agentrl.inference.client.scoring import ScoringClient
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.launch.launcher import EngineSpec, LocalLauncher, RunningEngine, launch
from agentrl.learner.base import LearnerGroup
from agentrl.models.load import load_tokenizer
from agentrl.models.reference_policy import check_reference
from agentrl.models.resolve import resolve_model
from agentrl.render.base import Renderer
from agentrl.rewards.sample import Sample
from agentrl.runtime.episodes import open_renderer

_log = logging.getLogger(__name__)
MakeContext = Callable[[Sample], Sequence[Message]]
"""Returns the messages that a teacher reads in place of the first prompt's."""


def load_context(text: str, key: str) -> MakeContext:
    """Return the function that ``algo.distillation.teachers.NAME.context`` names, or that fills in its template.

    Raises:
        ConfigError: there is no such function.
    """
    if is_context_template(text):
        return partial(_from_template, text, key)
    function = load_object(text, key)
    if not callable(function):
        raise ConfigError(f"{key}={text}: {function!r:.100} is not a function")
    make: MakeContext = function
    return make


def _from_template(text: str, key: str, sample: Sample) -> tuple[Message, ...]:
    *earlier, last = sample.rollout.messages
    answer = sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label
    if answer is None and "{answer}" in text:
        raise RunStopped(f"{key} has {{answer}}, and task {sample.prompt_id!r} has none")
    content = text.format(message=last.content, answer=answer)
    images = last.images if IMAGE_MARK in content else ()  # without {message} its images are left out, too
    return *earlier, replace(last, content=content, token_ids=(), images=images)


class PrivilegedRows:
    """The rows of a rollout with another first prompt.

    Args:
        make: the messages of that prompt.
        key: the configuration key that names it, for messages.
        renderer: of the policy's chat format.
    """

    def __init__(self, make: MakeContext, key: str, renderer: Renderer) -> None:
        self._make = make
        self._key = key
        self._renderer = renderer

    def rows(self, rollout: Rollout) -> tuple[dict[Row, int], Mapping[str, Image]]:
        """Return each row with the other prompt, in the order of the rollout's, and how many tokens longer it became; and the
        images of these rows by digest.

        Raises:
            RunStopped: the function failed, or a row does not begin with the first prompt.
        """
        if not rollout.rows:
            return {}, {}
        first = rollout.rows[0]
        sampled = np.flatnonzero(first.provenance == Provenance.SAMPLED)
        length = int(sampled[0]) if len(sampled) else len(first.token_ids)
        opening, privileged_prompt = first.token_ids[:length], self._prompt(rollout)
        for row in rollout.rows:
            if not np.array_equal(row.token_ids[:length], opening):
                raise RunStopped(
                    f"{self._key}: row {row.key.row} of rollout {rollout.rollout_id} (fork: {row.fork}) does not begin with "
                    "the rollout's first prompt, which the context would replace; leave out the context, or the rewriting "
                    "of conversations"
                )
        longer = len(privileged_prompt.token_ids) - length
        images = {**rollout.images, **{placed.span.digest: placed.image for placed in privileged_prompt.images}}
        return {_with_prompt(row, length, privileged_prompt): longer for row in rollout.rows}, images

    def _prompt(self, rollout: Rollout) -> Prompt:
        if not rollout.messages:
            raise RunStopped(
                f"{self._key}: the messages of rollout {rollout.rollout_id} are not known, as recorded rollouts have none; "
                "train without --replay, or leave out the context"
            )
        try:
            failed = f"{self._key} failed for rollout {rollout.rollout_id}"
            with user_code(lambda error: RunStopped(f"{failed}: {describe(error)}")):
                messages = tuple(self._make(Sample.from_rollout(rollout)))
            if not messages or not all(isinstance(message, Message) for message in messages):
                raise RunStopped(f"{self._key} must return messages (agentrl.Message), not {messages!r:.100}")
            return self._renderer.render(messages, rollout.tools)
        except RunStopped:
            raise
        except AgentrlError as error:
            raise RunStopped(f"{self._key}: rollout {rollout.rollout_id}: {error}") from error


def _with_prompt(row: Row, length: int, prompt: Prompt) -> Row:
    """Return a row whose first ``length`` tokens are replaced by a prompt."""
    size = len(prompt.token_ids)
    images = [placed.span for placed in prompt.images]
    images += [
        ImageSpan(span.start + size - length, span.length, span.digest) for span in row.images if span.start >= length
    ]
    fills: dict[str, Any] = {
        "provenance": Provenance.OBSERVED, "mask": 0, "mask_reason": MaskReason.OBSERVED,
        "logprobs": 0.0, "versions": -1, "requests": -1,
    }  # fmt: skip
    arrays: dict[str, Any] = {"token_ids": np.concatenate([prompt.token_ids, row.token_ids[length:]]).astype(np.int32)}
    for name, value in fills.items():
        tail = getattr(row, name)[length:]
        arrays[name] = np.concatenate([np.full(size, value, tail.dtype), tail])
    return replace(row, **arrays, images=tuple(images))


KEY = "algo.distillation.teachers"
Scores = dict[RowKey, NDArray[np.float32]]
"""By row: ``[T]`` log-probabilities; 0 where the teacher has scored nothing, which no trained token is."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher of a run."""

    policy: str | None = None
    """Scored by the learner with this policy; None: by ``client``."""
    client: ScoringClient | None = None
    """Client of its server."""
    process: RunningEngine | None = None
    """Its engine, if the run has started it."""
    privileged: PrivilegedRows | None = None
    """What it reads in place of the first prompt."""
    image_fault: str = ""
    """Why its server does not score rollouts with images; empty if it does."""


class Teachers:
    """The teachers of a run, opened by `open_teachers`."""

    def __init__(self, config: DistillationConfig, teachers: Mapping[str, Teacher]) -> None:
        self._config = config
        self._teachers = teachers

    @property
    def need_learner(self) -> bool:
        """Whether the learner scores for a teacher."""
        return any(teacher.policy is not None for teacher in self._teachers.values())

    async def score(self, groups: RolloutGroups, learner: LearnerGroup, packing: PackOptions) -> dict[str, Scores]:
        """Return the log-probabilities of each teacher, of the rows of the rollouts that it scores.

        Servers give them at temperature 1, the learner at that of sampling.

        Raises:
            EngineError: a server failed; the message has the teacher's key.
            LearnerError: a rank failed.
            RunStopped: a task has no teacher, or a context cannot be made.
        """
        assigned: dict[str, list[Rollout]] = {}
        for rollout in groups.rollouts_N:
            for name in select_teachers(self._config, rollout):
                assigned.setdefault(name, []).append(rollout)
        scores_by_teacher = {}
        for name, rollouts in assigned.items():
            teacher = self._teachers[name]
            rows, longer, images = await asyncio.to_thread(_teacher_rows, teacher, rollouts)
            if teacher.client is not None:
                scored = await _score_at_server(teacher, teacher.client, rows, images)
            else:
                assert teacher.policy is not None
                batch = await asyncio.to_thread(pack, rows, packing, RowSignals(images=images))
                scored = await asyncio.to_thread(learner.logprobs, batch, teacher.policy)
            scores_by_teacher[name] = {key: _align_values(values, longer[key]) for key, values in scored.items()}
        return scores_by_teacher


def select_teachers(config: DistillationConfig, rollout: Rollout) -> list[str]:
    """Return the names of the teachers that score a rollout.

    Raises:
        RunStopped: its task names none.
    """
    if config.task_key is None:
        return list(config.teachers)
    name = rollout.metadata.get(config.task_key)
    if isinstance(name, str) and name in config.teachers:
        return [name]
    if config.default is None:
        raise RunStopped(
            f"algo.distillation.task_key={config.task_key}: task {rollout.prompt_id!r} has {name!r:.100} there, and the teachers "
            f"are {', '.join(config.teachers)}; set algo.distillation.default to one of them"
        )
    return [config.default]


def _teacher_rows(
    teacher: Teacher, rollouts: Sequence[Rollout]
) -> tuple[list[Row], dict[RowKey, int], dict[str, Image]]:
    """Return the rows with a token to train on, as the teacher reads them, how many tokens longer each is, and their images."""
    rows: dict[Row, int] = {}
    images: dict[str, Image] = {}
    for rollout in rollouts:
        rollout_rows: Mapping[Row, int] = dict.fromkeys(rollout.rows, 0)
        rollout_images = rollout.images
        if teacher.privileged is not None:
            rollout_rows, rollout_images = teacher.privileged.rows(rollout)
        rows |= rollout_rows
        images |= rollout_images
    trained = {row: longer for row, longer in rows.items() if row.mask[1:].any()}
    return list(trained), {row.key: longer for row, longer in trained.items()}, images


async def _score_at_server(
    teacher: Teacher, client: ScoringClient, rows: Sequence[Row], images: Mapping[str, Image]
) -> Scores:
    async def score(row: Row) -> NDArray[np.float32]:
        at = np.flatnonzero(row.mask[1:]) + 1
        start, end = int(at[0]), int(at[-1]) + 1
        placed = [PlacedImage(span, images[span.digest]) for span in row.images if span.end <= end]
        if placed and teacher.image_fault:
            raise ConfigError(f"rollout {row.key.rollout_id} has images, and {teacher.image_fault}")
        values = np.zeros(len(row.mask), np.float32)
        values[start:end] = await client.score(row.token_ids[:end].tolist(), start, images=placed)
        return values

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(row)) for row in rows]
    except BaseExceptionGroup as errors:
        if teacher.process is not None:
            teacher.process.check()
        raise errors.exceptions[0] from None  # the first ended the others
    return {row.key: task.result() for row, task in zip(rows, tasks, strict=True)}


def _align_values(values: NDArray[np.float32], longer: int) -> NDArray[np.float32]:
    """Return the values of a row from those of one with a prompt that is so many tokens longer, or shorter if negative."""
    return values[longer:] if longer >= 0 else np.concatenate([np.zeros(-longer, np.float32), values])


def check_teachers(config: Config, model: Path, *, fetch: bool) -> None:
    """Check contexts and models of teachers before anything is started.

    Raises:
        MissingError: ``fetch`` is False and a model would have to be downloaded.
        UserError: a function or a model does not exist, or a model has other tokens than the policy's folder ``model``.
    """
    for name, teacher in config.algo.distillation.teachers.items():
        if teacher.context is not None:
            load_context(teacher.context, f"{KEY}.{name}.context")
        if teacher.path is not None:
            key = f"{KEY}.{name}.path"
            folder = resolve_model(teacher.path, key, fetch=fetch)
            check_reference(model, folder, key, trust_remote_code=config.model.trust_remote_code)


async def open_teachers(config: Config, model: Path, logs: Path, exits: AsyncExitStack) -> Teachers | None:
    """Return the teachers of a run, None if it has none. Engines are started, with logs ``teacher-NAME``, and servers checked.

    Raises:
        ConfigError: a server does not answer, takes too few tokens, or has other tokens than the policy.
        EngineError: an engine does not start.
    """
    teachers = config.algo.distillation.teachers
    if not teachers:
        return None
    opener = _TeacherOpener(config, model, logs, exits, *open_renderer(config, model))
    opening = [opener.open(name, number) for number, name in enumerate(teachers)]
    opened = await asyncio.gather(*opening, return_exceptions=True)
    teacher_by_name: dict[str, Teacher] = {}
    for name, teacher in zip(teachers, opened, strict=True):
        if isinstance(teacher, BaseException):
            raise teacher
        teacher_by_name[name] = teacher
    return Teachers(config.algo.distillation, teacher_by_name)


@dataclass(frozen=True, slots=True)
class _TeacherOpener:
    """Opens the teachers of a run; see `open_teachers`."""

    config: Config
    model: Path
    """Folder of the policy."""
    logs: Path
    exits: AsyncExitStack
    renderer: Renderer
    """Renderer of the policy."""
    vocabulary: Vocabulary
    """Vocabulary of the policy."""

    async def open(self, name: str, number: int) -> Teacher:
        """Return the teacher of a name, which is the run's teacher ``number``."""
        teacher = self.config.algo.distillation.teachers[name]
        privileged = None
        if teacher.context is not None:
            key = f"{KEY}.{name}.context"
            privileged = PrivilegedRows(load_context(teacher.context, key), key, self.renderer)
        if teacher.policy is not None:
            return Teacher(policy=teacher.policy, privileged=privileged)
        process, url, setting = None, teacher.url, f"{KEY}.{name}.url={teacher.url}"
        if url is None:
            assert teacher.path is not None, "the configuration was checked"
            folder, setting = resolve_model(teacher.path, f"{KEY}.{name}.path"), f"{KEY}.{name}.path={teacher.path}"
            launcher = self._launcher(folder, self.logs / f"teacher-{name}")
            process = await launch(partial(launcher.launch, number), f"teacher {name!r}")
            self.exits.push_async_callback(asyncio.to_thread, process.stop)
            url = process.url
        client = ScoringClient(
            url,
            f"teacher {name!r} ({setting})",
            timeout_s=self.config.sampler.request_timeout_s,
            vocabulary_size=self.vocabulary.size,
            image_token_id=self.vocabulary.image_token_id,
        )
        self.exits.push_async_callback(client.aclose)
        trusted, prompt = self.config.model.trust_remote_code, self.vocabulary.image_prompt
        last_id = max(load_tokenizer(self.model, trust_remote_code=trusted).get_vocab().values())
        await check_server(client, setting, self.model, last_id, self.config.max_tokens, trust_remote_code=trusted)
        fault = "" if prompt is None else await image_fault(client, setting, prompt)
        return Teacher(client=client, process=process, privileged=privileged, image_fault=fault)

    def _launcher(self, folder: Path, logs: Path) -> LocalLauncher:
        """Return what starts an engine with a teacher's model: of the run's kind, with twice the context, for longer prompts."""
        config = self.config
        logs.mkdir(parents=True, exist_ok=True)
        embedded = config.sampler.embedded
        longer = embedded.model_copy(update={"context": 2 * embedded.context})
        sampler = other_model_sampler(config.sampler).model_copy(update={"embedded": longer, "port": 0})
        spec = EngineSpec(sampler, folder, logs, config.run.seed, config.model.trust_remote_code)
        return LocalLauncher(spec, training_engines(config.sampler), training_gpus(config.sampler))


async def check_server(
    client: ScoringClient, key: str, model: Path, last_id: int, max_tokens: int, *, trust_remote_code: bool = False
) -> None:
    """Check that a teacher's server scores the policy's tokens, and whole rollouts.

    Args:
        client: of the server.
        key: the configuration key with its value, for messages.
        model: the policy's folder.
        last_id: of the policy's tokenizer.
        max_tokens: ``rollout.max_tokens``.
        trust_remote_code: see `check_reference`.

    Raises:
        ConfigError: it does not answer, takes too few tokens, or has other tokens.
    """
    try:
        info = await client.info()
        await client.score([0, last_id], 1)
    except EngineError as error:
        raise ConfigError(f"{key}: {error}") from error
    most, folder = info.get("max_req_input_len"), info.get("model_path")
    if not isinstance(most, int) or most <= max_tokens:
        raise ConfigError(
            f"{key} takes prompts of fewer than {most} tokens, and rollouts have up to rollout.max_tokens={max_tokens}: lower "
            "it, or raise the server's context by at least one token more"
        )
    if isinstance(folder, str) and Path(folder).is_dir():
        check_reference(model, Path(folder), key.partition("=")[0], trust_remote_code=trust_remote_code)


async def image_fault(client: ScoringClient, key: str, prompt: Prompt) -> str:
    """Return why a teacher's server cannot score a prompt with images, which is logged; empty if it can.

    It is no error yet: the run may have texts alone.

    Args:
        client: of the server.
        key: the configuration key with its value, for messages.
        prompt: with images.
    """
    try:
        await client.score(prompt.token_ids, len(prompt.token_ids) - 1, images=prompt.images)
    except (ConfigError, EngineError) as error:
        fault = f"{key} does not score prompts with images as the policy reads them: {error}"
        _log.warning("%s. A rollout with images would end the run.", fault)
        return fault
    return ""
