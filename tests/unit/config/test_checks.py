"""Which ways new weights can take between which devices."""

from __future__ import annotations

import pytest

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError

GPU = ["sampler.backend=sglang"]
IPC = ["weights.transport=ipc", "placement.mode=colocate"]
SEND = ["weights.transport=distributed"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["weights.transport=ipc", *GPU], "placement.mode=colocate, not separate"),
        ([*IPC], "weights.transport=ipc is for GPUs"),
        ([*IPC, *GPU, "sampler.sglang={device: cpu}"], "weights.transport=ipc is for GPUs"),
        ([*IPC, *GPU, "learner.device=cpu"], "weights.transport=ipc is for GPUs"),
        ([*SEND, *GPU, "placement.mode=colocate"], "set weights.transport=ipc"),
        ([*SEND, *GPU, "learner.device=cpu"], "engines on GPUs get weights from a GPU only"),
        ([*SEND, *GPU, "sampler.sglang={tp_size: 2, pp-size: 2}"], "tensor parallel ranks only"),
        ([*IPC, *GPU, "sampler.sglang={dp_size: 2}"], "tensor parallel ranks only"),
        (["weights.check=checksum", *GPU, "sampler.sglang={device: cpu, tp: 2}"], "set weights.check=version"),
    ],
)
def test_ways_that_lead_nowhere(settings: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, settings)


@pytest.mark.parametrize(
    "settings",
    [
        [*IPC, *GPU],
        [*IPC, *GPU, "sampler.sglang={tensor-parallel-size: 2}", "learner.ranks=2"],
        [*SEND],
        [*SEND, "placement.mode=colocate"],
        [*SEND, *GPU, "placement.mode=disaggregate"],
        ["weights.transport=disk", *GPU, "sampler.sglang={pp_size: 2}", "placement.mode=disaggregate"],
        ["weights.dtype=bfloat16"],
        ["weights.check=checksum", *GPU],
    ],
)
def test_ways_that_are_open(settings: list[str]) -> None:
    load_config(None, settings)
