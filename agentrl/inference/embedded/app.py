"""The HTTP side of the engine: SGLang's endpoints, their field names and their replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agentrl.inference.embedded.errors import BadRequestError
from agentrl.inference.embedded.request import Request, parse_generate
from agentrl.inference.embedded.scheduler import MEMORY_PARTS, Scheduler
from agentrl.inference.embedded.weight_staging import Incoming
from agentrl.inference.embedded.weights import read_named_tensors

Body = dict[str, Any]


def build_app(scheduler: Scheduler, on_failure: Callable[[BaseException], None]) -> Starlette:
    """Return the ASGI application; ``on_failure`` takes the error that ends the engine's loop."""
    endpoints = Endpoints(scheduler)

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            on_failure(error)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(scheduler.run(), name="engine")
        endpoints.engine = task
        task.add_done_callback(ended)
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def post(path: str, handler: Callable[[Body], Awaitable[Response]]) -> Route:
        return Route(path, _with_body(handler), methods=["POST"])

    routes = [
        Route("/generate", endpoints.generate, methods=["POST"]),
        Route("/health", endpoints.health),
        Route("/model_info", endpoints.model_info),
        Route("/server_info", endpoints.server_info),
        Route("/flush_cache", endpoints.flush_cache, methods=["GET", "POST"]),
        post("/abort_request", endpoints.abort_request),
        post("/pause_generation", endpoints.pause_generation),
        post("/continue_generation", endpoints.continue_generation),
        post("/release_memory_occupation", endpoints.release_memory_occupation),
        post("/resume_memory_occupation", endpoints.resume_memory_occupation),
        post("/begin_weight_update", endpoints.begin_weight_update),
        post("/end_weight_update", endpoints.end_weight_update),
        post("/update_weights_from_tensor", endpoints.update_weights_from_tensor),
        post("/update_weights_from_disk", endpoints.update_weights_from_disk),
        post("/init_weights_update_group", endpoints.init_weights_update_group),
        post("/update_weights_from_distributed", endpoints.update_weights_from_distributed),
        post("/destroy_weights_update_group", endpoints.destroy_weights_update_group),
        post("/weights_checker", endpoints.weights_checker),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


class Endpoints:
    """The endpoints of one engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Serve ``scheduler``."""
        self._scheduler = scheduler
        self._incoming = Incoming(scheduler)
        self.engine: asyncio.Task[None] | None = None

    async def generate(self, http: HttpRequest) -> Response:
        """Sample; the answer comes when all prompts of the body have ended."""
        try:
            asked, batch = parse_generate(_parse(await http.body()))
            requests = [self._scheduler.submit(one) for one in asked]
        except BadRequestError as error:
            return _refused(error)
        try:
            await self._ended(http, requests)
        except RuntimeError as error:
            return _json({"error": {"message": str(error)}}, 500)
        replies = [self._scheduler.reply(request) for request in requests]
        return _json(replies if batch else replies[0])

    async def _ended(self, http: HttpRequest, requests: list[Request]) -> None:
        """Wait for the requests; where the caller hangs up first, abort them."""
        gone = asyncio.create_task(_hung_up(http))
        try:
            for request in requests:
                await asyncio.wait([request.done, gone], return_when=asyncio.FIRST_COMPLETED)
                if not request.done.done():
                    wanted = set(requests)
                    self._scheduler.abort(wanted.__contains__, "The caller hung up")
                request.done.result()
        finally:
            gone.cancel()

    async def health(self, http: HttpRequest) -> Response:
        """Answer 200 while the engine's loop runs."""
        return Response(status_code=200 if self._alive else 503)

    @property
    def _alive(self) -> bool:
        return self.engine is not None and not self.engine.done()

    async def model_info(self, http: HttpRequest) -> Response:
        """Tell of the model, and the version of its weights now."""
        model = self._scheduler.model
        return _json(
            {
                "model_path": str(model.folder),
                "tokenizer_path": str(model.folder),
                "is_generation": True,
                "weight_version": self._scheduler.version,
                "context_length": model.context,
                "vocab_size": model.vocabulary,
            }
        )

    async def server_info(self, http: HttpRequest) -> Response:
        """Tell how many processes the engine has, where it computes, and that its weights change all at once.

        As SGLang's, whose scheduler is asked for it, it answers while the engine's loop runs.
        """
        if not self._alive:
            return Response(status_code=503)
        return _json({"tp_size": 1, "device": "cpu", "whole_updates": True})

    async def flush_cache(self, http: HttpRequest) -> Response:
        """Drop the prefix cache."""
        self._scheduler.flush()
        return Response("Cache flushed.\n")

    async def abort_request(self, body: Body) -> Response:
        """End the request ``rid``, or all with ``abort_all``."""
        rid, everything = body.get("rid"), bool(body.get("abort_all"))
        if not rid and not everything:
            raise BadRequestError("abort_request wants a rid, or abort_all=true")
        self._scheduler.abort(lambda request: everything or request.rid == rid)
        return Response()

    async def pause_generation(self, body: Body) -> Response:
        """Stop computing; see `Scheduler.pause`."""
        self._scheduler.pause(body.get("mode", "abort"))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: Body) -> Response:
        """Go on computing."""
        self._scheduler.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def release_memory_occupation(self, body: Body) -> Response:
        """Give the memory of ``tags`` back, by default all."""
        await self._scheduler.release(body.get("tags") or MEMORY_PARTS)
        return Response()

    async def resume_memory_occupation(self, body: Body) -> Response:
        """Take the memory of ``tags`` again, by default all."""
        self._scheduler.take_back(body.get("tags") or MEMORY_PARTS)
        return Response()

    async def begin_weight_update(self, body: Body) -> Response:
        """Let nothing start until `end_weight_update`, and wait for what runs."""
        self._scheduler.begin_update()
        self._incoming.drop()
        await self._scheduler.drained()
        return _updated()

    async def end_weight_update(self, body: Body) -> Response:
        """Let requests start again."""
        self._incoming.drop()
        self._scheduler.end_update()
        return _updated()

    async def update_weights_from_tensor(self, body: Body) -> Response:
        """Take tensors, between begin and end or without (as SGLang before 0.5.23)."""
        if body.get("load_format") is not None:
            raise BadRequestError(f"load_format={body['load_format']!r}: not in the embedded engine")
        named = read_named_tensors(body.get("serialized_named_tensors") or [])
        await self._incoming.take(named, _version(body), last=body.get("flush_cache") is not False)
        return _updated()

    async def init_weights_update_group(self, body: Body) -> Response:
        """Join a group that weights are broadcast in."""
        await self._incoming.join(body)
        return _updated()

    async def update_weights_from_distributed(self, body: Body) -> Response:
        """Take tensors that rank 0 of a group broadcasts, as `update_weights_from_tensor` otherwise."""
        named = await self._incoming.receive(body)
        await self._incoming.take(named, _version(body), last=body.get("flush_cache") is not False)
        return _updated()

    async def destroy_weights_update_group(self, body: Body) -> Response:
        """Leave a group."""
        await self._incoming.leave(body.get("group_name"))
        return _updated()

    async def weights_checker(self, body: Body) -> Response:
        """Return a checksum of every weight."""
        if body.get("action", "checksum") != "checksum":
            raise BadRequestError(f"action={body['action']!r}: the embedded engine has checksum")
        checksums = await asyncio.to_thread(self._incoming.checksums)
        return _json({"success": True, "message": "Success.", "ranks": [{"checksums": checksums}]})

    async def update_weights_from_disk(self, body: Body) -> Response:
        """Take the weights of the folder ``model_path``."""
        folder = body.get("model_path")
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise BadRequestError(f"model_path={folder!r} is no folder")
        async with self._scheduler.update(_version(body)):
            self._scheduler.model.load_folder(Path(folder))
        return _updated()


def _with_body(handler: Callable[[Body], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(http: HttpRequest) -> Response:
        try:
            return await handler(_parse(await http.body()))
        except BadRequestError as error:
            return _refused(error)

    return endpoint


async def _hung_up(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _parse(data: bytes) -> Body:
    try:
        # orjson takes no NaN and no Infinity; neither does anything here.
        body = orjson.loads(data) if data else {}
    except json.JSONDecodeError as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def _version(body: Body) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def _updated() -> Response:
    return _json({"success": True, "message": "Success", "num_paused_requests": 0})


def _refused(error: BadRequestError) -> Response:
    body = {
        "success": False,
        "message": str(error),
        "error": {"message": str(error), "type": "BadRequest", "code": 400},
    }
    return _json(body, 400)
