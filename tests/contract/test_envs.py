"""Every registered environment keeps the contract, whether its tools answer or fail."""

import pytest
from agentrl_tools.search import SearchService

from agentrl.core.registry import ENVS, env_class, names
from agentrl.testing import check_env

CORPUS = [
    {"id": str(i), "contents": f'"Place {i}"\nPlace {i} lies so far from no other place for we.'} for i in range(9)
]


@pytest.mark.parametrize("name", names(ENVS))
def test_environment(name: str) -> None:
    check_env(env_class(name))


def test_search_r1_with_a_search_that_answers() -> None:
    cls = env_class("search_r1")
    check_env(lambda: cls(shuffle_documents=True), respond=SearchService.local({"all": CORPUS}))  # type: ignore[call-arg]
