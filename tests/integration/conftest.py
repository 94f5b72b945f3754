import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from shared_runs import Services


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """An engine and a search server for all runs of this process that do not test how these start and end."""
    services = Services(tmp_path_factory.mktemp("services"))
    yield services
    services.close()


@pytest.fixture(scope="module", autouse=True)
def quick_starts(forked_starts: None) -> None:
    """Engines and tool servers that tests start in this process need not import torch again."""
