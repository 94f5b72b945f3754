import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from preloaded import ENGINE_MODULES, ForkedStarts, preloaded_process
from shared_runs import Services

from agentrl.core import child_process


@pytest.fixture(scope="session", autouse=True)
def quick_engine_starts() -> Iterator[None]:
    """Embedded engines that tests start in this process need not import torch again."""
    with preloaded_process(*ENGINE_MODULES) as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "subprocess", ForkedStarts(address))
        yield


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """An engine and a search server for all runs of this process that do not test how these start and end."""
    services = Services(tmp_path_factory.mktemp("services"))
    yield services
    services.close()
