"""A policy behind the gateway's endpoints, without a run: ``agentrl gateway``."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agentrl.config.schema import Config
from agentrl.core.task import Task
from agentrl.core.types import Rollout
from agentrl.data.jobs import Job, episode_seed
from agentrl.data.task_sources import NoTasks
from agentrl.episode.runner import GroupRunner
from agentrl.evaluation.evaluate_policy import open_saved
from agentrl.evaluation.sample_to_file import check_samples_file, finish_samples
from agentrl.gateway.agents_elsewhere import SESSIONS_PATH, TOKEN_VARIABLE, AgentsElsewhere, agent_token
from agentrl.gateway.variables import session_variables
from agentrl.models.resolve import resolve_model
from agentrl.obs.console import print_message
from agentrl.obs.rollouts import RolloutFile
from agentrl.runtime.checks import check_engine
from agentrl.runtime.interrupt import WATCH_S, Interrupt
from agentrl.runtime.services import Services


@dataclass(slots=True)
class ServedSessions:
    """The sessions of a served policy: in each place one after the other."""

    runner: GroupRunner
    agents: AgentsElsewhere
    seed: int
    console: Console
    file: RolloutFile | None
    written: int = 0
    """Rollouts in the file."""
    is_ending: bool = False
    """Whether no further session begins."""

    async def serve(self, places: int) -> None:
        """Play sessions, in each place one at a time, until `end`."""
        numbers = itertools.count()
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(places):
                    tasks.create_task(self._serve_place(numbers))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first ended the others

    def end(self) -> None:
        """End the sessions that are open, and begin no others."""
        self.is_ending = True
        self.agents.end_all()

    async def _serve_place(self, numbers: itertools.count[int]) -> None:
        while not self.is_ending:
            name = f"session-{next(numbers)}"
            job = Job(Task(name, ()), episode_seed(self.seed, name), name)
            await self.runner.run_many([job], self._record, check_dropped=False)

    def _record(self, rollout: Rollout) -> None:
        failure = "" if rollout.failure is None else f"; {rollout.failure.message}"
        if rollout.rows:
            turns = f"{len(rollout.turns)} turns, {rollout.sampled_tokens} tokens, reward {rollout.reward:g}"
            print_message(self.console, f"{rollout.prompt_id}: {turns}{failure}")
            if self.file is not None:
                self.file.write(rollout)
                self.written += 1
        elif not self.is_ending:
            print_message(self.console, f"{rollout.prompt_id} has no turn{failure}")


def check_gateway(config: Config, out: Path | None) -> None:
    """Check what needs no server.

    Raises:
        UserError: with the value and the key or option to change.
    """
    if out is not None:
        check_samples_file(out)
    agent_token(config.rollout.agent)
    check_engine(config)


async def serve_policy(config: Config, out: Path | None, console: Console) -> None:
    """Serve a policy to agents until a signal ends it; then the sessions are ended, and written.

    Args:
        config: with ``rollout.agent.port``.
        out: gets the rollouts of the sessions, each as it ends; None: they are not recorded.
        console: gets addresses, key, and a line for each session.

    Raises:
        PortInUseError: another process has the port.
        EngineError: the engine does not start, or died.
        RunStopped: a signal came before the engine had started.
    """
    model = resolve_model(config.model.path)
    with (
        tempfile.TemporaryDirectory(prefix="agentrl-gateway-") as folder,
        Interrupt(lambda text: print_message(console, text)) as interrupt,
    ):
        async with AsyncExitStack() as exits:
            async with interrupt.guard():
                opening = open_saved(config, {"": NoTasks()}, model, Path(folder))
                services = await exits.enter_async_context(opening)
            await _serve(config, out, console, services, interrupt)


async def _serve(config: Config, out: Path | None, console: Console, services: Services, interrupt: Interrupt) -> None:
    agents, file = services.agents, None if out is None else RolloutFile(out)
    assert agents is not None, "rollout.agent.port is set"
    token = agent_token(config.rollout.agent)
    agents.standing_key, agents.needs_reward = token or f"sk-agentrl-{secrets.token_urlsafe(16)}", False
    sessions = ServedSessions(services.runner(), agents, config.run.seed, console, file)
    serving = asyncio.create_task(sessions.serve(config.rollout.concurrency))
    requested = asyncio.create_task(interrupt.requested.wait())
    _announce(config, agents, console, is_secret=token is not None)
    try:
        while not requested.done() and not serving.done():
            services.check()
            await asyncio.wait({serving, requested}, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        requested.cancel()
        sessions.end()
        await asyncio.wait({serving})
        if file is not None:
            finish_samples(config.model, file, sessions.written)
            if sessions.written:
                print_message(console, f"written {out}: {sessions.written} sessions")
    serving.result()


def _announce(config: Config, agents: AgentsElsewhere, console: Console, *, is_secret: bool) -> None:
    """Print how agents find the policy; not a key that the user has set."""
    url, rollout = agents.gateway.url, config.rollout
    print_message(
        console, f"{config.model.path} answers at {url}, with {rollout.max_tokens} tokens of context. Ctrl-C ends it"
    )
    key = f"${TOKEN_VARIABLE}" if is_secret else agents.standing_key
    for name, value in session_variables(url, key, rollout.agent.model).items():
        console.print(Text(f"export {name}={value}"), soft_wrap=True)
    print_message(console, f"POST {url}{SESSIONS_PATH} starts another session, which has its own key")
