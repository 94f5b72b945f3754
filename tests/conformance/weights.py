"""What every engine does with new weights: whole or not at all, exact versions, no old cache."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conformance.engine import GREEDY, Engine, prompt, sample, until_sampling
from engine_tiny import reference_logprobs

from agentrl.core.errors import EngineError
from agentrl.core.types import FinishReason, Generation, SamplingParams
from agentrl.inference.client.sglang_client import SGLangClient


class Weights:
    """The tests of this module; a subclass named ``Test…`` runs them against its module's ``engine``."""

    @pytest.mark.parametrize("mode", ["abort", "retract"])
    @pytest.mark.parametrize("transport", ["tensors", "disk"])
    def test_weights_that_change_in_mid_turn_leave_exact_versions(
        self, engine: Engine, mode: str, transport: str
    ) -> None:
        """Each token's log-probability is that of the weights its version names, over the tokens before it.

        Tried again where the engine was so quick that no request was under way when the weights changed, or had no token.
        """
        if mode == "retract" and not engine.traits.changes_beside_held:
            self.refused_beside_held(engine, transport)
            return
        assert any(self.change_after(seconds, engine, mode, transport) for seconds in (0.0, 0.05, 0.02, 0.2, 0.6))

    def refused_beside_held(self, engine: Engine, transport: str) -> None:
        """The engine goes on with what it had."""

        async def play(client: SGLangClient) -> Generation:
            task = asyncio.create_task(sample(client, prompt(30), SamplingParams(max_new_tokens=200)))
            await until_sampling(client, [task])
            await client.pause("retract")
            named = list(engine.other_model.state_dict().items())
            disk = transport == "disk"
            update = (
                client.updates.from_disk(engine.other, 5) if disk else client.updates.from_tensors(named, 5, last=True)
            )
            with pytest.raises(EngineError, match=r"set weights\.pause=abort"):
                await update
            await client.resume()
            return await task

        generation = engine.drive(play)
        assert generation.versions == ((0, 0),)
        assert len(generation.token_ids) == 200

    def change_after(self, seconds: float, engine: Engine, mode: str, transport: str) -> bool:
        """Change the weights so long after all requests have begun; return whether a turn has tokens of both."""
        params = SamplingParams(max_new_tokens=160)

        async def play(client: SGLangClient) -> list[Generation]:
            tasks = [asyncio.create_task(sample(client, prompt(30 + index), params, f"r{index}")) for index in range(4)]
            await until_sampling(client, tasks)
            await asyncio.sleep(seconds)
            await client.pause(mode)
            late = asyncio.create_task(sample(client, prompt(34), GREEDY, "late"))
            if transport == "disk":
                await client.updates.from_disk(engine.other, 5)
            else:
                named = list(engine.other_model.state_dict().items())
                await client.updates.from_tensors(named[:3], 5, last=False)
                await client.updates.from_tensors(named[3:], 5, last=True)
            assert await client.version() == 5
            await asyncio.sleep(0.05)
            assert not late.done()
            await client.resume()
            return await asyncio.gather(*tasks, late)

        *generations, late = engine.drive(play)
        assert late.versions == ((0, 5),)
        split = False
        for index, generation in enumerate(generations):
            ids = prompt(30 + index)
            assert len(generation.token_ids) == 160
            assert generation.finish_reason is FinishReason.LENGTH
            starts = [*(start for start, _ in generation.versions), 160]
            for (start, version), end in zip(generation.versions, starts[1:], strict=True):
                model = engine.model if version == 0 else engine.other_model
                expected = reference_logprobs(
                    model, ids + list(generation.token_ids[:start]), list(generation.token_ids[start:end])
                )
                engine.assert_close(generation.logprobs[start:end], expected)
            split |= [version for _, version in generation.versions] == [0, 5]
        return split

    def test_an_update_without_a_pause_waits_for_what_runs_and_drops_the_cache(self, engine: Engine) -> None:
        params = SamplingParams(max_new_tokens=120)

        async def play(client: SGLangClient) -> tuple[list[Generation], Generation]:
            tasks = [asyncio.create_task(sample(client, prompt(40 + index), params, f"r{index}")) for index in range(4)]
            await until_sampling(client, tasks)
            await client.updates.from_tensors(list(engine.other_model.state_dict().items()), 3, last=True)
            state_after = await sample(client, prompt(40), SamplingParams(max_new_tokens=12), "after")
            return await asyncio.gather(*tasks), state_after

        state_before, state_after = engine.drive(play)
        for index, generation in enumerate(state_before):
            ((start, version),) = generation.versions
            assert start == 0
            engine.assert_matches(engine.model if version == 0 else engine.other_model, prompt(40 + index), generation)
        assert state_after.versions == ((0, 3),)
        assert state_after.cached_tokens == 0 or state_before[0].versions == ((0, 3),)
        engine.assert_matches(engine.other_model, prompt(40), state_after)

    def test_weights_that_do_not_fit_are_refused_whole(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> Generation:
            name, tensor = next(iter(engine.other_model.state_dict().items()))
            if engine.traits.refuses_unfit_weights:
                for named in ([(name, tensor), ("no.such.weight", tensor)], [(name, tensor[:1])]):
                    with pytest.raises(EngineError, match=r"no\.such\.weight|is \[384, 48\], not \[1, 48\]"):
                        await client.updates.from_tensors(named, 9, last=True)
            else:
                await client.updates.from_tensors([("no.such.weight", tensor)], 0, last=True)
            with pytest.raises(EngineError, match="nowhere"):
                await client.updates.from_disk(Path("/nowhere"), 9)
            assert await client.version() == 0
            return await sample(client, prompt(50), GREEDY)

        engine.assert_matches(engine.model, prompt(50), engine.drive(play), 0.0)
