"""Which engine samples which turn, and that a lost engine loses and doubles nothing."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from deadlines import run_ready_tasks, until

from agentrl.core.errors import EngineLostError, SamplerError
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.inference.fleet.router import RoutedSampler
from agentrl.testing.sampler import RecordedRequest, ScriptedSampler

PARAMS = SamplingParams(max_new_tokens=8)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def engine(name: int, gate: asyncio.Event | None = None) -> ScriptedSampler:
    """An engine that says its number, four times."""
    return ScriptedSampler(lambda request: (name,) * 4, gate=gate)


def routed(*engines: ScriptedSampler, max_running: int | None = None) -> RoutedSampler:
    router = RoutedSampler(max_running)
    for number, sampler in enumerate(engines):
        router.add(f"engine-{number}", sampler)
    return router


def ask(router: RoutedSampler, session: str, request: str = "", prompt: str = "") -> asyncio.Task[Generation]:
    """Ask with a prompt that no other session has, or with that of others."""
    ids = tuple((prompt or session).encode())
    return asyncio.ensure_future(
        router.generate(Prompt(ids), PARAMS, session_id=session, request_id=request or session)
    )


@in_loop
async def test_turns_of_a_session_stay_and_new_sessions_go_where_least_runs() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    engines = [engine(0, gates[0]), engine(1, gates[1])]
    router = routed(*engines)
    first = [ask(router, f"s{number}") for number in range(6)]
    await run_ready_tasks()
    assert [e.running for e in engines] == [3, 3]
    at = [{request.session_id for request in e.requests} for e in engines]
    gates[1].set()
    await until(lambda: engines[1].running == 0)
    more = [ask(router, session, f"{session}/1") for session in sorted(at[0])]
    fresh = [ask(router, f"new{number}") for number in range(3)]
    gates[0].set()
    await asyncio.gather(*first, *more, *fresh)
    assert {request.session_id for request in engines[0].requests} == at[0], (
        "all turns where the prefix is, busy or not"
    )
    assert {request.session_id for request in engines[1].requests} == at[1] | {"new0", "new1", "new2"}
    for session in at[0]:
        await router.close_session(session)
    assert set(engines[0].closed) == at[0]
    assert engines[1].closed == []


@in_loop
async def test_sessions_with_one_prompt_go_to_one_engine_until_it_has_eight_requests_more() -> None:
    gate = asyncio.Event()
    engines = [engine(number, gate) for number in range(3)]
    router = routed(*engines)
    waiting_tasks = [ask(router, f"{group}/{sample}", prompt=group) for group in "abc" for sample in range(8)]
    await run_ready_tasks()
    at = [{request.session_id[0] for request in one.requests} for one in engines]
    assert sorted(map(sorted, at)) == [["a"], ["b"], ["c"]]
    waiting_tasks += [ask(router, f"d/{sample}", prompt="d") for sample in range(10)]
    await run_ready_tasks()
    assert sorted(one.running for one in engines) == [8, 10, 16], (
        "the ninth goes to another engine, and the tenth after it"
    )
    gate.set()
    await asyncio.gather(*waiting_tasks)


@in_loop
async def test_a_prompt_of_an_engine_that_is_full_or_removed_goes_elsewhere() -> None:
    gate = asyncio.Event()
    engines = [engine(number, gate) for number in range(3)]
    router = routed(*engines, max_running=2)
    waiting_tasks = [ask(router, f"a{sample}", prompt="a") for sample in range(3)]
    await run_ready_tasks()
    assert [one.running for one in engines] == [2, 1, 0]
    router.remove("engine-1")
    await run_ready_tasks()
    assert [one.running for one in engines] == [2, 0, 1], "the request that was lost"
    waiting_tasks.append(ask(router, "a3", prompt="a"))
    await run_ready_tasks()
    assert [one.running for one in engines] == [2, 0, 2]
    gate.set()
    await asyncio.gather(*waiting_tasks)


@in_loop
async def test_an_engine_gets_so_many_requests_at_a_time_and_the_first_to_wait_is_the_first_to_go() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    engines = [engine(0, gates[0]), engine(1, gates[1])]
    router = routed(*engines, max_running=2)
    waiting_tasks = [ask(router, f"s{number}") for number in range(4)]
    await run_ready_tasks()
    sticky = ask(router, "s0", "s0/1")  # waits for its engine, even once the other one is free
    late = [ask(router, f"late{number}") for number in range(4)]
    await run_ready_tasks()
    assert [e.running for e in engines] == [2, 2]
    gates[1].set()
    await asyncio.gather(*late)
    assert [request.session_id for request in engines[1].requests[2:]] == ["late0", "late1", "late2", "late3"]
    assert not sticky.done()
    gates[0].set()
    await asyncio.gather(*waiting_tasks, sticky)
    assert engines[0].requests[-1].request_id == "s0/1"
    assert [e.max_running for e in engines] == [2, 2]


@in_loop
async def test_two_requests_of_a_session_that_waits_go_to_one_engine() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    engines = [engine(0, gates[0]), engine(1, gates[1])]
    router = routed(*engines, max_running=1)
    full = [ask(router, "a"), ask(router, "b")]
    await run_ready_tasks()
    twins = [ask(router, "twin", "twin/0"), ask(router, "twin", "twin/1")]
    await run_ready_tasks()
    for gate in gates:
        gate.set()
    await asyncio.gather(*full, *twins)
    places = {number for number, e in enumerate(engines) for request in e.requests if request.session_id == "twin"}
    assert len(places) == 1


@in_loop
async def test_requests_of_an_engine_that_is_taken_out_are_sampled_by_another_from_the_start() -> None:
    engines = [engine(0, asyncio.Event()), engine(1)]
    router = routed(*engines)
    waiting_tasks = [ask(router, f"s{number}") for number in range(6)]
    await until(lambda: engines[0].running == 3)
    router.remove("engine-0")
    results = await asyncio.gather(*waiting_tasks)
    assert [result.token_ids for result in results] == [(1,) * 4] * 6, "nothing of the lost engine is kept"
    assert sorted(request.request_id for request in engines[1].requests) == sorted(f"s{number}" for number in range(6))
    assert router.counts["prompt"] == 6 * 2, "each request counts once"
    fresh = engine(7)
    router.add("engine-0", fresh)
    await ask(router, "t0")
    await asyncio.gather(ask(router, "t1"), ask(router, "t2"))
    assert fresh.requests, "who comes back gets requests again"


@in_loop
async def test_without_an_engine_requests_wait_for_one_or_for_the_end() -> None:
    first = engine(0, asyncio.Event())
    router = routed(first)
    waiting_task = ask(router, "s")
    await until(lambda: first.running == 1)
    router.remove("engine-0")
    await run_ready_tasks()
    aborted = ask(router, "gone")
    await run_ready_tasks()
    await router.abort("gone")
    assert (await aborted).finish_reason is FinishReason.ABORT
    assert not waiting_task.done()
    router.add("engine-0", engine(5))
    assert (await waiting_task).token_ids == (5,) * 4
    router.remove("engine-0")
    waiting = ask(router, "w")
    await run_ready_tasks()
    router.fail("engine-0 died for good")
    for last in (waiting, ask(router, "later")):
        with pytest.raises(SamplerError, match="died for good"):
            await last


@in_loop
async def test_a_request_that_cannot_reach_its_engine_goes_elsewhere_and_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.inference.fleet.router._RETRY_DELAY_S", 0.0)

    def unreachable(request: RecordedRequest) -> Exception:
        return EngineLostError("connection refused")

    lost: list[str] = []
    router = routed(ScriptedSampler(unreachable))
    router.on_lost = lost.append
    with pytest.raises(SamplerError, match=r"lost 3 engines.*connection refused"):
        await ask(router, "s")
    assert lost == ["engine-0"] * 3
    router.on_lost = router.remove
    waiting_task = ask(router, "s")
    await run_ready_tasks()
    router.add("engine-1", engine(1))
    assert (await waiting_task).token_ids == (1,) * 4


@in_loop
async def test_what_an_engine_refuses_is_refused() -> None:
    def refuse(request: RecordedRequest) -> Exception:
        return SamplerError("the input is too long")

    other_engine = engine(1)
    router = routed(ScriptedSampler(refuse))
    with pytest.raises(SamplerError, match="too long"):
        await ask(router, "s")
    router.add("engine-1", other_engine)
    await ask(router, "t")
    assert router.counts["prompt"] == 1


@in_loop
async def test_abort_reaches_the_engine_and_cancelling_gives_the_place_back() -> None:
    gate = asyncio.Event()
    only = engine(0, gate)
    router = routed(only, max_running=1)
    running, waiting = ask(router, "a"), ask(router, "b")
    await until(lambda: only.running == 1)
    await router.abort("a")
    half = await running
    assert (half.token_ids, half.finish_reason) == ((0, 0), FinishReason.ABORT)
    await until(lambda: only.running == 1)
    queued = ask(router, "c")
    await run_ready_tasks()
    queued.cancel()
    waiting.cancel()
    await asyncio.gather(queued, waiting, return_exceptions=True)
    gate.set()
    assert (await ask(router, "d")).finish_reason is FinishReason.STOP
    await router.abort("unknown")
