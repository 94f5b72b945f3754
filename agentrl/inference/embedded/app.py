"""The HTTP server of the engine: SGLang's endpoints with their field names and replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agentrl.inference.embedded.control_endpoints import ControlEndpoints
from agentrl.inference.embedded.errors import BadRequestError
from agentrl.inference.embedded.replies import Body, bad_request, json_reply, parse_body, with_body
from agentrl.inference.embedded.request import Request, parse_generate
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.weight_endpoints import WeightEndpoints


def build_app(scheduler: Scheduler, on_failure: Callable[[BaseException], None]) -> Starlette:
    """Return the ASGI application; ``on_failure`` is called with the error that ends the engine's loop."""
    control = ControlEndpoints(scheduler)

    def report_failure(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            on_failure(error)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(scheduler.run(), name="engine")
        control.engine = task
        task.add_done_callback(report_failure)
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    routes = [*GenerationEndpoints(scheduler).routes(), *control.routes(), *WeightEndpoints(scheduler).routes()]
    return Starlette(routes=routes, lifespan=lifespan)


class GenerationEndpoints:
    """Generation and aborts."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Submit requests to ``scheduler``."""
        self._scheduler = scheduler

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/abort_request", with_body(self.abort_request), methods=["POST"]),
        ]

    async def generate(self, http: HttpRequest) -> Response:
        """Sample; the reply is sent when all prompts of the body have ended."""
        try:
            inputs, batch = parse_generate(parse_body(await http.body()))
            requests = [self._scheduler.submit(generate_input) for generate_input in inputs]
        except BadRequestError as error:
            return bad_request(error)
        try:
            await self._wait(http, requests)
        except RuntimeError as error:
            return json_reply({"error": {"message": str(error)}}, 500)
        replies = [self._scheduler.reply(request) for request in requests]
        return json_reply(replies if batch else replies[0])

    async def _wait(self, http: HttpRequest, requests: list[Request]) -> None:
        """Wait until the requests end; abort them if the client disconnects first."""
        disconnected = asyncio.create_task(_wait_for_disconnect(http))
        try:
            for request in requests:
                await asyncio.wait([request.done, disconnected], return_when=asyncio.FIRST_COMPLETED)
                if not request.done.done():
                    self._scheduler.abort(set(requests).__contains__, "The client disconnected")
                request.done.result()
        finally:
            disconnected.cancel()

    async def abort_request(self, body: Body) -> Response:
        """End the request ``rid``, or all with ``abort_all``."""
        rid, abort_all = body.get("rid"), bool(body.get("abort_all"))
        if not rid and not abort_all:
            raise BadRequestError("abort_request needs a rid, or abort_all=true")
        self._scheduler.abort(lambda request: abort_all or request.rid == rid)
        return Response()


async def _wait_for_disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
