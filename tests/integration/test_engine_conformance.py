"""What every engine behind the client must do. Another engine joins by an entry in ``ENGINES``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch
from engine_tiny import make_tokenizer, reference_logprobs, save_model
from transformers import PreTrainedModel

from agentrl.errors import EngineError, SamplerError
from agentrl.models.load import load_model
from agentrl.sampler.client import SGLangClient
from agentrl.sampler.launch import EngineProcess, launch_embedded
from agentrl.types import FinishReason, Generation, Prompt, SamplingParams

T = TypeVar("T")
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)


def embedded(folder: Path, log: Path) -> EngineProcess:
    return launch_embedded(folder, log=log, slots=64, context=512, threads=1)


ENGINES: dict[str, Callable[[Path, Path], EngineProcess]] = {"embedded": embedded}


@dataclass
class Engine:
    url: str
    folder: Path
    other: Path
    model: PreTrainedModel
    other_model: PreTrainedModel

    def drive(self, play: Callable[[SGLangClient], Awaitable[T]]) -> T:
        """Run ``play`` with a client; the engine has the first weights, an empty cache and goes on before and after."""

        async def session() -> T:
            client = SGLangClient(self.url, timeout_s=60)
            try:
                result = await play(client)
                await client.resume()
                await client.update_from_disk(self.folder, 0)
                return result
            finally:
                await client.aclose()

        return asyncio.run(session())

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, trust_env=False)


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("engine")
    folder, other = save_model(root / "a", seed=0), save_model(root / "b", seed=1)
    process = ENGINES[request.param](folder, root / "engine.log")
    try:
        yield Engine(process.url, folder, other, load_model(folder), load_model(other))
    finally:
        process.stop()


def prompt(seed: int, length: int = 30) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 384) for _ in range(length)]


async def sample(client: SGLangClient, ids: list[int], params: SamplingParams, name: str = "r") -> Generation:
    return await client.generate(Prompt(tuple(ids)), params, session_id=name, request_id=name)


def assert_matches(model: PreTrainedModel, ids: list[int], generation: Generation, temperature: float = 1.0) -> None:
    assert len(generation.logprobs) == len(generation.token_ids)
    wanted = reference_logprobs(model, ids, list(generation.token_ids), temperature)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_ids_in_ids_out_with_logprobs_at_the_temperature(engine: Engine, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=temperature)
    generation = engine.drive(lambda client: sample(client, prompt(1), params))
    assert len(generation.token_ids) == 24
    assert generation.finish_reason is FinishReason.LENGTH
    assert generation.versions == ((0, 0),)
    assert_matches(engine.model, prompt(1), generation, temperature)


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=40, top_k=2), SamplingParams(40, top_p=0.3)])
def test_top_k_and_top_p_restrict_without_renormalising(engine: Engine, params: SamplingParams) -> None:
    generation = engine.drive(lambda client: sample(client, prompt(2), params))
    assert_matches(engine.model, prompt(2), generation)
    ids = prompt(2) + list(generation.token_ids)
    with torch.no_grad():
        probabilities = engine.model(torch.tensor([ids])).logits[0].softmax(-1)
    for at, token in enumerate(generation.token_ids, len(prompt(2)) - 1):
        above = probabilities[at][probabilities[at] > probabilities[at, token]]
        assert len(above) < params.top_k if params.top_k > 0 else float(above.sum()) < params.top_p + 1e-4


def test_greedy_is_the_same_alone_and_in_a_batch(engine: Engine) -> None:
    async def play(client: SGLangClient) -> list[Generation]:
        alone = await sample(client, prompt(3), GREEDY, "alone")
        rest = [sample(client, prompt(3 + index % 2), GREEDY, f"r{index}") for index in range(16)]
        return [alone, *(await asyncio.gather(*rest))[::2]]

    outputs = {generation.token_ids for generation in engine.drive(play)}
    assert len(outputs) == 1


def test_a_request_with_a_seed_repeats(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=24, seed=7)

    async def play(client: SGLangClient) -> list[Generation]:
        return [await sample(client, prompt(4), params, f"r{index}") for index in range(2)]

    first, second = engine.drive(play)
    assert first.token_ids == second.token_ids


def test_a_stop_string_may_end_inside_a_token_and_ids_stay_whole(engine: Engine) -> None:
    tokenizer = make_tokenizer()

    async def play(client: SGLangClient) -> None:
        found = 0
        for seed in range(20):
            free = await sample(client, prompt(seed), SamplingParams(max_new_tokens=40, temperature=0.0))
            texts = [tokenizer.decode([token]) for token in free.token_ids]
            for at, text in enumerate(texts):
                stop = text[:-1]
                if at < 2 or len(stop) < 2 or not text.isascii() or any(stop in earlier for earlier in texts[:at]):
                    continue
                if stop in "".join(texts[:at]):
                    continue
                params = SamplingParams(max_new_tokens=40, temperature=0.0, stop=("never in there", stop))
                stopped = await sample(client, prompt(seed), params)
                assert stopped.token_ids == free.token_ids[: at + 1]
                assert stopped.finish_reason is FinishReason.STOP
                found += 1
                break
        assert found >= 3

    engine.drive(play)


def test_a_stop_string_is_cut_from_the_text_alone(engine: Engine) -> None:
    ids = prompt(5)
    plain = engine.post(
        "/generate", {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
    ).json()
    text = plain["text"]
    at = next(at for at in range(5, 40) if text[at : at + 2].isascii() and text.index(text[at : at + 2]) == at)
    stop = text[at : at + 2]
    params = {"temperature": 0, "max_new_tokens": 40, "stop": stop, "skip_special_tokens": False}
    cut = engine.post("/generate", {"input_ids": ids, "sampling_params": params}).json()
    kept = engine.post("/generate", {"input_ids": ids, "sampling_params": {**params, "no_stop_trim": True}}).json()
    assert cut["output_ids"] == kept["output_ids"]
    assert cut["text"] == text[:at]
    assert kept["text"].startswith(text[: at + 2])
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_stop_token_ends_the_turn_and_stays(engine: Engine) -> None:
    async def play(client: SGLangClient) -> tuple[Generation, Generation]:
        free = await sample(client, prompt(6), GREEDY)
        params = SamplingParams(max_new_tokens=24, temperature=0.0, stop_token_ids=(free.token_ids[5],))
        return free, await sample(client, prompt(6), params)

    free, stopped = engine.drive(play)
    at = free.token_ids.index(free.token_ids[5])
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_later_turns_find_their_prefix_cached(engine: Engine) -> None:
    async def play(client: SGLangClient) -> None:
        await client.flush()
        ids = prompt(7, 60)
        first = await sample(client, ids, GREEDY)
        assert first.cached_tokens == 0
        longer = ids + list(first.token_ids) + prompt(8, 10)
        second = await sample(client, longer, GREEDY)
        assert second.cached_tokens >= len(ids) + len(first.token_ids) - 1
        assert_matches(engine.model, longer, second, 0.0)
        other = await sample(client, [*ids[:40], *prompt(9, 20)], GREEDY)
        assert other.cached_tokens >= 40
        await client.flush()
        assert (await sample(client, longer, GREEDY)).cached_tokens == 0

    engine.drive(play)


def test_an_aborted_request_keeps_its_tokens(engine: Engine) -> None:
    async def play(client: SGLangClient) -> Generation:
        params = SamplingParams(max_new_tokens=480)
        task = asyncio.create_task(sample(client, prompt(10, 20), params, "long"))
        other = asyncio.create_task(sample(client, prompt(11, 20), params, "longer"))
        await asyncio.sleep(0.15)
        await client.abort("long")
        assert len((await other).token_ids) == 480, "an id that begins like the aborted one is another"
        return await task

    generation = engine.drive(play)
    assert generation.finish_reason is FinishReason.ABORT
    assert len(generation.token_ids) < 480
    assert_matches(engine.model, prompt(10, 20), generation)


def test_a_caller_that_goes_away_frees_its_place(engine: Engine) -> None:
    async def play(client: SGLangClient) -> None:
        tasks = [
            asyncio.create_task(
                sample(client, prompt(100 + index, 20), SamplingParams(max_new_tokens=480), f"r{index}")
            )
            for index in range(80)
        ]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Without a free place, 80 requests of 480 tokens would stand before this one and outlast the pause's drain.
        await client.update_from_disk(engine.other, 1)
        assert (await sample(client, prompt(12), GREEDY)).versions == ((0, 1),)

    engine.drive(play)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_paused_requests_end_as_if_nothing_had_been(engine: Engine, mode: str) -> None:
    params = SamplingParams(max_new_tokens=300, temperature=0.0)

    async def play(client: SGLangClient) -> tuple[list[Generation], list[Generation]]:
        calm = [await sample(client, prompt(20 + index), params) for index in range(3)]
        tasks = [asyncio.create_task(sample(client, prompt(20 + index), params, f"r{index}")) for index in range(3)]
        await asyncio.sleep(0.05)
        await client.pause(mode)
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in tasks)
        await client.resume()
        return calm, await asyncio.gather(*tasks)

    calm, paused = engine.drive(play)
    assert [one.token_ids for one in calm] == [one.token_ids for one in paused]
    for index, generation in enumerate(paused):
        assert_matches(engine.model, prompt(20 + index), generation, 0.0)


@pytest.mark.parametrize("mode", ["abort", "retract"])
@pytest.mark.parametrize("transport", ["tensors", "disk"])
def test_weights_that_change_in_mid_turn_leave_exact_versions(engine: Engine, mode: str, transport: str) -> None:
    """Each token's log-probability is that of the weights its version names, over the tokens before it."""
    params = SamplingParams(max_new_tokens=400)

    async def play(client: SGLangClient) -> list[Generation]:
        tasks = [asyncio.create_task(sample(client, prompt(30 + index), params, f"r{index}")) for index in range(4)]
        await asyncio.sleep(0.2)
        await client.pause(mode)
        late = asyncio.create_task(sample(client, prompt(34), params, "late"))
        if transport == "disk":
            await client.update_from_disk(engine.other, 5)
        else:
            named = list(engine.other_model.state_dict().items())
            await client.update_from_tensors(named[:3], 5, last=False)
            await client.update_from_tensors(named[3:], 5, last=True)
        assert await client.version() == 5
        await asyncio.sleep(0.05)
        assert not late.done()
        await client.resume()
        return await asyncio.gather(*tasks, late)

    *generations, late = engine.drive(play)
    assert late.versions == ((0, 5),)
    split = 0
    for index, generation in enumerate(generations):
        ids = prompt(30 + index)
        assert len(generation.token_ids) == 400
        assert generation.finish_reason is FinishReason.LENGTH
        starts = [*(start for start, _ in generation.versions), 400]
        for (start, version), end in zip(generation.versions, starts[1:], strict=True):
            model = engine.model if version == 0 else engine.other_model
            wanted = reference_logprobs(
                model, ids + list(generation.token_ids[:start]), list(generation.token_ids[start:end])
            )
            np.testing.assert_allclose(generation.logprobs[start:end], wanted, atol=1e-4)
        split += [version for _, version in generation.versions] == [0, 5]
    assert split > 0, "no request was under way when the weights changed"


def test_an_update_without_a_pause_waits_for_what_runs_and_drops_the_cache(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=100)

    async def play(client: SGLangClient) -> tuple[list[Generation], Generation]:
        tasks = [asyncio.create_task(sample(client, prompt(40 + index), params, f"r{index}")) for index in range(4)]
        await asyncio.sleep(0.05)
        await client.update_from_tensors(list(engine.other_model.state_dict().items()), 3, last=True)
        after = await sample(client, prompt(40), params, "after")
        return await asyncio.gather(*tasks), after

    before, after = engine.drive(play)
    for index, generation in enumerate(before):
        ((start, version),) = generation.versions
        assert start == 0
        assert_matches(engine.model if version == 0 else engine.other_model, prompt(40 + index), generation)
    assert after.versions == ((0, 3),)
    assert after.cached_tokens == 0 or before[0].versions == ((0, 3),)
    assert_matches(engine.other_model, prompt(40), after)


def test_weights_that_do_not_fit_are_refused_whole(engine: Engine) -> None:
    async def play(client: SGLangClient) -> Generation:
        name, tensor = next(iter(engine.other_model.state_dict().items()))
        for named in ([(name, tensor), ("no.such.weight", tensor)], [(name, tensor[:1])]):
            with pytest.raises(EngineError, match=r"no\.such\.weight|is \[384, 48\], not \[1, 48\]"):
                await client.update_from_tensors(named, 9, last=True)
        with pytest.raises(EngineError, match="nowhere"):
            await client.update_from_disk(Path("/nowhere"), 9)
        assert await client.version() == 0
        return await sample(client, prompt(50), GREEDY)

    assert_matches(engine.model, prompt(50), engine.drive(play), 0.0)


def test_bad_requests_are_refused_in_the_engines_words(engine: Engine) -> None:
    async def play(client: SGLangClient) -> None:
        with pytest.raises(SamplerError, match=r"600.*longer than the model's context"):
            await sample(client, prompt(60, 600), GREEDY)
        with pytest.raises(SamplerError, match="temperature"):
            await sample(client, prompt(60), SamplingParams(temperature=-1.0))
        with pytest.raises(SamplerError, match="policy='other'"):
            await client.generate(Prompt((5,)), GREEDY, session_id="s", request_id="r", policy="other")
        assert len((await sample(client, prompt(60), GREEDY)).token_ids) == 24

    engine.drive(play)


def test_the_context_limits_what_is_sampled(engine: Engine) -> None:
    generation = engine.drive(lambda client: sample(client, prompt(61, 500), SamplingParams(max_new_tokens=100)))
    assert generation.finish_reason is FinishReason.LENGTH
    assert 500 < 500 + len(generation.token_ids) <= 512
    assert_matches(engine.model, prompt(61, 500), generation)


def test_a_batch_of_prompts_in_one_request(engine: Engine) -> None:
    body = {
        "input_ids": [prompt(70), prompt(71)],
        "sampling_params": [{"temperature": 0, "max_new_tokens": 5}, {"temperature": 0, "max_new_tokens": 7}],
        "return_logprob": True,
        "rid": ["a", "b"],
    }
    first, second = engine.post("/generate", body).json()
    assert [first["meta_info"]["id"], second["meta_info"]["id"]] == ["a", "b"]
    assert [first["meta_info"]["completion_tokens"], second["meta_info"]["completion_tokens"]] == [5, 7]
    assert [entry[1] for entry in second["meta_info"]["output_token_logprobs"]] == second["output_ids"]
    assert second["meta_info"]["prompt_tokens"] == 30


def test_300_concurrent_requests(engine: Engine) -> None:
    async def play(client: SGLangClient) -> list[Generation]:
        shared = prompt(80, 20)
        calls = (sample(client, shared + prompt(index, 10), SamplingParams(12), f"r{index}") for index in range(300))
        return await asyncio.gather(*calls)

    generations = engine.drive(play)
    assert {len(generation.token_ids) for generation in generations} == {12}
    for index in range(0, 300, 25):
        assert_matches(engine.model, prompt(80, 20) + prompt(index, 10), generations[index])
