"""The HTTP server of the engine: SGLang's endpoints with their field names and replies."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.background import first_ended
from agentrl.distributed.sglang_loader import LOADER
from agentrl.inference.embedded.replies import BadRequestError, Body, bad_request, json_reply, parse_body, with_body
from agentrl.inference.embedded.request import parse_generate
from agentrl.inference.embedded.scheduler import MEMORY_PARTS, Scheduler
from agentrl.inference.embedded.weight_endpoints import WeightEndpoints


def build_app(scheduler: Scheduler, on_failure: Callable[[BaseException], None]) -> Starlette:
    """Return the ASGI application; ``on_failure`` is called with the error that ends the engine's loop."""
    endpoints = _Endpoints(scheduler)

    def report_failure(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            on_failure(error)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(scheduler.run(), name="engine")
        endpoints.engine = task
        task.add_done_callback(report_failure)
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return Starlette(routes=[*endpoints.routes(), *WeightEndpoints(scheduler).routes()], lifespan=lifespan)


class _Endpoints:
    """Generation and aborts, health and information, the prefix cache, pauses, and memory release."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.engine: asyncio.Task[None] | None = None
        """The scheduler's loop, once it runs."""

    def routes(self) -> list[Route]:
        posts = {
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
            "/module_outputs": self.module_outputs,
        }
        return [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/health", self.health),
            Route("/model_info", self.model_info),
            Route("/server_info", self.server_info),
            Route("/v1/loads", self.loads),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            *(Route(path, with_body(handler), methods=["POST"]) for path, handler in posts.items()),
        ]

    async def generate(self, http: HttpRequest) -> Response:
        """Sample; the reply is sent when all prompts of the body have ended, which they do if the client disconnects."""
        try:
            inputs, batch = parse_generate(parse_body(await http.body()))
            requests = [self._scheduler.submit(generate_input) for generate_input in inputs]
        except BadRequestError as error:
            return bad_request(error)
        try:
            async with first_ended(asyncio.wait([request.done for request in requests]), _disconnected(http)) as tasks:
                if tasks[1].done():
                    self._scheduler.abort(set(requests).__contains__, "The client disconnected")
            for request in requests:
                request.done.result()
        except RuntimeError as error:
            return json_reply({"error": {"message": str(error)}}, 500)
        replies = [self._scheduler.reply(request) for request in requests]
        return json_reply(replies if batch else replies[0])

    async def abort_request(self, body: Body) -> Response:
        """End the request ``rid``, or all with ``abort_all``."""
        rid, abort_all = body.get("rid"), bool(body.get("abort_all"))
        if not rid and not abort_all:
            raise BadRequestError("abort_request needs a rid, or abort_all=true")
        self._scheduler.abort(lambda request: abort_all or request.input.rid == rid)
        return Response()

    @property
    def _alive(self) -> bool:
        return self.engine is not None and not self.engine.done()

    async def health(self, http: HttpRequest) -> Response:
        return Response(status_code=200 if self._alive else 503)

    async def model_info(self, http: HttpRequest) -> Response:
        model = self._scheduler.model
        return json_reply(
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
        """Return facts, also that a weight update takes effect as a whole.

        503 if the engine's loop does not run: SGLang's scheduler would not answer either.
        """
        if not self._alive:
            return Response(status_code=503)
        model = self._scheduler.model
        info = {"tp_size": 1, "device": "cpu", "dtype": model.dtype, "whole_updates": True}
        return json_reply(info | {"max_req_input_len": model.context, "custom_weight_loader": [LOADER]})

    async def loads(self, http: HttpRequest) -> Response:
        running, waiting, slots = self._scheduler.load()
        load = {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": running / slots}
        return json_reply({"loads": [load]})

    async def flush_cache(self, http: HttpRequest) -> Response:
        self._scheduler.flush()
        return Response("Cache flushed.\n")

    async def pause_generation(self, body: Body) -> Response:
        self._scheduler.pause(body.get("mode", "abort"))
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: Body) -> Response:
        self._scheduler.resume()
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def release_memory(self, body: Body) -> Response:
        await self._scheduler.release_memory(body.get("tags") or MEMORY_PARTS)
        return Response()

    async def resume_memory(self, body: Body) -> Response:
        self._scheduler.resume_memory(body.get("tags") or MEMORY_PARTS)
        return Response()

    async def module_outputs(self, body: Body) -> Response:
        """Return the outputs of decoder layers and their parts for the last of the ``input_ids``, float32 in base64. SGLang has
        no such endpoint.
        """
        token_ids = body.get("input_ids")
        outputs = await self._scheduler.module_outputs(token_ids if isinstance(token_ids, list) else [])
        encoded = {name: base64.b64encode(output.tobytes()).decode("ascii") for name, output in outputs.items()}
        return json_reply({"outputs": encoded})


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
