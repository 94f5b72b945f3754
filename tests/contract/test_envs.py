"""Every installed environment keeps the contract, whether its tools answer or fail."""

import asyncio
from importlib.metadata import entry_points

import pytest
from agentrl_tools.search import SearchService

from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import env_class
from agentrl.testing import check_env, check_multi_agent_env

CORPUS = [
    {"id": str(i), "contents": f'"Place {i}"\nPlace {i} lies so far from no other place for we.'} for i in range(9)
]


OPTIONS = {"gymnasium": {"id": "FrozenLake-v1"}}
"""Options of the environments that cannot be built without."""
AT_SERVERS = {"nemo_gym", "openenv"}
"""Environments behind servers of other libraries: `tests/with_environments` checks them against the real ones."""
IN_MACHINES = {"terminal"}
"""An episode begins when its machine is open, which Gymnasium's checker does not wait for: `tests/unit/envs/test_terminal.py`."""


NAMES = {point.name for point in entry_points(group="agentrl.envs")} - AT_SERVERS - IN_MACHINES - {"verifiers"}
"""verifiers drives its episodes itself, and has no steps."""


@pytest.mark.parametrize("name", sorted(NAMES))
def test_environment(name: str) -> None:
    cls, options = env_class(name), OPTIONS.get(name, {})
    if issubclass(cls, MultiAgentEnv):
        check_multi_agent_env(lambda: cls(**options))
    else:
        check_env(lambda: cls(**options))


def test_search_r1_with_a_search_that_answers() -> None:
    cls = env_class("search_r1")
    search = SearchService().local_client({"all": CORPUS}, {})
    check_env(
        lambda: cls(shuffle_documents=True),  # type: ignore[call-arg]
        respond=lambda call: asyncio.run(search.call(call, episode_id="e")),
    )
