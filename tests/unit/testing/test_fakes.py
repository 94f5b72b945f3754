"""The fakes keep the protocols they stand in for."""

import asyncio
import inspect
from pathlib import Path

import pytest
import torch
from deadlines import until

from agentrl.batch.microbatch import GlobalBatch, MicroBatch
from agentrl.core.errors import CheckpointError, LearnerError, SamplerError, SandboxFailure
from agentrl.core.sampler import Sampler
from agentrl.core.types import FinishReason, Generation, Prompt, RowKey, SamplingParams
from agentrl.learner.base import LearnerGroup
from agentrl.sandbox.base import Job
from agentrl.testing import FakeLearner, FakeSandboxBackend, ScriptedSampler

PROMPT = Prompt((1, 2, 3))


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def ask(sampler: ScriptedSampler, session: str = "s", request: str = "r", **params: object) -> Generation:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return asyncio.run(sampler.generate(PROMPT, sampling, session_id=session, request_id=request))


@pytest.mark.parametrize(("fake", "protocol"), [(ScriptedSampler, Sampler), (FakeLearner, LearnerGroup)])
def test_signatures_are_the_protocols(fake: type, protocol: type) -> None:
    expected = [name for name, value in vars(protocol).items() if not name.startswith("_") and callable(value)]
    assert expected
    for name in expected:
        ours, theirs = inspect.signature(getattr(fake, name)), inspect.signature(getattr(protocol, name))
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name


def test_answers_come_in_order_for_each_session() -> None:
    sampler = ScriptedSampler(["ab</x>", "c"], encode=encode, end_token_id=0, version=7)
    first = ask(sampler, "s1", "r1", stop=("</x>",))
    assert first.token_ids == tuple(encode("ab</x>"))
    assert (first.finish_reason, first.versions, first.request_id) == (FinishReason.STOP, ((0, 7),), "r1")
    assert len(first.logprobs) == len(first.token_ids)
    assert all(value < 0 for value in first.logprobs)
    assert ask(sampler, "s2").token_ids == (*encode("ab</x>"), 0)
    assert ask(sampler, "s1").token_ids == (*encode("c"), 0)
    with pytest.raises(AssertionError, match="2 answers; session s1 wants more"):
        ask(sampler, "s1")
    assert [(item.session_id, item.turn) for item in sampler.requests] == [("s1", 0), ("s2", 0), ("s1", 1), ("s1", 2)]


def test_logprobs_do_not_depend_on_who_asks_first() -> None:
    first_sampler, second_sampler = (ScriptedSampler([[1, 2], [3]], seed=5) for _ in range(2))
    forward = [ask(first_sampler, session).logprobs for session in ("a", "b")]
    assert [ask(second_sampler, session).logprobs for session in ("b", "a")] == forward[::-1]
    assert forward[0] != forward[1]
    assert ask(ScriptedSampler([[1, 2]], seed=6), "a").logprobs != forward[0]


def test_a_script_may_be_a_function_or_hold_errors() -> None:
    sampler = ScriptedSampler(lambda request: [request.turn, len(request.prompt.token_ids)])
    assert [ask(sampler).token_ids for _ in range(2)] == [(0, 3), (1, 3)]
    with pytest.raises(SamplerError, match="gone"):
        ask(ScriptedSampler({"s": [SamplerError("gone")]}))


def test_max_new_tokens_cuts() -> None:
    cut = ask(ScriptedSampler([[1, 2, 3]]), max_new_tokens=2)
    assert (cut.token_ids, cut.finish_reason) == ((1, 2), FinishReason.LENGTH)


def test_a_gate_holds_requests_and_abort_gives_half() -> None:
    async def scenario() -> list[Generation]:
        gate = asyncio.Event()
        sampler = ScriptedSampler([[1, 2, 3, 4]], gate=gate)
        waiting = [
            asyncio.create_task(sampler.generate(PROMPT, SamplingParams(), session_id=name, request_id=name))
            for name in ("a", "b")
        ]
        await until(lambda: sampler.running == 2)
        await sampler.abort("a")
        aborted = await waiting[0]
        gate.set()
        await sampler.abort("nobody")
        await sampler.close_session("a")
        assert sampler.closed == ["a"]
        return [aborted, await waiting[1]]

    aborted, unaborted = asyncio.run(scenario())
    assert (aborted.token_ids, aborted.finish_reason) == ((1, 2), FinishReason.ABORT)
    assert (unaborted.token_ids, unaborted.finish_reason) == ((1, 2, 3, 4), FinishReason.STOP)


def batch() -> GlobalBatch:
    """Two packed rows, 3 and 2 tokens, and one token of padding."""
    row = torch.tensor([0, 0, 0, 1, 1, -1], dtype=torch.int32)
    zeros = torch.zeros(6)
    keys = (RowKey("p", "a"), RowKey("p", "b"))
    micro = MicroBatch(
        token_ids_L=zeros.long(),
        position_ids_L=zeros.long(),
        row_L=row,
        mask_L=zeros.bool(),
        weight_L=zeros,
        advantages_L=zeros,
        logprobs_L=torch.arange(6.0),
        provenance_L=zeros.byte(),
        versions_L=zeros.int(),
        requests_L=zeros.int(),
        keys=keys,
    )
    return GlobalBatch(micro=((micro,),))


def test_the_learner_remembers_and_fails_as_told() -> None:
    learner = FakeLearner(metrics={"loss": 0.5}, fail_at=1)
    global_batch = batch()
    assert learner.train_step(global_batch) == {"loss": 0.5}
    assert learner.batches == [global_batch]
    logprobs = learner.logprobs(global_batch)
    assert {key.rollout_id: value.tolist() for key, value in logprobs.items()} == {"a": [0, 1, 2], "b": [3, 4]}
    with pytest.raises(LearnerError, match="fails at step 1"):
        learner.train_step(global_batch)
    learner.close()
    assert learner.closed


def test_weights_come_in_buckets() -> None:
    weights = {name: torch.zeros(size) for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1))}
    buckets = [[spec.name for spec in bucket.specs] for bucket in FakeLearner(weights).buckets(bucket_bytes=24)]
    assert buckets == [["a", "b"], ["c"], ["d"]]
    assert list(FakeLearner().buckets(1)) == []


def test_a_sleeping_learner_gives_its_weights_and_nothing_else() -> None:
    learner = FakeLearner({"a": torch.ones(2)})
    learner.sleep()
    [bucket] = learner.buckets(99, "bfloat16")
    assert [(name, tensor.tolist(), tensor.dtype) for name, tensor in bucket.tensors()] == [
        ("a", [1, 1], torch.bfloat16)
    ]
    for call in (learner.train_step, learner.logprobs):
        with pytest.raises(LearnerError, match="sleeps"):
            call(batch())
    learner.wake()
    learner.train_step(batch())


def test_the_learner_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    learner = FakeLearner()
    learner.train_step(batch())
    learner.save(tmp_path)
    assert (tmp_path / "model").is_dir()
    resumed = FakeLearner()
    resumed.load(tmp_path)
    assert resumed.steps == 1
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        resumed.load(tmp_path / "model")


def test_a_sandbox_answers_until_it_is_closed_and_keeps_its_files() -> None:
    async def play() -> None:
        sandbox = await FakeSandboxBackend().open("s")
        sandbox.gate.clear()
        call = asyncio.create_task(sandbox.run(Job("c", code="print(1)")))
        await until(lambda: sandbox.running)
        sandbox.gate.set()
        assert (await call).stdout == "print(1)"
        await sandbox.write_file("a", b"b")
        assert await sandbox.read_file("a") == b"b"
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("c")
        await sandbox.close()
        with pytest.raises(SandboxFailure, match="sandbox s is gone"):
            await sandbox.run(Job("d", code="2"))

    asyncio.run(play())


def test_a_learner_has_the_adapters_of_each_policy() -> None:
    learner = FakeLearner(adapters={"a": {"w": torch.ones(2)}})
    [(name, tensor)] = learner.adapters("bfloat16", "a")
    assert (name, tensor.dtype) == ("w", torch.bfloat16)
    assert learner.adapters() == []
