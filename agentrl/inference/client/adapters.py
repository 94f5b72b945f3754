"""LoRA adapters of an SGLang engine: a new one for each policy version, named by the requests that it samples."""

from __future__ import annotations

import contextlib
from typing import Any
from uuid import uuid4

from agentrl.distributed.base import LOAD_FORMAT
from agentrl.inference.base import LoraAdapter
from agentrl.inference.client.control import ControlEndpoint, ControlRefused

_PREFIX = "policy-v"


def adapter_version(name: str) -> int:
    """Return the policy version of an adapter from its name."""
    return int(name.removeprefix(_PREFIX).partition("-")[0])


class SGLangAdapters:
    """The adapters of one engine. SGLang caches prefixes for each adapter, so those of two versions never mix."""

    def __init__(self, control: ControlEndpoint) -> None:
        """Control the engine behind ``control``."""
        self._control = control
        self._current: str | None = None
        self._loaded: list[str] = []
        """Adapters that may be loaded: also those of requests that failed."""

    @property
    def current(self) -> str | None:
        """Name of the adapter that new requests use; None for the engine's weights alone."""
        return self._current

    async def load(self, adapter: LoraAdapter, version: int, *, keep_old: bool) -> None:
        """Load an adapter for new requests, and unload earlier ones unless ``keep_old``: requests may still use them.

        Raises:
            EngineError: the engine refuses or does not answer; new requests use the adapter that they used before.

        """
        from agentrl.distributed.flat_bucket import serialize_tensors

        # Unique: an earlier attempt, or another client, may have loaded one of this version.
        name = f"{_PREFIX}{version}-{uuid4().hex[:8]}"
        body: dict[str, Any] = {
            "lora_name": name,
            "config_dict": dict(adapter.config),
            "serialized_named_tensors": [serialize_tensors(adapter.tensors)] * adapter.ranks,
            "load_format": LOAD_FORMAT,
        }
        if adapter.checksums:
            body["expected_checksums"] = dict(adapter.checksums)
        self._loaded.append(name)
        await self._control.call("/load_lora_adapter_from_tensors", body, once=True)
        await self._control.call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._current = name
        for old in [] if keep_old else self._loaded[:-1]:
            with contextlib.suppress(ControlRefused):  # it was never loaded
                await self._control.call("/unload_lora_adapter", {"lora_name": old})
            self._loaded.remove(old)

    def drop(self) -> None:
        """Let new requests use the engine's weights alone."""
        self._current = None
