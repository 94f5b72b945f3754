"""LoRA adapters of an SGLang engine: a new one for each policy version, named by the requests that it samples."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from agentrl.core.errors import SamplerError
from agentrl.core.lineup import MAIN
from agentrl.distributed.base import LOAD_FORMAT
from agentrl.inference.base import LoraAdapter
from agentrl.inference.client.control import ControlEndpoint, ControlRefused

_VERSION = "-v"


def adapter_version(name: str) -> int:
    """Return the policy version of an adapter from its name."""
    return int(name.rpartition(_VERSION)[2].partition("-")[0])


def adapter_of(adapters: Mapping[str, str], policy: str, url: str) -> str | None:
    """Return the name of the adapter that new requests of a policy use; None for the engine's weights alone.

    Raises:
        SamplerError: the engine at ``url`` has no such policy.
    """
    if policy in adapters or (policy == MAIN and not adapters):
        return adapters.get(policy)
    raise SamplerError(f"policy={policy!r}: the engine at {url} serves {', '.join(adapters) or MAIN}")


class SGLangAdapters:
    """The adapters of one engine, by policy. SGLang caches prefixes for each adapter, so those of two versions never mix."""

    def __init__(self, control: ControlEndpoint) -> None:
        """Control the engine behind ``control``."""
        self._control = control
        self.current: dict[str, str] = {}
        """The adapter that new requests use, by policy."""
        self._loaded: list[str] = []
        """Adapters that may be loaded: also those of requests that failed."""

    def of(self, policy: str) -> str | None:
        """Return the name of the adapter that new requests of a policy use; None for the engine's weights alone.

        Raises:
            SamplerError: the engine has no such policy.
        """
        return adapter_of(self.current, policy, self._control.url)

    async def load(
        self, adapters: Mapping[str, LoraAdapter], version: int, version_name: str, *, keep_old: bool
    ) -> None:
        """Load adapters by policy for new requests, and unload earlier ones unless ``keep_old``: requests may still use them.

        Raises:
            EngineError: the engine refuses or does not answer; new requests use the adapters that they used before.
        """
        # Unique: an earlier attempt, or another client, may have loaded one of this version.
        names = {policy: f"{policy}{_VERSION}{version}-{uuid4().hex[:8]}" for policy in adapters}
        previous_names = [*self._loaded]
        for policy, adapter in adapters.items():
            self._loaded.append(names[policy])
            body = await asyncio.to_thread(_body, names[policy], adapter)
            await self._control.call("/load_lora_adapter_from_tensors", body, once=True)
        await self._control.call("/update_weight_version", {"new_version": version_name, "abort_all_requests": False})
        self.current = names
        for name in [] if keep_old else previous_names:
            with contextlib.suppress(ControlRefused):  # it was never loaded
                await self._control.call("/unload_lora_adapter", {"lora_name": name})
            self._loaded.remove(name)

    def drop(self) -> None:
        """Let new requests use the engine's weights alone."""
        self.current = {}


def _body(name: str, adapter: LoraAdapter) -> dict[str, Any]:
    from agentrl.distributed.flat_bucket import serialize_tensors

    body: dict[str, Any] = {
        "lora_name": name,
        "config_dict": dict(adapter.config),
        "serialized_named_tensors": [serialize_tensors(adapter.tensors)] * adapter.ranks,
        "load_format": LOAD_FORMAT,
    }
    if adapter.checksums:
        body["expected_checksums"] = dict(adapter.checksums)
    return body
