"""Secrets are found by key and by form, redacted where they are shown, and stored in a file that only the owner can read."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.cli.main import main
from agentrl.config.layers import Layer, annotate, differences, load_layers, save_config, saved_layers
from agentrl.config.load import load_config, parse_override, read_yaml, shipped_folder
from agentrl.config.merging import merge
from agentrl.config.schema import Config
from agentrl.config.secret_values import REDACTED, hide_secrets, secret_part
from agentrl.core.errors import ConfigError

SECRET = "s3cr3t"
SETTINGS = [
    f"tools.search.options.client.token={SECRET}",
    f"tools.search.options.server.token={SECRET}",
    f"tools.search.url=http://me:{SECRET}@host:1",
    f"tools.mcp.url=http://host:1/mcp?api_key={SECRET}",
    f"tools.mcp.options.headers={{Authorization: Bearer {SECRET}, X-Trace: {SECRET}}}",
    f"tools.mcp.options.env={{GITHUB_TOKEN: {SECRET}, OTHER: {SECRET}}}",
    f"tools.mcp.options.command=server --api-key {SECRET} --port 1",
    f"tools.mcp.options.args=[--token, {SECRET}]",
    f"tools.mcp.options.servers=[{{name: a, password: {SECRET}}}]",
    f"sampler.url=http://{SECRET}@host:1",
    f"sampler.url=http://me:p@{SECRET}@host:1,http://b:1",
    f"tools.search.url=me:{SECRET}@host:1",
    f"tools.mcp.url=https://host/mcp?x=1&sig={SECRET}",
    f"algo.distillation.teachers.a.url=http://me:{SECRET}@host:1",
    f"self_play.endpoints.a={{url: 'http://h/v1', model: m, api_key: {SECRET}}}",
    f"obs.otlp=http://me:{SECRET}@host:1/v1/traces",
    f"sandbox.docker_url=tcp://me:{SECRET}@host:1",
    f"env.options={{signing_key: {SECRET}}}",
    f"env.options.client={{auth: {{headers: {{a: {SECRET}}}}}}}",
    f"sampler.sglang.admin-api-key={SECRET}",
    f"env.options.judge_api_key={SECRET}",
    f"env.options.headers.x={SECRET}",
    f"tasks.options={{hf_token: {SECRET}}}",
    *(
        f"env.options.{name}={SECRET}"
        for name in (
            "openai_key",
            "pass",
            "auth",
            "jwt",
            "dsn",
            "passwords",
            "api_keys",
            "session_key",
            "connection_string",
        )
    ),
    f"tools.mcp.options.note=PASSWORD={SECRET} server",
    f"tools.mcp.options.note=sk-proj-{SECRET}0123456789abc",
    f"tools.mcp.options.note=hf_{SECRET}0123456789abcdef",
    f"model.warm_start_options={{tasks: {{options: {{password: {SECRET}}}}}, sft: {{steps: 2}}}}",
    "model.warm_start=search_r1/sft_warm",
]
NOT_SECRET = {
    "tools.mcp.port": 7,
    "env.options.env": "x",
    "env.options.max_tokens": 5,
    "tasks.options.key": "k",
    "env.options.compass": "n",
}


def config() -> Config:
    return load_config(None, [*SETTINGS, *(f"{key}={value}" for key, value in NOT_SECRET.items())])


def value_of(tree: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        tree = tree[name]
    return tree


AGENT = f"rollout.agent={{command: sh a.sh, env: {{OTHER: {SECRET}}}}}"
"""Not in a run with self-play."""


@pytest.mark.parametrize("setting", [*SETTINGS[:-1], AGENT])
def test_a_secret_is_never_shown_and_comes_back_from_its_own_file(tmp_path: Path, setting: str) -> None:
    extra = ["model.warm_start=search_r1/sft_warm"] if setting.startswith("model") else []
    layers = [Layer("command line", merge(parse_override(setting), parse_override(extra[0]) if extra else {}))]
    config = load_layers(layers)
    assert SECRET not in annotate(config, layers)
    assert SECRET not in "".join(map(str, differences(load_config(None, extra), config)))
    save_config(config, tmp_path)
    assert SECRET not in (tmp_path / "config.yaml").read_text()
    assert SECRET in (tmp_path / "secrets.yaml").read_text()
    assert stat.S_IMODE((tmp_path / "secrets.yaml").stat().st_mode) == 0o600
    assert load_layers(saved_layers(tmp_path)) == config


def test_all_together_come_back_and_what_is_no_secret_is_shown(tmp_path: Path) -> None:
    save_config(config(), tmp_path)
    assert load_layers(saved_layers(tmp_path)) == config()
    shown = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert {key: value_of(shown, key) for key in NOT_SECRET} == NOT_SECRET
    assert value_of(shown, "model.warm_start_options.sft.steps") == 2


def test_an_open_file_that_was_there_before_does_not_stay_open(tmp_path: Path) -> None:
    (tmp_path / "secrets.yaml").write_text("old")
    save_config(config(), tmp_path)
    assert stat.S_IMODE((tmp_path / "secrets.yaml").stat().st_mode) == 0o600
    save_config(load_config(None), tmp_path)
    assert not (tmp_path / "secrets.yaml").exists(), "there is no secret left to keep"


@pytest.mark.parametrize(
    "setting",
    [
        f"self_play.endpoints.a={{url: 'http://h/v1', model: m, api_key: [{SECRET}]}}",
        f"self_play.endpoints.a={{url: 'me:{SECRET}@h/v1', model: m}}",
        f"sampler.url=['http://me:{SECRET}@h']",
        f"tools.search.url={{a: {SECRET}}}",
        f"obs.otlp=me:{SECRET}@host:1",
    ],
)
def test_a_value_that_does_not_fit_is_not_shown_if_it_is_a_secret(setting: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [setting])
    assert SECRET not in str(refusal.value)


def test_texts_for_people_keep_all_but_the_secret() -> None:
    assert hide_secrets(f"GET http://me:{SECRET}@host:1/x?a=1 failed; mail a@b.c") == (
        f"GET http://{REDACTED}@host:1/x?a=1 failed; mail a@b.c"
    )
    assert hide_secrets(f"server --api-key {SECRET} --port 1") == f"server --api-key {REDACTED} --port 1"
    assert hide_secrets(f"Authorization: Bearer {SECRET}") == f"Authorization: Bearer {REDACTED}"
    for text in (
        f"curl -H 'X-Api-Key: {SECRET}'",
        f"API_KEY={SECRET} server",
        f'{{"password": "{SECRET} x"}}',
        f"--password '{SECRET} x'",
        f"key sk-{SECRET}0123456789abcdef is wrong",
    ):
        assert SECRET not in hide_secrets(text)
        assert " x" not in hide_secrets(text)
    for text in (
        "the bearer token is wrong",
        "unexpected token: x, hf_transfer is not installed, data.label_key=a",
        "Basic research",
        "http://host/a?page=2",
        "sampler.url=http://h:1 --tokens 5",
    ):
        assert hide_secrets(text) == text


def test_the_dry_run_and_its_errors_show_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--config", "search_r1/cpu", f"sampler.url=http://me:{SECRET}@127.0.0.1:1", "--dry-run"]
    assert main(words) == 0
    assert main([*words, "sampler.engines=2"]) == 2
    output = "".join(capsys.readouterr())
    assert SECRET not in output
    assert f"engine       http://{REDACTED}@127.0.0.1:1" in output
    assert f"sampler.url=http://{REDACTED}@127.0.0.1:1 with sampler.engines=2" in output


def test_a_configuration_without_its_secrets_is_refused(tmp_path: Path) -> None:
    save_config(load_config(None, SETTINGS[:1]), tmp_path)
    with pytest.raises(ConfigError, match=rf"tools\.search\.options\.client\.token={REDACTED}.*secrets\.yaml"):
        load_config(tmp_path / "config.yaml")


def test_nothing_that_is_shipped_is_a_secret() -> None:
    files = list(shipped_folder().rglob("*.yaml"))
    assert len(files) > 10
    for file in files:
        assert secret_part(read_yaml(file)) == {}, file
