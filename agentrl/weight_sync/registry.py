"""Transports by name: those of agentrl, entry points of the group ``agentrl.transports``, and references to a class."""

from __future__ import annotations

from agentrl.config.sampler import SamplerConfig, merge_options
from agentrl.config.schema import Config
from agentrl.core.errors import UserError
from agentrl.core.registry import TRANSPORTS as GROUP
from agentrl.core.registry import plugin_class
from agentrl.weight_sync.base import Transport, TransportOptions
from agentrl.weight_sync.bucketwise import IpcSync, TensorSync
from agentrl.weight_sync.delta import DeltaSync
from agentrl.weight_sync.disk import DiskSync
from agentrl.weight_sync.distributed import DistributedSync

KEY = "weights.transport"
TRANSPORTS: dict[str, type[Transport]] = {
    "tensor": TensorSync,
    "disk": DiskSync,
    "distributed": DistributedSync,
    "ipc": IpcSync,
    "delta": DeltaSync,
}
"""Those of agentrl."""


def transport_class(name: str) -> type[Transport]:
    """Return the transport class of a name, of ``path/to/file.py:Class`` or ``module:Class``.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file, or the class in it, does not exist or is no `Transport`.
    """
    return plugin_class(GROUP, name, "weight transport", KEY, Transport, TRANSPORTS)  # type: ignore[type-abstract]  # for issubclass


def make_transport(name: str, options: TransportOptions) -> Transport:
    """Return the transport of a name; see `transport_class`."""
    return transport_class(name)(options)


def transport_faults(config: Config) -> list[str]:
    """Return why ``weights.transport`` does not reach the run's engines from its learner; see `Transport.faults`."""
    try:
        return [*transport_class(config.weights.transport).faults(config)]
    except UserError as error:
        return [str(error)]


def for_transport(config: Config) -> Config:
    """Return the configuration of a run whose SGLang engines accept what ``weights.transport`` sends."""
    if config.sampler.urls:
        return config
    return config.model_copy(update={"sampler": with_engine_options(config.sampler, config.weights.transport)})


def with_engine_options(sampler: SamplerConfig, transport: str) -> SamplerConfig:
    """Return the configuration of engines that are started with the options that a transport needs.

    Lists, such as that of custom weight loaders, are added to those of ``sampler.sglang``.
    """
    options = dict(transport_class(transport).engine_options)
    if not options or not sampler.uses_sglang:
        return sampler
    for name, value in options.items():
        configured = sampler.sglang_option(name)
        if isinstance(value, list) and isinstance(configured, list):
            options[name] = [*configured, *(item for item in value if item not in configured)]
    return sampler.model_copy(update={"sglang": merge_options(sampler.sglang, options)})
