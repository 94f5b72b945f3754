from tests.unit.episode.conftest import renderer  # noqa: F401
