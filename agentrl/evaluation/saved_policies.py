"""Services of a policy that no learner trains, and of the several policies of a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.data.task_sources import TaskSources
from agentrl.inference.base import EngineControl
from agentrl.runtime.services import Services, open_services
from agentrl.weight_sync.adapter import for_adapters, load_adapters


@asynccontextmanager
async def open_saved(config: Config, tasks: TaskSources, model: Path, folder: Path) -> AsyncIterator[Services]:
    """Start the services of the policy in ``model``; several policies are read from the checkpoint that it is in.

    Raises:
        ConfigError, ModelError: the checkpoint has not all policies that ``env.roles`` names, or one is damaged.
        EngineError, ToolServerError: see `open_services`.
    """
    names, policies = config.env.policies, model.parent / "policies"
    for name in names:
        if not (policies / name).is_dir():
            raise ConfigError(
                f"env.roles names the policies {', '.join(names)}, and model.path={model} is not of a checkpoint with them: "
                f"there is no {policies / name}"
            )

    async def load(engine: EngineControl) -> int:
        await load_adapters(engine, policies, names, 0)
        return 0

    if names:
        config = await asyncio.to_thread(for_adapters, config, model)
    async with open_services(config, tasks, model, folder, config.run.seed) as services:
        if names:
            services.fleet.set_weight_sync(load)
            await asyncio.gather(*(load(engine) for engine in services.fleet.live))
        yield services
