"""A run's warm start: done once in a separate process, repeated for another configuration, and never left incomplete."""

import asyncio
import io
import re
from pathlib import Path

import psutil
import pytest
import yaml
from rich.console import Console

from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, RunStopped, UserError
from agentrl.core.registry import model_folder
from agentrl.learner import device as device_module
from agentrl.models.load import load_model, load_tokenizer
from agentrl.runtime.interrupt import Interrupt
from agentrl.train import warm_start
from agentrl.train.preflight import plan_run
from agentrl.train.replay import check_replay
from agentrl.train.warm_start import initial_policy, warm_start_config

WARM = model_folder("multihop-warm")
assert WARM is not None

SFT = {
    "tasks": {"name": "multihop", "options": {"scale": 0.1, "hops": [1]}},
    "env": {"options": {"topk": 1}},
    "model": {"path": "elsewhere"},
    "learner": {"device": "cpu", "threads": 1},
    "sft": {"steps": 2, "batch_size": 2, "workers": 0, "out": "elsewhere", "steps_per_world": 1},
    "obs": {"tensorboard": False},
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "warm.yaml"
    file.write_text(yaml.safe_dump(SFT))
    return load_config(None, [f"model.warm_start={file}", "tasks.name=multihop", "render.format=chatml"])


def changed(config: Config, **options: object) -> Config:
    model = config.model.model_copy(update={"warm_start_options": options})
    return config.model_copy(update={"model": model})


async def warmed(config: Config, folder: Path, console: Console, *, interrupt_after: float | None = None) -> Path:
    _, model, warm = initial_policy(config, folder, None, console)
    with Interrupt(print) as interrupt:
        if interrupt_after is not None:
            asyncio.get_running_loop().call_later(interrupt_after, interrupt.requested.set)
        if warm is not None:
            async with interrupt.guard():
                await warm.train(console)
    return model


def test_model_format_and_folders_are_those_of_the_run(config: Config, tmp_path: Path) -> None:
    config = config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": True})})
    warm = warm_start_config(changed(config, sft={"minutes": 0.5}), tmp_path)
    assert warm is not None
    assert warm.model.trust_remote_code
    assert (warm.model.path, warm.model.warm_start, warm.render.format) == ("multihop-warm", None, "chatml")
    assert (warm.sft.steps, warm.sft.minutes) == (2, 0.5)
    assert warm.run.dir is not None
    assert warm.sft.out is not None
    assert warm.sft.out.parent == warm.run.dir == tmp_path / "warm_start"
    assert warm_start_config(load_config(None), tmp_path) is None


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.timeout(180)
def test_done_once_and_repeated_for_another_configuration(config: Config, tmp_path: Path) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    model = asyncio.run(warmed(config, tmp_path, console))
    assert model == tmp_path / "warm_start" / "model"
    assert load_tokenizer(model).chat_template
    trained = load_model(model).state_dict()
    assert any((trained[name] != weight).any() for name, weight in load_model(WARM).state_dict().items())
    output = console.export_text()
    assert "2 steps in batches of 2" in output
    assert "step 2/2  loss" in output, "its progress is shown"
    assert "Loading weights" not in output, "and no bars of other libraries"
    stamp = (model / "model.safetensors").stat().st_mtime_ns
    assert asyncio.run(warmed(config, tmp_path, console)) == model
    assert "made before" in console.export_text()
    assert (model / "model.safetensors").stat().st_mtime_ns == stamp
    mistaken = changed(config, sft={"curriculum": [{"steps": 1, "tasks": {"hopps": [1]}}]})
    with pytest.raises(UserError, match=r"model\.warm_start(.|\n)*hopps"):
        asyncio.run(warmed(mistaken, tmp_path, console))
    assert not model.exists(), "it was made by another configuration"
    assert not (tmp_path / "warm_start" / "finished").exists()


@pytest.mark.timeout(120)
def test_an_interrupted_one_leaves_no_policy_and_no_process(config: Config, tmp_path: Path) -> None:
    other_processes = set(psutil.Process().children(recursive=True))
    endless = changed(config, sft={"steps": 1_000_000})
    with pytest.raises(RunStopped):
        asyncio.run(warmed(endless, tmp_path, Console(quiet=True), interrupt_after=1.0))
    assert not (tmp_path / "warm_start" / "finished").exists()
    assert set(psutil.Process().children(recursive=True)) <= other_processes


SGLANG = ["sampler.backend=sglang", "learner.device=cuda"]
PAIRS = [
    "sampler.groups={p: {serves: prefill, sglang: {tp_size: 2}}, d: {serves: decode, sglang: {tp_size: 2}}}",
    "sampler.router=sglang",
    "weights.gap_limit=off",
]
"""Two engines of two GPUs."""
COLOCATED = [*SGLANG, "placement.mode=colocate", "weights.transport=ipc"]


@pytest.mark.parametrize(
    ("settings", "gpus", "reason"),
    [
        ([], 0, ""),
        (["sampler.url=http://127.0.0.1:1"], 0, ""),
        (["learner.lora={}", "weights.adapters=only"], 0, "they keep the weights that they load"),
        ([*COLOCATED, "sampler.sglang={mem_fraction_static: 0.3}"], 1, ""),
        ([*COLOCATED, "sampler.sglang={mem_fraction_static: 0.9}"], 1, ""),
        (
            [*COLOCATED, "sampler.sglang={mem-fraction-static: 0.95}"],
            1,
            "GiB of the GPU's 80.0.*mem_fraction_static=0.95",
        ),
        ([*SGLANG, "sampler.sglang={mem_fraction_static: 0.48}"], 1, ""),
        (
            [*SGLANG, "sampler.sglang={mem_fraction_static: 0.48}", "sampler.engines=2"],
            1,
            "and 2 on it take .*mem_fraction_static=0.48 each",
        ),
        (COLOCATED, 1, "mem_fraction_static is not set"),
        (SGLANG, 2, ""),
        (SGLANG, 1, "mem_fraction_static is not set"),
        ([*SGLANG, "algo.distillation.teachers={t: {path: x}}"], 3, ""),
        ([*SGLANG, "algo.distillation.teachers={t: {path: x}}"], 2, "engines of teachers"),
        (
            [*SGLANG, "sampler.url=http://127.0.0.1:1", "algo.distillation.teachers={t: {path: x}}"],
            1,
            "engines of teachers",
        ),
        ([*SGLANG, "self_play={engines: 2, mix: {past: 1}}"], 4, ""),
        ([*SGLANG, "self_play={engines: 2, mix: {past: 1}}"], 3, "snapshots"),
        ([*SGLANG, *PAIRS], 5, ""),
        ([*SGLANG, *PAIRS], 4, "mem_fraction_static is not set"),
    ],
)
def test_engines_start_meanwhile_if_there_is_room_for_both(
    settings: list[str], gpus: int, reason: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    for module in (warm_start, device_module):
        monkeypatch.setattr(module, "gpu_bytes", lambda: 80 << 30)
    monkeypatch.setattr(warm_start, "resolve_device", lambda learner: learner.device)
    device = "cuda" if gpus else "cpu"
    _, _, warm = initial_policy(changed(config, learner={"device": device}), tmp_path, None, Console(quiet=True))
    assert warm is not None
    why_alone = warm.why_alone(load_config(None, settings))
    assert re.search(reason, why_alone) if reason else not why_alone


def test_engines_that_are_the_policy_start_afterwards(config: Config, tmp_path: Path) -> None:
    _, model, warm = initial_policy(config, tmp_path, None, Console(quiet=True))
    assert warm is not None
    run = load_config(None, [f"env.roles={{opponent: {{frozen: {model}}}}}"])
    assert "env.roles.opponent.frozen" in warm.why_alone(run)
    run = load_config(None, ["env.roles={opponent: {frozen: elsewhere}}"])
    assert not warm.why_alone(run)
    ranks = changed(config, learner={"ranks": 2, "device": "cpu"})
    _, _, warm = initial_policy(ranks, tmp_path, None, Console(quiet=True))
    assert warm is not None
    assert "learner.ranks=2" in warm.why_alone(load_config(None))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.warm_start=search_r1/no_such"], r"model\.warm_start=search_r1/no_such: .*no such file"),
        (["model.warm_start=search_r1/sft_warm", "model.warm_start_options={sft: {step: 3}}"], r"'sft\.step'"),
        (["model.warm_start=search_r1/sft_warm", "model.warm_start_options={tasks: {name: null}}"], r"tasks\.name"),
        (["model.warm_start_options={sft: {steps: 3}}"], r"without model\.warm_start"),
    ],
)
def test_refused_before_anything_starts(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_run(load_config(None, ["tasks.name=multihop", *overrides]))


def test_a_dry_run_tells_of_it() -> None:
    lines = plan_run(load_config(None, ["tasks.name=multihop", "model.warm_start=search_r1/sft_warm"])).lines
    assert lines[-1].split(maxsplit=2) == ["warm", "start", "search_r1/sft_warm: 900 steps in batches of 64"]


def test_a_replay_has_the_policy_that_sampled(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=RUN/warm_start/model"):
        check_replay(config, tmp_path / "recorded")
