"""How an SGLang engine gets the payloads of buckets: it fetches them from here, or has them in bodies of requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentrl.core.errors import EngineError
from agentrl.distributed.payload_server import Payload, PayloadServer
from agentrl.distributed.sglang_loader import PROBE_LOADER
from agentrl.inference.client.control import ControlEndpoint

if TYPE_CHECKING:
    from agentrl.distributed.sglang_loader.agentrl_weight_loaders import EncodedBucket

TENSORS = "/update_weights_from_tensor"
TARGET = {"disable_draft_model": True, "selector": "target"}
"""Has SGLang load weights into the policy's model alone, and not into a draft's: the option of 0.5.17 and that of 0.5.23."""
_NOTED_S, _LATE_S = 1.0, 30.0
"""How long a probe, and an update that would fail, wait for the note of a payload that was fetched."""
_log = logging.getLogger(__name__)


def tensors_body(load_format: str, entries: Sequence[str]) -> dict[str, object]:
    """Return the body of a request to `TENSORS`."""
    return {"load_format": load_format, "serialized_named_tensors": list(entries)}


class EnginePayloads:
    """Payloads of the buckets that are sent to one engine."""

    def __init__(self, control: ControlEndpoint) -> None:
        self._control = control
        self._loaders: frozenset[str] | None = None
        """The custom weight loaders that the engine has reported; None: not requested yet."""
        self._server: PayloadServer | None = None
        self._probed = False
        """Whether it was tried if the engine can fetch."""

    async def loaders(self) -> frozenset[str]:
        """Return the custom weight loaders that the engine reports."""
        if self._loaders is None:
            info = await self._control.call("/server_info", None)
            self._loaders = frozenset((info.get("custom_weight_loader") if isinstance(info, dict) else None) or ())
        return self._loaders

    def forget_loaders(self) -> None:
        """Ask again: another engine may be started at the address."""
        self._loaders = None

    @asynccontextmanager
    async def body(
        self, loader: str, bucket: EncodedBucket, ranks: int
    ) -> AsyncIterator[tuple[dict[str, object], Payload | None]]:
        """Yield the body of the request with which an engine of so many ranks loads a bucket, and the payload that it fetches."""
        if not self._probed:
            self._probed, self._server = True, await self._find_server(ranks)
        if self._server is None or not len(bucket.payload):
            yield tensors_body(loader, await asyncio.to_thread(bucket.by_rank, ranks)), None
            return
        with self._server.serve(bucket.payload.numpy().data) as payload:
            yield tensors_body(loader, bucket.by_rank(ranks, payload.url)), payload

    async def check_fetched(self, payload: Payload) -> None:
        """Check that the engine has loaded a payload: it answers the same if it does not reach the server.

        Raises:
            EngineError: it has not fetched it.
        """
        if not await _is_fetched(payload, _LATE_S):
            raise EngineError(
                f"the engine at {self._control.url} has loaded no weights: it does not reach {urlsplit(payload.url).netloc}, the "
                "sender, as it did before; with weights.transport=disk it need not"
            )

    async def _find_server(self, ranks: int) -> PayloadServer | None:
        """Return a server from which the engine can fetch; None if there is none, with a warning."""
        from agentrl.distributed.sglang_loader.agentrl_weight_loaders import probe_entries

        if PROBE_LOADER not in await self.loaders():
            return None
        try:
            server = await asyncio.to_thread(PayloadServer.towards, self._control.url)
        except OSError as error:
            _log.warning("weights go to %s in bodies of requests, which is slow: %s", self._control.url, error)
            return None
        with ExitStack() as unused:
            unused.callback(server.close)
            with server.serve(memoryview(b"1")) as payload:
                body = tensors_body(PROBE_LOADER, probe_entries(payload.url, ranks))
                await self._control.call(TENSORS, body | {"flush_cache": False} | TARGET)
                if await _is_fetched(payload, _NOTED_S):
                    unused.pop_all()
                    return server
        _log.warning(
            "weights go to %s in bodies of requests, which is slow: it does not reach ports of this machine at %s",
            self._control.url,
            server.host,
        )
        return None

    def close(self) -> None:
        """End what the engine fetches from. Blocks for a moment."""
        if self._server is not None:
            self._server.close()
            self._server = None


async def _is_fetched(payload: Payload, timeout_s: float) -> bool:
    """Return whether a payload was fetched; the engine may have answered before the thread that served it has noted that."""
    return payload.fetched.is_set() or await asyncio.to_thread(payload.fetched.wait, timeout_s)
