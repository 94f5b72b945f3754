"""Every shipped configuration loads, names things that exist, and starts with the command that runs it."""

from pathlib import Path

import pytest

from agentrl.config.load import dump, known_keys, load_config, read_yaml, validate
from agentrl.config.reference import reference
from agentrl.config.shipped import default_config, find_config, shipped_folder
from agentrl.errors import ConfigError
from agentrl.preflight import open_tasks
from agentrl.registry import make_env

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(shipped_folder().rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(shipped_folder())))
def test_shipped_configuration(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# agentrl "), "the first line is the command that runs it"
    config = load_config(path)
    make_env(config.env.name, config.env.options)
    tasks = open_tasks(config)
    assert len(tasks.split(config.tasks.train_split)) > 0
    assert validate(read_yaml(path)) == config


def test_dump_loads_back(tmp_path: Path) -> None:
    config = load_config(CONFIGS[0], ["train.steps=7", "learner.optimizer.lr=1e-3", "run.dir=/tmp/x"])
    (tmp_path / "c.yaml").write_text(dump(config))
    assert load_config(tmp_path / "c.yaml") == config
    assert config.train.steps == 7
    assert config.learner.optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.bacth_size=3", "Did you mean 'rollout.batch_size'"),
        ("rollout.batch_size=-3", "rollout.batch_size=-3"),
        ("train.steps=many", "train.steps='many'"),
        ("nonsense", "key=value"),
        ("sampler.top_p=0.9", "sampler.allow_unnormalised"),
        ("sampler.top_k=50", "sampler.allow_unnormalised"),
        ("sampler.temperature=0", "sampler.temperature"),
        ("learning_rate=1", "unknown key 'learning_rate'"),
    ],
)
def test_mistakes_name_value_and_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert message in str(error.value)


def test_top_p_when_asked_for() -> None:
    assert load_config(None, ["sampler.top_p=0.9", "sampler.allow_unnormalised=true"]).sampler.top_p == 0.9


def test_missing_file_lists_what_is_shipped() -> None:
    with pytest.raises(ConfigError, match="search_r1/cpu"):
        find_config("search_r1/cqu")
    assert default_config("search_r1", gpu=False) == shipped_folder() / "search_r1" / "cpu.yaml"
    assert default_config("no_such_env", gpu=False) is None


def test_reference_is_current_and_documents_every_key() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert text == reference(), "run `make docs`"
    for line in text.splitlines():
        if line.startswith("| `"):
            assert not line.rstrip().endswith("|  |"), f"no sentence: {line}"
    assert len(list(known_keys())) > 60
