"""The bare client requests what both loops request: seen by a server that answers all of them."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from deadlines import wait_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.config.load import load_config
from agentrl.core.errors import EngineError
from agentrl.models.load import load_tokenizer
from agentrl.models.resolve import resolve_model
from benchmarks.efficiency import EfficiencyBench, Pass, efficiency, make_jobs, measure_efficiency

BENCH = EfficiencyBench(
    size="tiny", episodes=19, concurrency=9, turns=2, new_tokens=9, prompt_tokens=40, observation_tokens=20, repeats=2
)


class Server:
    """Samples ids that follow from the prompt's length, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = [[]]
        """By what came between two flushes of the cache."""
        self.short = False
        self.running = self.most = 0

    async def answer(self, request: Request) -> Response:
        if request.url.path == "/flush_cache":
            self.asked.append([])
        if request.url.path != "/generate":
            return JSONResponse({"success": True, "max_req_input_len": 100_000})
        body = await request.json()
        self.asked[-1].append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.005)
        self.running -= 1
        count = body["sampling_params"]["max_new_tokens"] - self.short
        ids = [(len(body["input_ids"]) + number) % 1000 + 500 for number in range(count)]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "length"},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": count,
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        }
        return JSONResponse({"output_ids": ids, "meta_info": {**meta, "weight_version": "0"}})


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    state = Server()
    app = Starlette(routes=[Route("/{path:path}", state.answer, methods=["GET", "POST"])])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=running.run, args=([listener],))
        thread.start()
        wait_until(lambda: running.started or not thread.is_alive())
        assert running.started
        yield state, f"http://127.0.0.1:{listener.getsockname()[1]}"
        running.should_exit = True
        thread.join()


def measure(url: str) -> list[Pass]:
    config = load_config(None, [f"sampler.url={url}", "sampler.backend=sglang"])

    async def run() -> list[Pass]:
        return [run_pass async for run_pass in measure_efficiency(config, BENCH, lambda text: None)]

    return asyncio.run(run())


def test_all_ask_the_same_at_the_same_concurrency(server: tuple[Server, str]) -> None:
    state, url = server
    passes = measure(url)
    order = ["synchronous", "bare client", "asynchronous"]
    assert [run_pass.who for run_pass in passes] == [*order, *order[::-1]]
    assert {run_pass.tokens for run_pass in passes} == {19 * 2 * 9}
    assert state.most == BENCH.concurrency
    warm, *measured = state.asked
    assert len(warm) == 2 * 19 * 2
    sent_requests = [
        sorted((body["input_ids"], body["sampling_params"]) for body in run_pass) for run_pass in ([], *measured)
    ][1:]
    assert all(run_pass == sent_requests[0] for run_pass in sent_requests)
    assert {body["sampling_params"]["ignore_eos"] for body in measured[0]} == {True}
    assert {body["return_logprob"] for run_pass in measured for body in run_pass} == {True}
    lengths = sorted(len(body["input_ids"]) for body in measured[0])
    assert lengths[-1] > lengths[0] + 2 * 9  # later turns hold what was sampled, and observations


def test_an_engine_that_samples_less_is_no_measurement(server: tuple[Server, str]) -> None:
    server[0].short = True
    with pytest.raises(
        EngineError, match=r"the synchronous pass received 304 tokens from the engine, and requested 342"
    ):
        measure(server[1])


def test_the_ratio_is_that_of_the_medians() -> None:
    passes = [Pass("asynchronous", seconds, 100, 1.0) for seconds in (1.0, 2.0, 50.0)]
    passes += [Pass("bare client", seconds, 100, 1.0) for seconds in (0.1, 1.0, 1.5)]
    assert efficiency(passes, "asynchronous") == 0.5


def test_texts_are_as_long_as_asked_and_none_is_another() -> None:
    source: Path = resolve_model("multihop-warm")
    jobs = make_jobs(source, BENCH, seed=1)
    texts = [job.task.prompt[0].content for job in jobs]
    texts += [text for job in jobs for text in job.task.metadata["observations"]]
    assert len(set(texts)) == 19 + 19 * 2
    tokenizer: Any = load_tokenizer(source)
    assert all(30 <= len(tokenizer.encode(text)) <= 50 for text in texts[:19])
    assert all(14 <= len(tokenizer.encode(text)) <= 26 for text in texts[19:])
