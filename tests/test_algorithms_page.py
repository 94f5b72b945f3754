"""docs/reference/algorithms.md has every estimator, loss, option and recipe, and its settings are valid."""

import re
from pathlib import Path

import pytest

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.base import Algorithm
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.config.load import load_config, shipped_folder

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "algorithms.md").read_text()


def table(first: str) -> dict[str, str]:
    """The rows of the table whose first heading is this: the name in the first cell, and the rest."""
    _, head, page_end = PAGE.partition(f"\n| {first} |")
    assert head, first
    return dict(re.findall(r"^\| `([\w/]+)`[^|]*\|(.*)\|$", page_end.partition("\n\n")[0], re.MULTILINE))


@pytest.mark.parametrize(
    ("key", "known_options"), [("algo.advantage.name", ESTIMATORS), ("algo.loss.name", POLICY_LOSSES)]
)
def test_every_variant_has_a_formula_and_its_options(key: str, known_options: dict[str, type[Algorithm]]) -> None:
    rows = table(f"`{key}`")
    assert set(rows) == set(known_options)
    for name, algorithm in known_options.items():
        options = algorithm.Options
        cell = rows[name].rpartition("|")[2]
        if name != "gspo_token":
            assert set(re.findall(r"`(\w+)`(?=,| \()", cell)) == set(options.model_fields), name
        for option, value in re.findall(r"`(\w+)` \(([\d.e-]+)\)", cell):
            assert options.model_fields[option].default == float(value), (name, option)


def test_every_recipe_is_on_the_page() -> None:
    assert set(table("recipe")) == {f"algo/{path.stem}" for path in (shipped_folder() / "algo").glob("*.yaml")}


def test_settings_in_the_words_of_others_are_valid() -> None:
    section = PAGE.partition("| verl's name |")[2].partition("\n\n")[0]
    rows = [row for row in section.splitlines() if "=" in row]
    assert len(rows) >= 9
    for row in rows:
        settings = dict(re.findall(r"`([\w.]+)=([^`]+)`", row.rpartition("|")[0].rpartition("|")[2]))
        expected = [f"{key if '.' in key else 'algo.correction.' + key}={value}" for key, value in settings.items()]
        algo = load_config(None, ["algo.old_logprobs=learner", *expected]).algo
        for key, value in settings.items():
            if "." not in key:
                actual = getattr(algo.correction, key)
                assert actual == ((value.strip("[]"),) if value.startswith("[") else type(actual)(value)), row
