import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from dockerd import DockerHost, NoDocker, running_dockerd
from preloaded import preloaded_process

# The bodies of tests that several engines pass.
pytest.register_assert_rewrite("conformance")

_SESSION = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist use that of their session
        _SESSION.enter_context(preloaded_process())


def pytest_unconfigure(config: pytest.Config) -> None:
    _SESSION.close()


@pytest.fixture(scope="session")
def dockerd() -> Iterator[DockerHost]:
    """A Docker daemon with an image that has Python; tests that need it are skipped where there can be none."""
    try:
        context = running_dockerd()
        host = context.__enter__()
    except NoDocker as error:
        pytest.skip(f"Docker: {error}")
    try:
        yield host
    finally:
        context.__exit__(None, None, None)
