"""Tool servers that the configuration names are checked before a run starts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl.config.load import load_config
from agentrl.core.child_process import reserve_port
from agentrl.core.errors import ConfigError, MissingError, UnknownNameError
from agentrl.runtime.run_tools import check_tools

HEALTH = {"server": "a", "status": "ok"}
SEARCH = {"tools": [{"name": "search", "description": "", "parameters": {}}]}


@contextmanager
def server(replies: Mapping[str, object], status: int = 200) -> Iterator[str]:
    """A server of fixed replies by path; other paths have ``status`` and no text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known_path = self.path in replies
            body = json.dumps(replies[self.path]).encode() if is_known_path else b""
            self.send_response(200 if is_known_path else status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


def check(*overrides: str) -> None:
    check_tools(load_config(None, ["env.name=search_r1", *overrides]))


@pytest.mark.parametrize("setting", ["url=http://127.0.0.1:1", "port=8300", "options.topk=3"])
def test_settings_of_a_tool_that_does_not_exist(setting: str) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown tool 'serch' \(tools\.serch\)\. Did you mean 'search'\?"):
        check(f"tools.serch.{setting}")
    check("tools.python.port=8300")  # of another environment: harmless in a file for several


def test_a_sandbox_backend_that_does_not_exist_is_refused_without_a_tool_in_it() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown sandbox backend 'dokcer' \(sandbox\.backend\)\. Did you mean 'docker'"
    ):
        check("sandbox.backend=dokcer")


@pytest.mark.parametrize(
    ("setting", "shown", "key"),
    [
        ("data.path=hf:owner/name", "hub", "data.path"),
        ("data.eval_path=hf:owner/name:test", "home/datasets/parquet", "data.eval_path"),
        ("eval.path=answers.jsonl", ".", "eval.path"),
        ("eval.sets.hard.path=answers.jsonl", ".", "eval.sets.hard.path"),
        ("tasks.options.path=answers.jsonl", ".", "tasks.options.path"),
    ],
)
def test_code_is_shown_no_file_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, shown: str, key: str
) -> None:
    """Hub datasets are in caches; evaluation sets and options have files, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    (tmp_path / "answers.jsonl").write_text("")
    (tmp_path / shown).mkdir(parents=True, exist_ok=True)
    config = load_config(None, ["env.name=python_math", setting, f"sandbox.readonly=[{tmp_path / shown}]"])
    with pytest.raises(ConfigError, match=rf"shows the run's {key}.* to code in the sandbox"):
        check_tools(config)


def test_a_tool_server_that_does_not_answer() -> None:
    with (
        reserve_port() as port,
        pytest.raises(MissingError, match=rf"^tools\.search\.url=\S+:{port}: .* does not answer") as raised,
    ):
        check(f"tools.search.url=http://127.0.0.1:{port}")
    assert "\n" not in str(raised.value)


def test_all_addresses_of_a_pool_are_checked() -> None:
    with server({"/health": HEALTH, "/tools": SEARCH}) as url, reserve_port() as port:
        check(f"tools.search.url={url}")
        with pytest.raises(MissingError, match=rf"^tools\.search\.url=\S+:{port}: "):
            check(f"tools.search.url='{url},http://127.0.0.1:{port}'")


def test_what_answers_must_be_a_server_with_the_tools_and_our_token() -> None:
    with server({}) as url, pytest.raises(ConfigError, match=r"is not a tool server: .*; change tools\.search\.url$"):
        check(f"tools.search.url={url}")
    with server({"/health": HEALTH, "/tools": {"tools": []}}) as url, pytest.raises(ConfigError, match="has no tool"):
        check(f"tools.search.url={url}")
    with server({"/health": HEALTH}, 401) as url, pytest.raises(ConfigError, match=r"options\.client\.token"):
        check(f"tools.search.url={url}")
