"""Options of a machine's container: limits, network, system calls."""

from __future__ import annotations

from collections.abc import Mapping

import docker

from agentrl.containers.docker_api import Options
from agentrl.containers.spec import MachineSpec
from agentrl.sandbox.cgroup import PERIOD_US

FIRST_PROCESS = "trap : TERM INT; exec 3<&0; while :; do ( read -r _ <&3 ) & wait; done"
"""Shell text of the first process: it waits with the shell's builtins alone, and reaps processes that lost their parent."""
DROPPED_CAPABILITIES = ("MKNOD", "NET_RAW")
"""Of those that Docker grants; package managers, compilers, debuggers, web servers and `su` work without them."""


def machine_options(spec: MachineSpec, labels: Mapping[str, str]) -> Options:
    """Return the arguments of `docker.APIClient.create_container` for a machine."""
    host: Options = {
        "init": False,
        "log_config": docker.types.LogConfig(type="none"),
        "restart_policy": {"Name": "no"},
        "network_mode": "none" if spec.network != "public" else "default",
        "cap_drop": list(DROPPED_CAPABILITIES),
        "mem_limit": spec.memory_mb * 2**20,
        "memswap_limit": spec.memory_mb * 2**20,
        "pids_limit": spec.processes,
        # Not nano_cpus: Docker refuses more than the machine has.
        "cpu_period": PERIOD_US,
        "cpu_quota": max(1000, round(spec.cpus * PERIOD_US)),
    }
    if spec.runtime is not None:
        host["runtime"] = spec.runtime
    return {
        "image": spec.image,
        "command": ["/bin/sh", "-c", FIRST_PROCESS],
        "user": spec.user,
        "working_dir": spec.workdir,
        "hostname": "machine",
        "labels": dict(labels),
        "stdin_open": True,
        "tty": False,
        "stop_signal": "SIGKILL",
        "healthcheck": {"test": ["NONE"]},
        "host_config": docker.types.HostConfig(version="1.41", **host),
    }
