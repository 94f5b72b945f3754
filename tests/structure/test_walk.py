"""The walk of a sampled token, traced in a real run, is the one in ``docs/explanation/architecture.md``."""

import os

import preloaded

from tests.structure.layers import REPOSITORY
from tests.structure.test_architecture import walk


def test_the_traced_walk_is_that_of_the_page() -> None:
    run = preloaded.run("tests.structure.walk:main", [], cwd=REPOSITORY, env=dict(os.environ), timeout=300, forks=True)
    assert run.returncode == 0, run.stderr[-2000:]
    traced = run.stdout.partition(" files:\n")[2].splitlines()
    assert len(traced) > 15, run.stdout[-2000:]
    assert set(traced) == {f"{file}: {function}" for _, function, file in walk("A sampled token")}
