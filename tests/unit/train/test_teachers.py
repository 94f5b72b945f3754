"""Teachers: whom they score, behind which prompt, and what a student learns of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
import torch
from byte_renderer import byte_renderer
from PIL import Image as Pillow

from agentrl.batch.groups import group_rollouts
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import PackOptions, pack
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, EngineError, RunStopped
from agentrl.core.images import Image, ImageSpan, PlacedImage, load_image
from agentrl.core.types import (
    ForkReason,
    MaskReason,
    Message,
    Provenance,
    Rollout,
    Row,
    RowKey,
    StopReason,
    message_with_images,
)
from agentrl.inference.client.scoring import ScoringClient
from agentrl.learner.base import LearnerGroup
from agentrl.models.image_positions import read_image_positions
from agentrl.models.resolve import resolve_model
from agentrl.render.registry import load_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.rewards.sample import Sample
from agentrl.testing import FakeLearner
from agentrl.train.step_scores import StepScores, pack_options
from agentrl.train.teachers import PrivilegedRows, Teacher, Teachers, check_server, image_fault, load_context
from tests.batches import training_step
from tests.test_readme import example
from tests.unit.episode.conftest import CHATML
from tests.unit.learner import image_rows
from tests.unit.learner.learners import MODELS, SIZES, Learners, make_model
from tests.unit.train.in_process_engine import InProcessEngine

ROOT = Path(__file__).parents[3]
VOCABULARY = 264
RENDERER = byte_renderer(CHATML)
TOKENIZER = RENDERER._tokenizer
ALONE = ["algo.distillation.reward_coef=0", "algo.distillation.teachers.a.url=http://a"]


def row(prompt: Sequence[int], parts: Sequence[tuple[Sequence[int], bool]], *, name: str = "r", number: int = 0) -> Row:
    """A row of a prompt and of parts, each sampled (True) or observed."""
    sampled = [False] * len(prompt) + [is_sampled for ids, is_sampled in parts for _ in ids]
    mask = np.array(sampled, np.uint8)
    return Row(
        key=RowKey("p", name, row=number),
        token_ids=np.array([*prompt, *(token for ids, _ in parts for token in ids)], np.int32),
        provenance=np.where(mask, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=mask,
        mask_reason=np.where(mask, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=mask.astype(np.int32) - 1,
        requests=mask.astype(np.int32) - 1,
        request_ids=("q",),
    )


def rollout(*rows: Row, **fields: Any) -> Rollout:
    return Rollout("p", rows[0].key.rollout_id, list(rows), 0.0, StopReason.TERMINATED, **fields)


class Positions:
    """A teacher's client whose log-probabilities say where a token is, and which records what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[int], int]] = []
        self.images: list[PlacedImage] = []

    async def score(self, token_ids: Sequence[int], start: int, *, images: Sequence[PlacedImage] = ()) -> np.ndarray:
        self.sent.append((list(token_ids), start))
        self.images += images
        return -np.arange(start, len(token_ids), dtype=np.float32)


def scored(
    config: Config, teachers: dict[str, Teacher], *given_rollouts: Rollout, learner: LearnerGroup | None = None
) -> Any:
    return asyncio.run(
        Teachers(config.algo.distillation, teachers).score(group_rollouts(given_rollouts), learner or FakeLearner(), 0)
    )


def test_a_server_scores_from_the_first_sampled_token_to_the_last_over_observations() -> None:
    client = Positions()
    turns = row([5, 6, 7], [([8, 9], True), ([10, 11], False), ([12], True), ([13], False)])
    second = row([5, 6], [([30], True)], number=1)
    run_config = scored(load_config(None, ALONE), {"a": Teacher(client=client)}, rollout(turns, second))  # type: ignore[arg-type]
    assert client.sent == [([5, 6, 7, 8, 9, 10, 11, 12], 3), ([5, 6, 30], 2)]
    np.testing.assert_array_equal(run_config["a"][turns.key], [0, 0, 0, -3, -4, -5, -6, -7, 0])
    np.testing.assert_array_equal(run_config["a"][second.key], [0, 0, -2])


def test_rows_without_a_token_to_train_on_are_not_sent() -> None:
    client = Positions()
    shared = replace(row([5], [([6], True)], number=1), mask=np.zeros(2, np.uint8))
    scored(load_config(None, ALONE), {"a": Teacher(client=client)}, rollout(row([5], [([7], True)]), shared))  # type: ignore[arg-type]
    assert client.sent == [([5, 7], 1)]


def test_a_task_names_its_teacher_and_others_have_the_default() -> None:
    changes = [*ALONE, "algo.distillation.teachers.b.url=http://b", "algo.distillation.task_key=data_source"]
    with_default = load_config(None, [*changes, "algo.distillation.default=b"])
    rollouts = [
        rollout(row([5], [([number], True)], name=f"r{number}"), metadata=metadata)
        for number, metadata in enumerate([{"data_source": "a"}, {"data_source": "zzz"}, {}, {"data_source": ["a"]}])
    ]
    clients = {"a": Positions(), "b": Positions()}
    teachers: Any = {name: Teacher(client=client) for name, client in clients.items()}  # type: ignore[arg-type]
    actual = scored(with_default, teachers, *rollouts)
    assert {name: sorted(key.rollout_id for key in rows) for name, rows in actual.items()} == {
        "a": ["r0"],
        "b": ["r1", "r2", "r3"],
    }
    with pytest.raises(RunStopped, match=r"task_key=data_source: task 'p' has 'zzz' there, and the teachers are a, b"):
        scored(load_config(None, changes), teachers, *rollouts)


def test_a_server_that_fails_ends_the_step_with_its_name() -> None:
    class Down(Positions):
        async def score(
            self, token_ids: Sequence[int], start: int, *, images: Sequence[PlacedImage] = ()
        ) -> np.ndarray:
            raise EngineError("teacher 'a' (key) does not answer")

    with pytest.raises(EngineError, match="teacher 'a'"):
        scored(load_config(None, ALONE), {"a": Teacher(client=Down())}, rollout(row([5], [([6], True)])))  # type: ignore[arg-type]


class InProcessNothing:
    """Connections to an address where nothing listens."""

    url = "http://a"

    def request(self, *_: Any, **__: Any) -> Any:
        raise aiohttp.ClientConnectionError("refused")


class Reporting(Positions):
    """A server that reports this of itself."""

    def __init__(self, **info: Any) -> None:
        super().__init__()
        self._info = info

    async def info(self) -> dict[str, Any]:
        return self._info


def test_a_server_must_score_the_last_token_and_a_whole_rollout(tmp_path: Path) -> None:
    good = Reporting(max_req_input_len=101, model_path="/not/on/this/machine")
    asyncio.run(check_server(good, "key.url=http://a", tmp_path, 263, 100))  # type: ignore[arg-type]
    assert good.sent == [([0, 263], 1)]
    for info, words in (
        (
            {"max_req_input_len": 100},
            r"key.url=http://a takes prompts of fewer than 100 tokens.*rollout.max_tokens=100",
        ),
        ({}, "fewer than None tokens"),
    ):
        with pytest.raises(ConfigError, match=words):
            asyncio.run(check_server(Reporting(**info), "key.url=http://a", tmp_path, 263, 100))  # type: ignore[arg-type]


def test_a_server_whose_folder_is_here_must_have_the_policys_tokens(tmp_path: Path) -> None:
    policy, teacher = make_model(tmp_path / "a", vocab_size=30), make_model(tmp_path / "b", vocab_size=20)
    server = Reporting(max_req_input_len=101, model_path=str(teacher))
    with pytest.raises(ConfigError, match=r"key.url=.*/b: its vocabulary has 20 tokens, .*/a has 30; set key.url"):
        asyncio.run(check_server(server, "key.url=http://a", policy, 29, 100))  # type: ignore[arg-type]


def test_a_server_that_does_not_answer_is_refused_with_its_key(tmp_path: Path) -> None:
    client = ScoringClient("http://127.0.0.1:9", "teacher 'a'", timeout_s=1, vocabulary_size=30)
    client._http = InProcessNothing()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"key.url=http://a: .*does not answer /model_info"):
        asyncio.run(check_server(client, "key.url=http://a", tmp_path, 29, 100))


# Privileged contexts


def prompt_of(text: str) -> list[int]:
    return list(RENDERER.render([Message("user", text)]).token_ids)


def privileged(context: str, key: str = "key") -> PrivilegedRows:
    return PrivilegedRows(load_context(context, key), key, RENDERER)


def hinted(sample: Sample) -> list[Message]:
    return [Message("user", f"hint {sample.label} after reward {sample.rollout.reward:g}")]


@pytest.mark.parametrize(
    ("context", "text"),
    [
        ("{message} It is {answer}.", "q? It is c."),
        ("{answer}", "c"),
        (f"{__name__}:hinted", "hint c after reward 0"),
    ],
)
def test_only_the_prompt_changes_and_values_come_back_to_the_tokens_that_were_sampled(context: str, text: str) -> None:
    plain, other_prompt, client = prompt_of("q?"), prompt_of(text), Positions()
    rows = [
        row(plain, [([70, 71], True), ([80], False), ([72], True)]),
        row([*plain, 90], [([73], True)], number=1),
    ]
    message = rollout(*rows, messages=(Message("user", "q?"),), label="c")
    teacher = Teacher(client=client, privileged=privileged(context))  # type: ignore[arg-type]
    run_config = scored(load_config(None, ALONE), {"a": teacher}, message)["a"]
    assert client.sent == [
        ([*other_prompt, 70, 71, 80, 72], len(other_prompt)),
        ([*other_prompt, 90, 73], len(other_prompt) + 1),
    ]
    for one in rows:
        at = np.flatnonzero(one.mask)
        np.testing.assert_array_equal(run_config[one.key][at], -(at + len(other_prompt) - len(plain)))
        assert run_config[one.key].shape == one.mask.shape


def test_the_page_has_a_function_that_gives_hints(tmp_path: Path) -> None:
    file = tmp_path / "hints.py"
    file.write_text(example("hints.py", ROOT / "docs" / "how_to" / "distillation.md"))
    given = rollout(row(prompt_of("q"), [([70], True)]), messages=(Message("user", "q"),), label="x")
    [message] = load_context(f"{file}:told", "key")(Sample.from_rollout(given))
    assert message.content == "q\n\nThe answer is x. An attempt was wrong."


def test_a_first_row_without_a_sampled_token_is_the_prompt() -> None:
    client, plain = Positions(), prompt_of("q")
    message = rollout(row(plain, []), row(plain, [([70], True)], number=1), messages=(Message("user", "q"),), label="x")
    teacher = Teacher(client=client, privileged=privileged("{answer}"))  # type: ignore[arg-type]
    scored(load_config(None, ALONE), {"a": teacher}, message)
    assert client.sent == [([*prompt_of("x"), 70], len(prompt_of("x")))]


def test_a_list_of_answers_gives_its_first_one() -> None:
    client = Positions()
    message = rollout(row(prompt_of("q"), [([70], True)]), messages=(Message("user", "q"),), label=["x", "y"])
    teacher = Teacher(client=client, privileged=privileged("{answer}"))  # type: ignore[arg-type]
    scored(load_config(None, ALONE), {"a": teacher}, message)
    assert client.sent == [([*prompt_of("x"), 70], len(prompt_of("x")))]


def fails(sample: Sample) -> list[Message]:
    raise KeyError("solution")


def nothing(sample: Sample) -> list[Message]:
    return []


@pytest.mark.parametrize(
    ("context", "changes", "words"),
    [
        ("{answer}", {"label": None}, "task 'p' has none"),
        ("{message}", {"messages": ()}, "--replay"),
        (f"{__name__}:fails", {}, r"key failed for rollout r: KeyError: 'solution'.*test_teachers.py"),
        (f"{__name__}:nothing", {}, r"must return messages"),
    ],
)
def test_a_context_that_cannot_be_made_ends_the_run(context: str, changes: dict[str, Any], words: str) -> None:
    fields = {"messages": (Message("user", "q"),), "label": "x"} | changes
    given = rollout(row(prompt_of("q"), [([70], True)]), **fields)
    teacher = Teacher(client=Positions(), privileged=privileged(context))  # type: ignore[arg-type]
    with pytest.raises(RunStopped, match=words):
        scored(load_config(None, ALONE), {"a": teacher}, given)


def test_a_row_with_another_beginning_ends_the_run() -> None:
    rewritten = replace(row(prompt_of("summary"), [([70], True)], number=1), fork=ForkReason.CONTEXT)
    message = rollout(row(prompt_of("q"), [([70], True)]), rewritten, messages=(Message("user", "q"),), label="x")
    teacher = Teacher(client=Positions(), privileged=privileged("{answer}"))  # type: ignore[arg-type]
    with pytest.raises(RunStopped, match=r"row 1 of rollout r \(fork: context\)"):
        scored(load_config(None, ALONE), {"a": teacher}, message)


def test_a_function_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no 'gone'"):
        load_context(f"{__name__}:gone", "algo.distillation.teachers.a.context")


ARRAYS = ("token_ids", "provenance", "mask", "mask_reason", "logprobs", "versions", "requests")
PICTURES = [load_image(Pillow.new("RGB", (32, 32), color)) for color in ("red", "blue")]
PICTURE_MESSAGE = message_with_images("user", PICTURES[0], "How many?")


def row_with_pictures(renderer: ChatRenderer) -> tuple[Row, Mapping[str, Image]]:
    """Return a prompt with a picture, a sampled token, a picture that is observed, and a sampled token."""
    prompt = renderer.render((PICTURE_MESSAGE,))
    [first] = prompt.images
    size, picture = len(prompt.token_ids), prompt.token_ids[first.span.start : first.span.end]
    made = row(prompt.token_ids, [([70], True), (picture, False), ([71], True)])
    spans = (first.span, ImageSpan(size + 1, len(picture), PICTURES[1].digest))
    return replace(made, images=spans), {image.digest: image for image in PICTURES}


@pytest.fixture(scope="module")
def reader() -> ChatRenderer:
    return load_renderer(resolve_model("geometry-warm"))


class Recording(FakeLearner):
    """Gives tokens their places as log-probabilities, and keeps what it was sent."""

    def logprobs(self, batch: GlobalBatch, model: str = "main") -> Any:
        [self.micro] = batch.micro[0]
        return {
            key: np.arange(int((self.micro.row_L == n).sum()), dtype=np.float32)
            for n, key in enumerate(self.micro.keys)
        }


@pytest.mark.parametrize("context", [None, "{message} It is {answer}.", "{answer}"])
def test_a_teacher_in_the_learner_reads_the_pictures_of_a_row_and_of_its_context(
    reader: ChatRenderer, context: str | None
) -> None:
    made, images = row_with_pictures(reader)
    learner, privileged_rows = Recording(), None
    if context is not None:
        privileged_rows = PrivilegedRows(load_context(context, "key"), "key", reader)
    teacher = Teacher(policy="main", privileged=privileged_rows)
    given = rollout(made, messages=(PICTURE_MESSAGE,), label="2", images=images)
    teachers = Teachers(load_config(None, ALONE).algo.distillation, {"a": teacher})
    scores = asyncio.run(teachers.score(group_rollouts([given]), learner, PackOptions(128)))["a"][made.key]
    micro = learner.micro
    assert [placed.image for placed in micro.images] == (PICTURES[1:] if context == "{answer}" else PICTURES)
    ids, pad = micro.token_ids_L.numpy(), made.token_ids[made.images[1].start + 1]
    for placed in micro.images:
        assert (ids[placed.span.start + 1 : placed.span.end - 1] == pad).all()
    longer = int((micro.row_L == 0).sum()) - len(made.token_ids)
    assert (longer > 0) if context == "{message} It is {answer}." else (longer < 0) == (context is not None)
    at = np.flatnonzero(made.mask)
    np.testing.assert_array_equal(scores[at], at + longer)
    np.testing.assert_array_equal(ids[at + longer], [70, 71])


def test_a_teacher_at_a_server_gets_the_pictures_up_to_the_last_sampled_token(reader: ChatRenderer) -> None:
    made, images = row_with_pictures(reader)
    end = len(made.token_ids)
    picture = ImageSpan(end + 1, made.images[0].length, PICTURES[0].digest)  # follows the last sampled token
    tail = made.token_ids[made.images[0].start : made.images[0].end].tolist()
    longer = row([], [(made.token_ids.tolist(), False), ([5], False), (tail, False)])
    arrays = {name: np.concatenate([getattr(made, name), getattr(longer, name)[end:]]) for name in ARRAYS}
    made, client = replace(made, **arrays, images=(*made.images, picture)), Positions()
    scored(load_config(None, ALONE), {"a": Teacher(client=client)}, rollout(made, images=images))  # type: ignore[arg-type]
    [(ids, start)] = client.sent
    assert (len(ids), start) == (end, int(np.flatnonzero(made.mask)[0]))
    assert [(placed.span, placed.image) for placed in client.images] == list(
        zip(made.images[:2], PICTURES, strict=True)
    )


def test_a_teacher_whose_server_reads_no_pictures_is_named_when_a_row_has_one(
    reader: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    class Blind(Positions):
        async def score(
            self, token_ids: Sequence[int], start: int, *, images: Sequence[PlacedImage] = ()
        ) -> np.ndarray:
            raise EngineError("teacher 'a' refuses image_data")

    fault = asyncio.run(image_fault(Blind(), "a.url=http://a", reader.render((PICTURE_MESSAGE,))))  # type: ignore[arg-type]
    assert "a.url=http://a does not score prompts with images" in caplog.text
    made, images = row_with_pictures(reader)
    client = Positions()
    teacher = Teacher(client=client, image_fault=fault)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rollout r has images, and a\.url=http://a .*refuses image_data"):
        scored(load_config(None, ALONE), {"a": teacher}, rollout(made, images=images))
    assert not client.sent
    scored(load_config(None, ALONE), {"a": teacher}, rollout(row([5], [([6], True)])))
    assert client.sent == [([5, 6], 1)], "texts are scored"


def test_the_embedded_engine_scores_pictures_for_a_teacher_as_transformers_does() -> None:
    """Rows of five pictures over four turns, with forks, pictures in observations, and a sampled token of a picture."""
    family = "qwen3-vl"
    rows = image_rows.episodes(family)
    expected = image_rows.own_logprobs(family, image_rows.without_sampled_pads(family, rows))
    spoken = image_rows.without_sampled_pads(family, rows[:1]) + rows[1:]
    given_rollouts = [rollout(made, images=image_rows.IMAGES) for made in spoken]
    tokenizer = image_rows.processor(family)._processor.tokenizer
    token_id = read_image_positions(image_rows.folder(family)).image_token_id

    async def play() -> tuple[Any, str]:
        engine = InProcessEngine(image_rows.folder(family), tokenizer, context=512)
        client = ScoringClient(
            "http://a", "teacher 'a'", timeout_s=9, vocabulary_size=len(tokenizer), image_token_id=token_id
        )
        client._http = engine  # type: ignore[assignment]
        async with engine.running():
            config = load_config(None, ALONE).algo.distillation
            teachers = Teachers(config, {"a": Teacher(client=client)})
            prompt = load_renderer(image_rows.folder(family)).render((PICTURE_MESSAGE,))
            fault = await image_fault(client, "a.url", prompt)
            return (await teachers.score(group_rollouts(given_rollouts), FakeLearner(), PackOptions(512)))["a"], fault

    scores, fault = asyncio.run(play())
    assert fault == ""
    pads = np.array([*image_rows.processor(family).pad_ids])
    for made in spoken:
        at = np.flatnonzero(made.mask)
        if np.isin(made.token_ids[at], pads).any():  # transformers takes a sampled one for a picture's
            assert np.isfinite(scores[made.key]).all()
            assert (scores[made.key][at] < 0).all()
            continue
        np.testing.assert_allclose(scores[made.key][at], expected[made.key][at], atol=1e-4)


# Learning


def train(config: Config, learner: LearnerGroup, rollouts: Sequence[Rollout], scores: StepScores) -> dict[str, float]:
    """Take a training step, as `agentrl.train.trainer.Trainer` does, and return the distillation's metrics."""
    step = training_step(config, rollouts, scores)
    for optimizer_step in step.optimizer_steps():
        learner.train_step(step.policy_batch(optimizer_step))
    return scores.distillation_metrics(config.algo, step.groups)


def test_a_student_learns_its_teachers_distribution_through_the_engine(tmp_path: Path) -> None:
    """Both have random weights. The teacher's server is the embedded engine, as is the student's."""
    student_folder = make_model(tmp_path / "student", vocab_size=24, initializer_range=0.1)
    torch.manual_seed(5)
    teacher_folder = tmp_path / "teacher"
    MODELS["qwen3"](SIZES | {"vocab_size": 24, "initializer_range": 0.5}).save_pretrained(teacher_folder)
    config = load_config(None, [*ALONE, "algo.loss.name=reinforce"])
    learners = Learners(student_folder)

    async def play() -> list[float]:
        learner = learners.open(lr=2e-2, max_grad_norm=1.0)
        teacher, student = InProcessEngine(teacher_folder, TOKENIZER), InProcessEngine(student_folder, TOKENIZER)
        client = ScoringClient("http://a", "teacher 'a'", timeout_s=9, vocabulary_size=24)
        client._http = teacher  # type: ignore[assignment]
        teachers, result = Teachers(config.algo.distillation, {"a": Teacher(client=client)}), []
        async with teacher.running(), student.running():
            for step in range(16):
                for bucket in learner.buckets(1 << 30):
                    student.model.load_weights(bucket.tensors())
                student.scheduler.flush()
                reply = await sample(student, [[5, 6, 7]] * 24, step)
                scores = StepScores(
                    teachers=await teachers.score(group_rollouts(reply), learner, pack_options(config, 0))
                )
                result.append(train(config, learner, reply, scores)["train/teacher_kl"])
        return result

    try:
        result = asyncio.run(play())
    finally:
        learners.close()
    assert np.mean(result[:3]) > 2
    assert np.mean(result[-3:]) < 0.35 * np.mean(result[:3]), result


LETTERS = [RENDERER.encode(letter)[0] for letter in "abcd"]


def next_token(learner: LearnerGroup, config: Config, prompt: Sequence[int]) -> np.ndarray:
    """The policy's probabilities of all tokens after a prompt."""
    rows = [row(prompt, [([token], True)], name=str(token)) for token in range(VOCABULARY)]
    logprobs = learner.logprobs(pack(rows, pack_options(config, 0)))
    return np.exp([logprobs[one.key][-1] for one in rows])


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that copies an answer from its prompt, and guesses without one."""
    folder = tmp_path_factory.mktemp("warm")
    learners = Learners(make_model(folder / "random", vocab_size=VOCABULARY, initializer_range=0.1))
    pairs = [(prompt_of(f"q {letter}"), token) for letter, token in zip("abcd", LETTERS, strict=True)]
    pairs += [(prompt_of("q"), token) for token in LETTERS]
    rows = [row(prompt, [([token], True)], name=str(number)) for number, (prompt, token) in enumerate(pairs)]
    lessons = pack(rows, pack_options(load_config(None), 0), kind="sft")
    try:
        learner = learners.open(lr=1e-2, max_grad_norm=1.0)
        for _ in range(30):
            learner.train_step(lessons)
        learner.save(folder / "trained")
        learner.finish_save()
    finally:
        learners.close()
    return folder / "trained" / "model"


@pytest.mark.parametrize(("policy", "steps"), [("main", 4), ("reference", 6)])
def test_self_distillation_moves_probability_towards_the_privileged_answer(policy: str, steps: int, warm: Path) -> None:
    """Its own current weights are a teacher that moves: after a few steps more it is worse than at first."""
    context = "{message} {answer}"
    me = [f"algo.distillation.teachers.me.policy={policy}", f"algo.distillation.teachers.me.context='{context}'"]
    config = load_config(None, ["algo.distillation.reward_coef=0", *me, "algo.loss.name=reinforce"])
    teachers = Teachers(config.algo.distillation, {"me": Teacher(policy=policy, privileged=privileged(context))})
    learners, random, plain = Learners(warm), np.random.default_rng(0), prompt_of("q")
    try:
        learner = learners.open(reference=warm, algo=config.algo, lr=4e-3, max_grad_norm=1.0)
        now = next_token_before = next_token(learner, config, plain)
        assert next_token_before[LETTERS].max() < 0.5
        assert next_token(learner, config, prompt_of("q c"))[LETTERS[2]] > 0.8
        for step in range(steps):
            rollouts = []
            for number, token in enumerate(random.choice(VOCABULARY, 16, p=now / now.sum())):
                one = row(plain, [([int(token)], True)], name=f"{step}/{number}")
                one.logprobs[-1] = np.log(now[token])
                rollouts.append(rollout(one, messages=(Message("user", "q"),), label="c"))
            scored = asyncio.run(teachers.score(group_rollouts(rollouts), learner, pack_options(config, 0)))
            train(config, learner, rollouts, StepScores(teachers=scored))
            now = next_token(learner, config, plain)
    finally:
        learners.close()
    assert now[LETTERS[2]] > 0.8, (next_token_before[LETTERS], now[LETTERS])


async def sample(engine: InProcessEngine, prompts: Sequence[list[int]], step: int) -> list[Rollout]:
    """Sample answers of 3 tokens."""
    params = [
        {"max_new_tokens": 3, "sampling_seed": 1000 * step + number, "ignore_eos": True}
        for number in range(len(prompts))
    ]
    body = {"input_ids": list(prompts), "sampling_params": params, "return_logprob": True}
    async with engine.request("POST", "/generate", body) as reply:
        replies = orjson.loads(await reply.read())
    found = []
    for number, (prompt, one) in enumerate(zip(prompts, replies, strict=True)):
        pairs = one["meta_info"]["output_token_logprobs"]
        made = row(prompt, [([token for _, token, _ in pairs], True)], name=f"{step}/{number}")
        logprobs = np.zeros(len(made.mask), np.float32)
        logprobs[len(prompt) :] = [logprob for logprob, _, _ in pairs]
        found.append(rollout(replace(made, logprobs=logprobs)))
    return found
