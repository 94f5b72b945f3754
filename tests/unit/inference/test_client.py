"""The client against a scripted SGLang: what differs between its versions, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import uvicorn
from deadlines import run_ready_tasks, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError, EngineError, SamplerError
from agentrl.core.sampler import Sampler
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.inference.base import EngineControl
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.fleet.mirror import MirroredEngine
from agentrl.inference.launch.launcher import EngineSpec, LocalLauncher

T = TypeVar("T")
VOCABULARY = Vocabulary(100, lambda ids: "".join(chr(97 + token) for token in ids))


@dataclass
class FakeSGLang:
    """Answers each generation with ids 7 and 8 when ``release`` is set, and remembers what it was asked."""

    brackets: bool = True
    exact: bool = False
    version: str = "default"
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    open_window: bool = False
    junk: bool = False
    """Its control replies are not JSON, though they claim to be."""
    busy: int = 0
    """How often it refuses to drop its cache."""
    url: str = ""
    dtype: str = "auto"
    """As it reports it."""
    info: dict[str, Any] = field(default_factory=dict)
    """Further answers of ``/server_info``."""
    verified: list[int] = field(default_factory=list)
    """Forward passes with drafts of the next requests."""

    async def answer(self, http: Request) -> Response:
        path = http.url.path
        body = json.loads(await http.body() or b"{}")
        self.calls.append((path, body))
        if path == "/generate":
            return await self.generate(body)
        if self.junk:
            return Response(b'{"success": tr', media_type="application/json")
        if path.endswith("_weight_update"):
            if not self.brackets:
                return JSONResponse({"detail": "Not Found"}, 404)
            self.open_window = path.startswith("/begin")
        if path == "/update_weights_from_tensor":
            if self.brackets and not self.open_window:
                return JSONResponse({"success": False, "message": "begin first"}, 400)
            self.version = body.get("weight_version", self.version)
        if path == "/flush_cache" and self.busy:
            self.busy -= 1
            return JSONResponse({"success": False, "message": "requests are running"}, 400)
        if path == "/server_info":
            return JSONResponse({"max_req_input_len": 506, "dtype": self.dtype} | self.info)
        if path == "/model_info":
            return JSONResponse({"weight_version": self.version})
        if path == "/abort_request":
            self.finishes = self.finishes or ["abort"]
            self.held.set()
        return JSONResponse({"success": True})

    async def generate(self, body: dict[str, Any]) -> Response:
        await until(self.held.is_set)
        finish = self.finishes.pop(0) if self.finishes else "length"
        if finish == "error":
            return JSONResponse({"error": {"message": "the input is too long"}}, 400)
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]],
            "cached_tokens": 1,
            "weight_version": self.version,
        }
        if self.verified:
            meta["spec_verify_ct"] = self.verified.pop(0)
        if self.exact:
            meta["weight_versions"] = [{"version": "0", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
        return JSONResponse({"text": "ab", "output_ids": [7, 8], "meta_info": meta})

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def drive(self, play: Callable[[SGLangClient], Awaitable[T]]) -> T:
        async def session() -> T:
            client = SGLangClient(self.url, timeout_s=20, vocabulary=VOCABULARY)
            try:
                return await play(client)
            finally:
                await client.aclose()

        return asyncio.run(session())


@pytest.fixture
def fake() -> Iterator[FakeSGLang]:
    state = FakeSGLang()
    state.held.set()
    app = Starlette(routes=[Route("/{path:path}", state.answer, methods=["GET", "POST"])])
    with socket.socket() as tracker:
        tracker.bind(("127.0.0.1", 0))
        state.url = f"http://127.0.0.1:{tracker.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([tracker],))
        thread.start()
        while not server.started:
            assert thread.is_alive()
        yield state
        state.held.set()
        server.should_exit = True
        thread.join()


async def sample(client: Sampler, count: int = 4, name: str = "r") -> Any:
    params = SamplingParams(max_new_tokens=count, stop=("</a>",), stop_token_ids=(3,), seed=9)
    return await client.generate(Prompt((1, 2)), params, session_id="s", request_id=name)


def test_what_is_asked_of_sglang(fake: FakeSGLang) -> None:
    generation = fake.drive(sample)
    assert (generation.token_ids, generation.logprobs, generation.versions) == ((7, 8), (-0.5, -1.0), ((0, 0),))
    assert (generation.cached_tokens, generation.request_id) == (1, "r")
    assert fake.calls == [
        (
            "/generate",
            {
                "input_ids": [1, 2],
                "return_logprob": True,
                "rid": "r:0",
                "sampling_params": {
                    "max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "no_stop_trim": True,
                    "skip_special_tokens": False, "stop": ["</a>"], "stop_token_ids": [3], "sampling_seed": 9,
                },
            },
        )
    ]  # fmt: skip


@pytest.mark.parametrize("brackets", [True, False])
def test_tensor_updates_of_new_and_old_versions(fake: FakeSGLang, brackets: bool) -> None:
    fake.brackets = brackets

    async def play(client: SGLangClient) -> int:
        for version in (3, 4):
            await client.updates.from_tensors([("a", torch.ones(2))], version, last=False)
            await client.updates.from_tensors([("b", torch.ones(2))], version, last=True)
        return await client.version()

    assert fake.drive(play) == 4
    update = ["/update_weights_from_tensor"] * 2
    new = ["/flush_cache", "/begin_weight_update", *update, "/end_weight_update"]
    old = [*new[:4], "/flush_cache", *update]
    assert fake.paths()[:-1] == ["/server_info", *(new * 2 if brackets else old)]
    versions = [body.get("weight_version") for path, body in fake.calls if path == update[0]]
    assert versions == [None, "3", None, "4"], "the version changes with the last bucket"
    for path, body in fake.calls:
        if path in (update[0], "/begin_weight_update"):
            assert body["selector"] == "target", "the draft of speculative decoding keeps its weights"
            assert path != update[0] or body["disable_draft_model"], "the same for SGLang before 0.5.23"


@pytest.mark.parametrize("transport", ["tensors", "disk"])
def test_weights_wait_for_requests_whose_callers_have_gone(fake: FakeSGLang, transport: str) -> None:
    """SGLang runs those for a while, and refuses to drop its cache meanwhile; a paused one is not asked."""
    fake.busy = 2

    async def play(client: SGLangClient) -> None:
        for _ in range(2):
            if transport == "disk":
                await client.updates.from_disk(Path("/somewhere"), 3)
            else:
                await client.updates.from_tensors([("a", torch.ones(2))], 3, last=True)
            await client.pause("retract")

    fake.drive(play)
    update = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    update = ["/update_weights_from_disk"] if transport == "disk" else update
    loaders = [] if transport == "disk" else ["/server_info"]
    assert fake.paths() == [*loaders, *["/flush_cache"] * 3, *update, "/pause_generation", *update, "/pause_generation"]


def test_the_cache_is_dropped_once_nothing_runs_and_never_of_a_paused_engine(fake: FakeSGLang) -> None:
    """SGLang may not have taken note yet that what it has answered has ended."""
    fake.busy = 2

    async def play(client: SGLangClient) -> None:
        await client.flush()
        await client.pause("retract")
        with pytest.raises(EngineError, match="is paused"):
            await client.flush()

    fake.drive(play)
    assert fake.paths() == [*["/flush_cache"] * 3, "/pause_generation"]


def test_a_pause_with_abort_goes_on_with_a_second_request(fake: FakeSGLang) -> None:
    fake.held.clear()
    fake.finishes = ["abort", "length"]

    async def play(client: SGLangClient) -> Any:
        task = asyncio.create_task(sample(client))
        await until(lambda: bool(fake.calls))
        await client.pause("abort")
        fake.held.set()
        await client.updates.from_tensors([("a", torch.ones(2))], 5, last=True)
        await until(lambda: client.unanswered == 0)
        await run_ready_tasks()
        assert not task.done()
        await client.resume()
        return await task

    generation = fake.drive(play)
    assert generation.token_ids == (7, 8, 7, 8)
    assert generation.finish_reason is FinishReason.LENGTH
    second = [body for path, body in fake.calls if path == "/generate"][1]
    assert (second["input_ids"], second["rid"]) == ([1, 2, 7, 8], "r:1")
    assert second["sampling_params"]["max_new_tokens"] == 2


def test_a_pause_with_restart_samples_the_turn_again(fake: FakeSGLang) -> None:
    fake.held.clear()
    fake.finishes = ["abort", "length"]

    async def play(client: SGLangClient) -> Any:
        task = asyncio.create_task(sample(client))
        await until(lambda: bool(fake.calls))
        await client.pause("restart")
        fake.held.set()
        await client.updates.from_tensors([("a", torch.ones(2))], 5, last=True)
        await client.resume()
        generation = await task
        assert client.discarded_tokens == 2
        return generation

    generation = fake.drive(play)
    assert (generation.token_ids, generation.versions) == ((7, 8), ((0, 5),))
    assert [body["mode"] for path, body in fake.calls if path == "/pause_generation"] == ["abort"]
    first, second = [body for path, body in fake.calls if path == "/generate"]
    assert second == first | {"rid": "r:1"}


@pytest.mark.parametrize("exact", [True, False])
def test_a_turn_of_two_versions_is_exact_or_an_error(fake: FakeSGLang, exact: bool) -> None:
    fake.held.clear()
    fake.exact = exact

    async def play(client: SGLangClient) -> Any:
        task = asyncio.create_task(sample(client))
        await until(lambda: bool(fake.calls))
        await client.pause("retract")
        await client.updates.from_tensors([("a", torch.ones(2))], 5, last=True)
        await client.resume()
        fake.held.set()
        return await task

    if exact:
        assert fake.drive(play).versions == ((0, 0), (1, 5))
    else:
        with pytest.raises(SamplerError, match="mode='abort'"):
            fake.drive(play)


def test_an_engine_that_aborts_unasked_has_failed(fake: FakeSGLang) -> None:
    fake.finishes = ["abort"]
    with pytest.raises(SamplerError, match="aborted request r, and no client requested that"):
        fake.drive(sample)


def test_a_pause_after_the_last_token_ends_the_turn(fake: FakeSGLang) -> None:
    """Both tokens that were requested have come: no second request for none."""
    fake.held.clear()
    fake.finishes = ["abort"]

    async def play(client: SGLangClient) -> Any:
        task = asyncio.create_task(sample(client, count=2))
        await until(lambda: bool(fake.calls))
        await client.pause("abort")
        fake.held.set()
        return await task

    generation = fake.drive(play)
    assert (generation.token_ids, generation.finish_reason) == ((7, 8), FinishReason.LENGTH)
    assert fake.paths().count("/generate") == 1


@pytest.mark.parametrize("mode", ["abort", "restart"])
def test_a_pause_that_cuts_requests_ends_them_first(fake: FakeSGLang, mode: str) -> None:
    """SGLang looks only once a second whether what its pause has aborted has ended."""
    fake.held.clear()
    fake.finishes = ["abort"] * 3

    async def play(client: SGLangClient) -> None:
        tasks = [asyncio.create_task(sample(client, name=f"r{number}")) for number in range(3)]
        await until(lambda: len(fake.calls) == 3)
        await client.pause(mode)
        assert client.unanswered == 0
        assert not any(task.done() for task in tasks)
        await client.resume()
        await asyncio.gather(*tasks)

    fake.drive(play)
    first = fake.paths().index("/abort_request")
    assert (fake.paths()[:3], first) == (["/generate"] * 3, 3)
    assert fake.calls[first][1] == {"rid": "", "abort_all": True}
    assert fake.paths()[-4:] == ["/continue_generation", *["/generate"] * 3]


def test_a_pause_does_not_wait_for_ever_for_what_it_has_cut(fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.inference.client.sglang_client._CUT_S", 0.05)

    async def play(client: SGLangClient) -> None:
        client.unanswered = 1  # a reply that does not come
        await client.pause("abort")

    fake.drive(play)
    assert fake.paths()[-1] == "/pause_generation"


def test_a_control_reply_that_is_not_json_is_the_engines_failure(fake: FakeSGLang) -> None:
    fake.junk = True
    for call in ("version", "checksums", "max_tokens", "dtype", "pause"):
        with pytest.raises(EngineError):
            fake.drive(lambda client, call=call: getattr(client, call)())  # type: ignore[misc]


def test_an_abort_while_the_engine_is_paused_comes_back_at_once(fake: FakeSGLang) -> None:
    async def play(client: SGLangClient) -> Any:
        await client.pause("abort")
        task = asyncio.create_task(sample(client))
        await run_ready_tasks()
        await client.abort("r")
        return await task

    generation = fake.drive(play)
    assert (generation.token_ids, generation.finish_reason) == ((), FinishReason.ABORT)
    assert "/generate" not in fake.paths()


def test_a_refusal_has_the_engines_words(fake: FakeSGLang) -> None:
    fake.finishes = ["error"]
    with pytest.raises(SamplerError, match="400: the input is too long"):
        fake.drive(sample)
    fake.brackets = True
    fake.version = "somebody's"
    with pytest.raises(EngineError, match="somebody's"):
        fake.drive(lambda client: client.version())


def test_weights_of_another_run_are_refused_even_if_their_version_is_the_same(fake: FakeSGLang) -> None:
    """Two runs with one ``sampler.url`` overwrote each other's weights, and trained on each other's samples."""

    async def play(owner: str) -> None:
        clients = first, second = [SGLangClient(fake.url, vocabulary=VOCABULARY) for _ in range(2)]
        first.updates.owner, second.updates.owner = owner, "other"
        try:
            await first.updates.from_tensors([("a", torch.ones(2))], 3, last=True)
            assert (await sample(first)).versions == ((0, 3),)
            mirrored = MirroredEngine(first.state(), 20, VOCABULARY)
            await second.updates.from_tensors([("a", torch.zeros(2))], 3, last=True)
            words = rf"{fake.url} has weights that this run did not send \(weight_version '3-other'\).*another run"
            for generate in (sample(first), sample(mirrored), first.version()):
                with pytest.raises(EngineError, match=words):
                    await generate
            assert (await sample(second)).versions == ((0, 3),)
            await mirrored.aclose()
        finally:
            for client in clients:
                await client.aclose()

    asyncio.run(play("mine"))


def test_an_attached_engine_that_was_restarted_gets_the_weights_again(fake: FakeSGLang, tmp_path: Path) -> None:
    """It answers again before any check of its health: its first weights sampled as version 0."""
    config = load_config(None, [f"sampler.url={fake.url}", "sampler.backend=sglang", "sampler.health_interval_s=0.05"])
    launcher = LocalLauncher(EngineSpec(config.sampler, tmp_path, tmp_path, 0))

    async def sync(engine: EngineControl) -> int:
        await engine.updates.from_tensors([("a", torch.ones(2))], 5, last=True)
        return 5

    async def play() -> Generation:
        fleet = Fleet(config.sampler, launcher, tmp_path, vocabulary=VOCABULARY, max_tokens=8)
        try:
            await fleet.start()
            fleet.set_weight_sync(sync)
            await sync(fleet.live[0])
            fake.version = "default"
            return await sample(fleet.sampler)
        finally:
            await fleet.aclose()

    assert asyncio.run(play()).versions == ((0, 5),)


def test_an_engine_that_holds_less_than_an_episode_is_refused_at_the_start(fake: FakeSGLang, tmp_path: Path) -> None:
    """SGLang would refuse the longest episodes, or shorten them."""
    config = load_config(None, [f"sampler.url={fake.url}", "sampler.backend=sglang"])
    launcher = LocalLauncher(EngineSpec(config.sampler, tmp_path, tmp_path, 0))

    async def start(max_tokens: int) -> None:
        fleet = Fleet(config.sampler, launcher, tmp_path, vocabulary=VOCABULARY, max_tokens=max_tokens)
        try:
            await fleet.start()
        finally:
            await fleet.aclose()

    asyncio.run(start(506))
    with pytest.raises(ConfigError, match=r"rollout\.max_tokens=507.*at most 506 tokens.*context_length"):
        asyncio.run(start(507))


def test_the_accept_length_is_that_of_the_requests_since_the_last_report(fake: FakeSGLang, tmp_path: Path) -> None:
    """Two tokens a request: one forward pass accepted both in the first, two did in the second; the third had no drafts."""
    fake.verified, fake.dtype = [1, 2], "bfloat16"
    config = load_config(None, [f"sampler.url={fake.url}", "sampler.backend=sglang"])

    async def play() -> list[float | None]:
        launcher = LocalLauncher(EngineSpec(config.sampler, tmp_path, tmp_path, 0))
        fleet = Fleet(config.sampler, launcher, tmp_path, vocabulary=VOCABULARY, max_tokens=8)
        try:
            await fleet.start()
            lengths = []
            for number in range(3):
                params = SamplingParams(max_new_tokens=4)
                await fleet.sampler.generate(Prompt((1, 2)), params, session_id="s", request_id=f"r{number}")
                lengths.append(fleet.metrics().get("rollout/accept_length"))
            return lengths
        finally:
            await fleet.aclose()

    assert asyncio.run(play()) == [2.0, 1.0, None]


@pytest.mark.parametrize(
    ("name", "accepted", "value"),
    [
        ("speculative_accept_threshold_single", 1.0, 0.9),
        ("preferred_sampling_params", None, {"repetition_penalty": 1.05}),
        ("allow_auto_truncate", False, True),
        ("tokenizer_worker_num", 1, 2),
    ],
)
def test_an_engine_whose_replies_are_not_the_policys_is_refused(
    fake: FakeSGLang, name: str, accepted: object, value: object
) -> None:
    fake.info = {name: accepted}
    assert fake.drive(lambda client: client.dtype()) is None
    fake.info[name] = value
    text = re.escape(f"{name}={value}: ") + ".*" + re.escape(f"start it without --{name.replace('_', '-')}")
    with pytest.raises(ConfigError, match=text):
        fake.drive(lambda client: client.dtype())


@pytest.mark.parametrize(
    ("reported", "dtype"), [("bfloat16", "bfloat16"), ("half", "float16"), ("float", "float32"), ("auto", None)]
)
def test_an_engine_reports_the_dtype_of_its_weights(fake: FakeSGLang, reported: str, dtype: str | None) -> None:
    fake.dtype = reported
    assert fake.drive(lambda client: client.dtype()) == dtype


def test_an_engine_with_quantised_weights_is_refused(fake: FakeSGLang, tmp_path: Path) -> None:
    """By what it reports, or by the folder that it has loaded."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    for info in (
        {"quantization": "fp8"},
        {"torchao_config": "int8wo"},
        {"quantization": None, "model_path": str(tmp_path)},
    ):
        fake.info = info
        with pytest.raises(ConfigError, match=rf"engine at {fake.url} has quantised weights"):
            fake.drive(lambda client: client.dtype())
    (tmp_path / "config.json").write_text("{}")
    assert fake.drive(lambda client: client.dtype()) is None


def test_an_engine_with_float8_blocks_takes_float8(fake: FakeSGLang, tmp_path: Path) -> None:
    """By its folder, or by what replaces the folder's configuration; or it quantises what it gets."""
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(blocks))
    none = json.dumps({"quantization_config": None})
    for info, dtype in (
        ({"model_path": str(tmp_path)}, "float8_e4m3fn"),
        ({"model_path": str(tmp_path), "quantization": "fp8"}, "float8_e4m3fn"),
        ({"model_path": str(tmp_path), "json_model_override_args": none}, None),
        ({"model_path": "a/b", "json_model_override_args": json.dumps(blocks)}, "float8_e4m3fn"),
        ({"model_path": str(tmp_path), "quantization": None, "torchao_config": ""}, "float8_e4m3fn"),
        ({"model_path": "a/b", "quantization": "fp8", "load_format": "flash_rl"}, None),
    ):
        fake.info = dict(info)
        assert fake.drive(lambda client: client.dtype()) == dtype


class TogetherReplying:
    """HTTP to an engine that answers all requests at the same time."""

    url = "http://engine"

    def __init__(self) -> None:
        self.answered = asyncio.Event()

    async def generate(self, body: dict[str, Any], *, key: str) -> bytes:
        await self.answered.wait()
        meta = {"id": body["rid"], "finish_reason": {"type": "length"}, "prompt_tokens": 1, "completion_tokens": 1}
        reply = {"output_ids": [7], "meta_info": {**meta, "output_token_logprobs": [[-1.0, 7, None]]}}
        return json.dumps(reply).encode()


def test_an_episode_goes_on_before_the_replies_of_others_are_read() -> None:
    """Twenty replies at the same time: the first lead to requests, two iterations of the loop later, before the last are read."""
    events: list[str] = []

    async def run() -> None:
        client = SGLangClient("http://engine")
        http: Any = TogetherReplying()
        client._http = http

        async def play(number: int) -> None:
            await client.generate(Prompt((1,)), SamplingParams(), session_id="s", request_id=f"r{number}")
            events.append(f"read {number}")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            events.append(f"request {number}")

        tasks = [asyncio.create_task(play(number)) for number in range(20)]
        await run_ready_tasks()
        http.answered.set()
        await asyncio.sleep(0)
        tasks[5].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert [event for event in events if event.startswith("read")] == [f"read {n}" for n in range(20) if n != 5]
    assert events.index("request 0") < events.index("read 13")
    assert len(events) == 2 * 19


def test_a_pause_does_not_concern_a_reply_that_waits_to_be_read() -> None:
    """The engine kept none of these requests, so that new weights sampled no token of them."""

    async def run() -> list[Any]:
        client = SGLangClient("http://engine")
        http: Any = TogetherReplying()
        client._http = http
        tasks = [
            asyncio.create_task(
                client.generate(Prompt((1,)), SamplingParams(), session_id="s", request_id=f"r{number}")
            )
            for number in range(20)
        ]
        await run_ready_tasks()
        client.note_pause("in_place")
        assert client.keeps_requests
        http.answered.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not all(task.done() for task in tasks)
        client.note_pause("in_place")
        assert not client.keeps_requests
        client.note_update()
        return await asyncio.gather(*tasks)

    assert [reply.token_ids for reply in asyncio.run(run())] == [(7,)] * 20


def test_two_turns_of_one_id_are_a_mistake(fake: FakeSGLang) -> None:
    async def play(client: SGLangClient) -> Any:
        return await asyncio.gather(sample(client), sample(client), return_exceptions=True)

    results = fake.drive(play)
    assert isinstance(results[1], SamplerError)
    assert results[0].token_ids == (7, 8)


def test_a_connection_that_breaks_is_tried_again_under_the_same_id() -> None:
    """The server hangs up on the first two requests and answers the third."""
    bodies: list[bytes] = []
    meta = {
        "id": "r:0",
        "finish_reason": {"type": "length"},
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None]],
        "weight_version": "2",
    }
    reply = json.dumps({"output_ids": [7], "meta_info": meta}).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        bodies.append(await reader.readexactly(length))
        if len(bodies) > 2:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(reply)
            )
            writer.write(reply)
            await writer.drain()
        writer.close()

    async def play() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = SGLangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            try:
                return await sample(client)
            finally:
                await client.aclose()

    assert asyncio.run(play()).token_ids == (7,)
    assert len(bodies) == 3
    assert len(set(bodies)) == 1


def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.inference.client.http._BACKOFF_S", 0.001)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))

        async def play() -> None:
            client = SGLangClient(f"http://127.0.0.1:{taken.getsockname()[1]}")
            try:
                assert not await client.healthy()
                with pytest.raises(SamplerError, match="does not answer: ClientConnectorError"):
                    await sample(client)
                with pytest.raises(EngineError, match="does not answer /model_info"):
                    await client.version()
            finally:
                await client.aclose()

        asyncio.run(play())


class LeftOrStopped:
    """The process of an engine that is kept: remembers what its run did at the end."""

    log = start_details = ""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ends: list[str] = []

    def launch(self, _: int) -> LeftOrStopped:
        return self

    def check(self) -> None: ...

    def log_tail(self, lines: int = 20) -> str:
        return ""

    def release(self) -> None:
        self.ends.append("left")

    def stop(self) -> None:
        self.ends.append("stopped")

    def kill(self) -> None: ...


@pytest.mark.parametrize("state", ["whole", "paused", "without memory", "lost", "busy"])
def test_a_kept_engine_is_left_to_the_next_run_only_if_it_is_whole_and_idle(
    fake: FakeSGLang, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.inference.fleet.fleet._IDLE_S", 0.2)
    config = load_config(None, ["sampler.backend=sglang", "sampler.keep_minutes=1"])
    process = LeftOrStopped(fake.url)

    async def run() -> None:
        fleet = Fleet(config.sampler, process, tmp_path, vocabulary=VOCABULARY, max_tokens=9)
        await fleet.start()
        [engine] = fleet.live
        if state == "paused":
            await engine.pause()
        elif state == "without memory":
            await engine.memory.release()
        elif state == "lost":
            fleet._engines[0].live = False
        elif state == "busy":
            fake.busy = 10**6
        await fleet.aclose()

    asyncio.run(run())
    assert process.ends == (["left"] if state == "whole" else ["stopped"])
    assert state != "whole" or fake.paths()[-1] == "/flush_cache", "nothing of its cache is used with other weights"


@pytest.mark.parametrize(("cache", "flushes"), [("drop", False), ("by_version", True), ("keep", True)])
def test_a_running_engine_forgets_what_an_earlier_run_has_computed(
    fake: FakeSGLang, cache: str, flushes: bool, tmp_path: Path
) -> None:
    """Versions begin at 0 again. With ``drop`` the first sync empties the cache."""
    config = load_config(None, [f"sampler.url={fake.url}", "sampler.backend=sglang"])
    launcher = LeftOrStopped(fake.url)

    async def run() -> None:
        fleet = Fleet(config.sampler, launcher, tmp_path, vocabulary=VOCABULARY, max_tokens=9, prefix_cache=cache)
        await fleet.start()
        await fleet.aclose()

    asyncio.run(run())
    assert ("/flush_cache" in fake.paths()) == flushes
