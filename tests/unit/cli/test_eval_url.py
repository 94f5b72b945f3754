"""`agentrl eval --url` and `agentrl rollout --url` against a server whose replies a test writes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config.sft import SftConfig
from agentrl.config.tasks import DataConfig
from agentrl.core.types import Rollout
from agentrl.data.chats import ChatConversion
from agentrl.data.rows import open_table
from agentrl.evaluation import evaluate_policy, sample_to_file
from agentrl.obs.rollouts import RolloutFile, read_rollouts

ENV = '''
from agentrl import Env, Message, tool


@tool(timeout_s=5)
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Sums(Env):
    """Pays 1 for the right sum."""

    tools = (add,)

    def step(self, action):
        right = action.content.strip() == self.task.answer
        return (), float(right), True, False, {"metrics": {"right": float(right)}}
'''


@dataclass
class Model:
    """A model that calls ``add``, and says what it returns."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    fault: Callable[[dict[str, Any]], tuple[int, Any] | None] = lambda body: None
    """Returns a status and a body in place of the turn."""

    def reply(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append(body)
        if (fault := self.fault(body)) is not None:
            return fault
        last = body["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": last["content"]}
        if last["role"] == "user" and "tools" in body:
            a, _, b = last["content"].split()
            function = {"name": "add", "arguments": json.dumps({"a": int(a), "b": int(b)})}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            }
        usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 5}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


@pytest.fixture
def model() -> Iterator[Model]:
    served = Model()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, content = served.reply({**body, "key": self.headers.get("authorization")})
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield served
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(ENV)
    rows = [{"prompt": f"{n} plus {n + 1}", "answer": str(2 * n + 1), "id": f"q{n}"} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


WORDS = ("--env", "sums.py:Sums", "data.label_key=answer", "data.id_key=id")


def run(command: str, *words: str) -> tuple[int, str, str]:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        data = "data.path=sums.jsonl" if command == "rollout" else "data.eval_path=sums.jsonl"
        code = main([command, *WORDS, data, *words])
    return code, out.getvalue(), " ".join(errors.getvalue().split())


def evaluate(model: Model, *words: str) -> tuple[int, str, str]:
    return run("eval", "--url", model.url, "--model", "big", *words)


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_an_interrupt_while_engines_start_ends_in_order(
    command: str, model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    @contextlib.asynccontextmanager
    async def opening(*_: object) -> AsyncIterator[None]:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
            yield
        finally:
            ended.append(True)

    for module in (evaluate_policy, sample_to_file):
        monkeypatch.setattr(module, "open_policy", opening)
    words = ("--tasks", "2", "--out", "out.jsonl") if command == "rollout" else ()
    code, _, errors = run(command, "--url", model.url, "--model", "big", *words)
    assert code == 1
    assert "stopped: interrupted by SIGINT" in errors
    assert ended
    assert not (folder / "out.jsonl").exists()


def test_a_full_disk_says_how_an_evaluation_is_resumed(
    model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = RolloutFile.write, itertools.count(1)

    def write_until_full(file: RolloutFile, rollout: Rollout) -> None:
        if next(count) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.lines))
        write(file, rollout)

    monkeypatch.setattr(RolloutFile, "write", write_until_full)
    code, output, errors = evaluate(model, "rollout.concurrency=1", "--rollouts", "out.jsonl")
    assert code == 1
    assert "error: out.jsonl: No space left on device" in errors
    advice = "they are in out.jsonl. The same command with --resume plays the others"
    assert f"2 of 6 rollouts were finished; {advice}" in output


def test_an_evaluation_with_tools(model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIG_KEY", "secret")
    files = ("--json", "out.json", "--rollouts", "out.jsonl")
    code, output, errors = evaluate(model, "--api-key-env", "BIG_KEY", "eval.temperature=0", *files)
    assert code == 0, errors
    result = json.loads((folder / "out.json").read_text())
    assert result["model"] == f"big at {model.url}"
    assert (result["eval/reward"], result["eval/right"], result["eval/turns"], result["eval/failed"]) == (1, 1, 2, 0)
    assert result["sets"]["eval"]["means"]["reward"]["low"] < 1 == result["sets"]["eval"]["means"]["reward"]["high"]
    # One request more finds out whether the endpoint answers, before anything is started.
    assert result["eval/endpoint/requests"] == len(model.requests) == 13
    assert (result["eval/endpoint/prompt_tokens"], result["eval/endpoint/completion_tokens"]) == (6 * (10 + 30), 6 * 10)
    assert "endpoint/requests 13" in output
    assert {(request["model"], request["temperature"], request["key"]) for request in model.requests} == {
        ("big", 0, "Bearer secret")
    }
    rollouts = read_rollouts(folder / "out.jsonl")
    assert all(rollout.rows == [] and rollout.endpoint is not None for rollout in rollouts)
    assert "secret" not in (folder / "out.jsonl").read_text() + (folder / "out.json").read_text() + output


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_rollouts_can_be_read_audited_viewed_and_fine_tuned_on(model: Model, folder: Path, name: str) -> None:
    code, _, errors = run("rollout", "--url", model.url, "--model", "big", "--tasks", "6", "--out", name,
                               "rollout.n_samples_per_prompt=1", "rollout.batch_size=4")  # fmt: skip
    assert code == 0, errors
    [first, *others] = read_rollouts(folder / name)
    assert len(others) == 5
    assert first.endpoint is not None
    assert [message["role"] for message in first.endpoint.messages] == ["user", "assistant", "tool", "assistant"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["audit", name]) == 0
        assert main(["view", name, "--limit", "2"]) == 0
    shown = " ".join(text.getvalue().split())
    assert "6 of models at endpoints, without token ids" in shown
    assert "a model at an endpoint played, whose tokens are not known" in shown
    assert first.turns[-1].action in shown
    if name.endswith("jsonl"):
        table = open_table(Path(name), "data.path", None)
        chat = ChatConversion(DataConfig(path=Path(name)), SftConfig())(table[0])
        assert chat is not None
        assert [tool.name for tool in chat.tools] == ["add"]
        assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
        [call] = first.endpoint.messages[1]["tool_calls"]
        assert chat.messages[1].tool_calls[0].arguments == json.loads(call["function"]["arguments"])


def test_failed_requests_are_named_and_in_no_mean(model: Model, folder: Path) -> None:
    model.fault = lambda body: (500, {"error": "overloaded"}) if body["messages"][0]["content"] == "3 plus 4" else None
    code, output, errors = evaluate(
        model, "model.endpoint.attempts=1", "rollout.failure.sampler=drop", "--json", "out.json"
    )
    assert code == 0, errors
    result = json.loads((folder / "out.json").read_text())
    assert (result["eval/reward"], result["eval/episodes"]) == (1, 6)
    assert result["eval/failed"] == result["eval/dropped"] == pytest.approx(1 / 6)
    assert result["eval/endpoint/failures"] == 1
    shown = " ".join(output.split())
    assert "eval: 1 of 6 episodes failed, 1 of them are in no mean (rollout.failure): 1 x SamplerError:" in shown
    assert "model big: HTTP 500: overloaded" in shown


def test_too_many_failures_end_it_with_what_it_has(model: Model, folder: Path) -> None:
    model.fault = lambda body: (500, {}) if body["messages"][0]["content"][0] in "01234" else None
    settings = ("model.endpoint.attempts=1", "rollout.failure.sampler=drop", "--rollouts", "out.jsonl")
    code, output, errors = evaluate(model, *settings)
    assert code == 1
    assert "5 of 6 episodes failed for good" in errors
    assert "6 of 6 rollouts were finished; they are in out.jsonl" in errors
    assert "6 of 6 rollouts" in output
    assert len(read_rollouts(folder / "out.jsonl")) == 6


def test_an_interrupt_keeps_what_is_done(model: Model, folder: Path) -> None:
    interrupted = threading.Event()

    def fault(body: dict[str, Any]) -> None:
        if body["messages"][0]["content"] == "4 plus 5":
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.wait(10)

    model.fault = fault
    code, output, errors = evaluate(model, "rollout.concurrency=1", "--rollouts", "out.jsonl")
    interrupted.set()
    assert code == 1
    assert "interrupted by SIGINT. 4 of 6 rollouts were finished; they are in out.jsonl" in errors
    assert "4 of 6 rollouts" in output
    assert "reward" in output
    assert len(read_rollouts(folder / "out.jsonl")) == 4


def test_a_turn_that_its_limit_cut_is_said(model: Model, folder: Path) -> None:
    def fault(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"choices": [{"message": {"content": "7"}, "finish_reason": "length"}]}

    model.fault = fault
    code, output, errors = evaluate(model)
    assert code == 0, errors
    assert "eval: 6 of 6 turns ended at the limit of their tokens; raise eval.max_new_tokens" in " ".join(
        output.split()
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            (401, {"error": {"message": "bad key"}}),
            "HTTP 401: bad key; no key was sent: set model.endpoint.api_key_env",
        ),
        ((404, {"error": "no model big"}), "model big: HTTP 404: no model big; is model.endpoint.url="),
        ((400, {"error": "temperature must be 1"}), "model.endpoint.options sets further fields of requests"),
        ((200, b"<html><title>Proxy</title>"), "the reply is a page of HTML or XML, 'Proxy', and no JSON"),
        ((200, {"object": "list"}), "a reply without choices"),
    ],
)
def test_an_endpoint_that_refuses_is_said_before_anything_starts(
    model: Model, folder: Path, fault: tuple[int, Any], message: str
) -> None:
    model.fault = lambda body: fault
    code, _, errors = evaluate(model)
    assert (code, len(model.requests)) == (2, 1)
    assert message in errors


MISTAKES: list[tuple[str, list[str], str]] = [
    ("eval", ["--model", "big"], "--model big without --url"),
    ("eval", ["--api-key-env", "KEY"], "--api-key-env KEY without --url"),
    ("eval", ["--url", "http://h/v1"], "--url http://h/v1 without --model NAME"),
    ("eval", ["--url", "h:80/v1", "--model", "m"], "'h:80/v1' does not begin with http:// or https://"),
    ("eval", ["--url", "http://h/v1/chat/completions", "--model", "m"], "leave out /chat/completions"),
    ("eval", ["--url", "http://h/v1", "--model", "m", "--checkpoint", "runs/x"], "two policies; leave out one"),
    ("eval", ["--url", "http://h/v1", "--model", "m", "sampler.url=http://e"], "sampler.url=http://e and model.endpoint.url"),
    ("eval", ["--url", "http://h/v1", "--model", "m", "--api-key-env", "NO_SUCH"], "model.endpoint.api_key_env=NO_SUCH"),
    ("eval", ["--url", "https://api.openai.com/v1", "--model", "m"], "model.endpoint.api_key_env=OPENAI_API_KEY"),
    ("eval", ["--url", "http://h/v1", "--model", "m", "rollout.agent.command=python agent.py", "reward=exact_match"],
     "rollout.agent.command=python agent.py with model.endpoint.url=http://h/v1: an agent program gets its turns"),
    ("eval", ["--url", "http://h/v1", "--model", "m", "data.apply_chat_template=false"], "data.apply_chat_template=false"),
    ("eval", ["--url", "http://h/v1", "--model", "m", "model.endpoint.options.stream=true"], "agentrl sets this field"),
    ("eval", ["--url", "http://h/v1", "--model", "m", "model.endpoint.tiemout_s=1"], "timeout_s"),
    ("rollout", ["--url", "http://h/v1", "--model", "m", "--out", "x.txt"], "--out x.txt"),
    ("train", ["model.endpoint.url=http://h/v1", "model.endpoint.model=m"], "can be evaluated (agentrl eval, agentrl rollout)"),
    ("sft", ["model.endpoint.url=http://h/v1", "model.endpoint.model=m"], "can be evaluated (agentrl eval, agentrl rollout)"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "words", "message"), MISTAKES)
def test_mistakes_exit_with_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: list[str], message: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    code, _, errors = run(command, *words)
    assert code == 2
    assert message in errors


def test_nothing_listens(folder: Path) -> None:
    code, _, errors = run("eval", "--url", "http://127.0.0.1:1/v1", "--model", "big", "model.endpoint.attempts=1")
    assert code == 2
    assert "model big: no connection" in errors
    assert "is model.endpoint.url=http://127.0.0.1:1/v1 right, and does it run?" in errors
