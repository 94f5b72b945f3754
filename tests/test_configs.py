"""Every shipped configuration loads, names things that exist, and starts with the command that runs it."""

import re
import runpy
from pathlib import Path

import pytest

from agentrl.algo.registry import algorithm_faults
from agentrl.api.settings import file_layers
from agentrl.cli.main import build_parser
from agentrl.cli.options import config_layers
from agentrl.config.layers import differences, load_layers
from agentrl.config.load import default_config, dump, find_config, load_config, read_yaml, shipped_folder, validate
from agentrl.config.schema import Config
from agentrl.config.validation import all_keys
from agentrl.core.errors import ConfigError
from agentrl.sft.preflight import plan_sft
from agentrl.train.preflight import plan_run
from agentrl.train.warm_start import warm_start_config
from agentrl.weight_sync.registry import transport_faults
from benchmarks.learning_suite import POLICIES, TASKS, preset_names

ROOT = Path(__file__).parent.parent
RECIPES = sorted((shipped_folder() / "algo").glob("*.yaml"))
MODELS = sorted((shipped_folder() / "models").glob("*.yaml"))
LEARNING = sorted(
    {path.stem.removesuffix("_sft") for path in (shipped_folder() / "learning").glob("*.yaml")} - {"smollm2"}
)
UNTRAINED = ("runs/small", "runs/init", "runs/terminal_init", "runs/geometry_init")
"""Untrained policies, which commands write."""
LANGUAGE_MODEL = shipped_folder() / "learning" / "smollm2.yaml"
"""A layer over the other presets of its folder."""
CONFIGS = sorted({*shipped_folder().rglob("*.yaml")} - {*RECIPES, *MODELS, LANGUAGE_MODEL})
MACHINE = {
    "model.path",
    "sampler.backend",
    "sandbox.backend",
    "learner.device",
    "containers.hosts",
    "tasks.options.train",
    "tools.search.url",
    "tasks.options.eval",
}
"""What a machine may lack for a shipped configuration."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(shipped_folder())))
def test_shipped_configuration(path: Path, tmp_path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# agentrl "), "the first line is the command that runs it"
    config = load_config(path)
    assert validate(read_yaml(path)) == config
    if " data.path=" in first:
        chats = tmp_path / "chats.jsonl"
        chats.write_text('{"prompt": "qa1", "completion": "as1"}')
        plan_of_chats = plan_sft(load_config(path, [f"data.path={chats}"]))
        begins = [line.split()[0] for line in plan_of_chats.lines]
        shown = 1 if config.model.path in UNTRAINED else 4
        assert begins[:shown] == ["model", "optimizer", "compiles", "memory"][:shown]
        return
    assert algorithm_faults(config) == []
    assert transport_faults(config) == []
    plan = plan_run(config)
    is_run = first.startswith("# agentrl train ")
    assert any(line.startswith("memory ") for line in plan.lines) or not is_run or config.model.path in UNTRAINED, (
        "by the shipped shape without the weights"
    )
    for lack in plan.missing_resources:
        assert lack.split("=")[0] in MACHINE, f"a mistake, and nothing that a machine could lack: {lack}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("env", ["search_r1", "python_math", "code_contest"])
def test_recipe(path: Path, env: str) -> None:
    command = f"agentrl train --env {env} --config algo/{path.stem}"
    assert path.read_text().splitlines()[0] == "# " + command.replace(env, "search_r1")
    layers = config_layers(build_parser("train").parse_args(command.split()[1:]))
    assert [layer.origin.split()[0] for layer in layers] == ["default", "preset", "recipe", "command"]
    config, preset = load_layers(layers), load_layers(layers[:2])
    assert algorithm_faults(config) == []
    changed = {difference.key.split(".")[0] for difference in differences(preset, config)}
    assert changed <= {"algo", "batch"}, "it fits on every preset"
    assert {*layers[2].tree} == {"algo", "batch"}
    assert {"advantage", "loss"} <= {*layers[2].tree["algo"]}, "another recipe's would stay otherwise"
    assert {*layers[2].tree["batch"]} == {"aggregation", "denominator"}


def test_the_page_lists_every_recipe() -> None:
    page = (ROOT / "docs" / "reference" / "presets.md").read_text()
    rows = re.findall(r"^\| `algo/(\w+)` \| `(\w+)` \| `(\w+)` \| `(\w+)` \| `(\w+)` \|$", page, re.MULTILINE)
    assert sorted(row[0] for row in rows) == [path.stem for path in RECIPES]
    for name, *cells in rows:
        config = load_config(find_config(f"algo/{name}"))
        algo, batch = config.algo, config.batch
        assert cells == [algo.advantage.name, algo.loss.name, batch.aggregation, batch.denominator], name


def test_with_a_gpu_the_main_job_is_the_same_but_for_the_engine() -> None:
    cpu, gpu = (load_config(default_config("search_r1", gpu=gpu)).model_dump() for gpu in (False, True))
    for section in (cpu, gpu):
        section["sampler"] |= {"backend": None, "embedded": None, "sglang": None}
        section["learner"]["device"] = None
    assert (cpu["algo"].pop("old_logprobs"), gpu["algo"].pop("old_logprobs")) == ("sampler", "learner")
    assert (cpu["algo"]["correction"].pop("rollout_is"), gpu["algo"]["correction"].pop("rollout_is")) == (
        "none",
        "token",
    )
    assert (cpu["rollout"].pop("batch_size"), gpu["rollout"].pop("batch_size")) == (12, 32)
    assert (cpu["train"].pop("steps"), gpu["train"].pop("steps")) == (48, 24)
    assert cpu == gpu
    assert load_config(default_config("search_r1", gpu=True)).sampler.backend == "sglang"


def test_a_language_model_on_two_gpus_is_trained_as_on_one() -> None:
    run_config, two = (load_config(find_config(f"search_r1/smollm2_{gpus}gpu")) for gpus in (1, 2))
    assert (run_config.placement.mode, run_config.weights.transport) == ("separate", "ipc")
    assert (two.placement.mode, two.weights.transport) == ("disaggregate", "distributed")
    trees = [config.model_dump() for config in (run_config, two)]
    for tree, engines in zip(trees, (2, 1), strict=True):
        tree["placement"] = tree["weights"]["transport"] = None
        assert tree["sampler"].pop("engines") == engines
        assert tree["sampler"]["sglang"].pop("cuda_graph_max_bs_decode") * engines == run_config.rollout.concurrency
        for key in ("mem_fraction_static", "max_total_tokens"):
            tree["sampler"]["sglang"].pop(key, None)
    assert trees[0] == trees[1]
    assert run_config.eval.size == 300
    warm = warm_start_config(run_config, Path("run"))
    assert warm is not None
    assert warm.env == run_config.env, "it is shown what it will play"
    assert warm.sft.minutes is not None
    assert warm.sft.minutes < 2
    faults = sum(warm.tasks.options["faults"].values())
    assert 0.2 <= 1 - faults <= 0.3, "the share of right demonstrations, and so about where training begins"


@pytest.mark.parametrize("task", LEARNING)
def test_small_tasks_are_those_of_the_suite_for_both_policies(task: str) -> None:
    assert {*LEARNING} == {*TASKS}
    small, language_model = (load_layers(file_layers(preset_names(task, policy))) for policy in POLICIES)
    assert (small.env, small.tasks, small.reward) == (language_model.env, language_model.tasks, language_model.reward)
    assert (small.sampler.backend, language_model.sampler.backend) == ("embedded", "sglang")
    for config in (small, language_model):
        warm = warm_start_config(config, Path("run"))
        assert warm is not None
        assert warm.model.path == config.model.path
        assert config.train.eval_first
        assert config.eval.temperature == 1
    assert language_model.train.steps == 30


@pytest.mark.parametrize(("name", "gpus"), [("qwen2.5_7b_8gpu", 8), ("qwen2.5_32b_4nodes", 4 * 8)])
def test_at_scale_every_gpu_has_work(name: str, gpus: int) -> None:
    config = load_config(find_config(f"scale/{name}"))
    learner, engines = config.learner.ranks, config.sampler.engines * config.sampler.engine_ranks
    together = [learner, engines] if config.placement.mode == "colocate" else [learner + engines]
    assert set(together) == {gpus}


def test_the_published_set_up() -> None:
    config = load_config(find_config("search_r1/qwen2.5_3b"))
    rollout, batch, train, algo = config.rollout, config.batch, config.train, config.algo
    assert (rollout.batch_size, rollout.n_samples_per_prompt) == (512, 5)
    assert batch.global_batch_size == 256 * 5, "a mini-batch of 256 prompts"
    assert rollout.batch_size * rollout.n_samples_per_prompt == batch.global_batch_size * train.steps_per_rollout
    assert (algo.advantage.name, algo.kl_coef, algo.kl_kind) == ("grpo", 0.001, "low_var_kl")
    assert config.learner.optimizer.lr == 1e-6
    assert config.learner.optimizer.warmup_steps == int(0.285 * train.steps) * train.steps_per_rollout
    assert (config.sampler.temperature, config.sampler.top_p, config.sampler.max_new_tokens) == (1.0, 1.0, 500)
    assert config.env.options == {"topk": 3, "max_searches": 4, "observation_max_chars": 2000}
    assert (rollout.max_turns, rollout.max_tokens) == (4 + 1, 4096 + 500)
    assert config.eval.group_by == "data_source"
    lacks = "\n".join(plan_run(config).missing_resources)
    for name in ("train.parquet", "test.parquet"):
        assert f"data/nq_hotpotqa_train/{name}: there is no such file" in lacks


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


@pytest.mark.parametrize("env", ["search_r1", "python_math", "code_contest", "geometry"])
def test_every_environment_with_a_preset_has_one_on_a_gpu(env: str) -> None:
    config = load_config(default_config(env, gpu=True))
    assert config.env.name == env
    assert config.tasks.name


def test_reference_is_current_and_documents_every_key() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert text == runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["reference"](), "run `make docs`"
    for line in text.splitlines():
        if line.startswith("| `"):
            assert not line.rstrip().endswith("|  |"), f"no sentence: {line}"
    assert len(list(all_keys(Config))) > 60
