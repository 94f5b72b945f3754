"""Endpoints of SGLang that report the engine's state and control generation and memory."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agentrl.distributed.sglang_loader import LOADER
from agentrl.inference.embedded.replies import Body, json_reply, with_body
from agentrl.inference.embedded.scheduler import MEMORY_PARTS, Scheduler


class ControlEndpoints:
    """Health and information, the prefix cache, pauses, and memory release."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Control ``scheduler``, whose loop is ``engine`` once it runs."""
        self._scheduler = scheduler
        self.engine: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        """Return the routes."""
        posts = {
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
        }
        return [
            Route("/health", self.health),
            Route("/model_info", self.model_info),
            Route("/server_info", self.server_info),
            Route("/v1/loads", self.loads),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            *(Route(path, with_body(handler), methods=["POST"]) for path, handler in posts.items()),
        ]

    @property
    def _alive(self) -> bool:
        return self.engine is not None and not self.engine.done()

    async def health(self, http: HttpRequest) -> Response:
        """Return 200 while the engine's loop runs, otherwise 503."""
        return Response(status_code=200 if self._alive else 503)

    async def model_info(self, http: HttpRequest) -> Response:
        """Return the model's folder and sizes, and the version of its weights."""
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
        """Return the number of ranks, device, dtype and context, and that a weight update takes effect as a whole.

        503 if the engine's loop does not run: SGLang's scheduler would not answer either.
        """
        if not self._alive:
            return Response(status_code=503)
        model = self._scheduler.model
        info = {"tp_size": 1, "device": "cpu", "dtype": model.dtype, "whole_updates": True}
        return json_reply(info | {"max_req_input_len": model.context, "custom_weight_loader": [LOADER]})

    async def loads(self, http: HttpRequest) -> Response:
        """Return the requests in progress, those that wait for a slot, and the share of slots in use."""
        running, waiting, slots = self._scheduler.load()
        load = {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": running / slots}
        return json_reply({"loads": [load]})

    async def flush_cache(self, http: HttpRequest) -> Response:
        """Drop the prefix cache."""
        self._scheduler.flush()
        return Response("Cache flushed.\n")

    async def pause_generation(self, body: Body) -> Response:
        """Stop computing; see `Scheduler.pause`."""
        self._scheduler.pause(body.get("mode", "abort"))
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: Body) -> Response:
        """Continue computing after a pause."""
        self._scheduler.resume()
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def release_memory(self, body: Body) -> Response:
        """Release the memory parts ``tags``, by default all."""
        await self._scheduler.release_memory(body.get("tags") or MEMORY_PARTS)
        return Response()

    async def resume_memory(self, body: Body) -> Response:
        """Allocate the memory parts ``tags`` again, by default all."""
        self._scheduler.resume_memory(body.get("tags") or MEMORY_PARTS)
        return Response()
