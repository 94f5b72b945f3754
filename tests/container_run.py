"""A run that opens many machines, for tests that kill it: ``python container_run.py URL IMAGE STATE MACHINES BOUND LEASE_S``.

It prints a line for each machine in which a command has run, with the number of the daemon's machines then, and never ends.
"""

import asyncio
import sys
from pathlib import Path

from agentrl.config.containers import ContainersConfig
from agentrl.containers.machine import Command
from agentrl.containers.machines import Machines
from agentrl.containers.spec import MachineSpec, VolumeMount


async def main(url: str, image: str, state: str, machines: str, bound: str, lease_s: str) -> None:
    config = ContainersConfig(hosts=(url,), state=Path(state), machines=int(bound), lease_s=float(lease_s), warm=1)
    run = Machines(config, "killed-run")
    await run.start()
    volumes = (VolumeMount(name="data", path="/data"),)
    spec = MachineSpec(image=image, network="no-network", processes=32, memory_mb=64, volumes=volumes)

    async def play(number: int) -> None:
        machine = await run.open(spec, str(number))
        result = await machine.run(Command("echo $((1 + 1))"))
        scan = await run.hosts[0].scan()
        sys.stdout.write(f"{result.output.strip()} {len(scan.machines)}\n")
        sys.stdout.flush()
        await machine.close()

    await asyncio.gather(*map(play, range(int(machines))))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
