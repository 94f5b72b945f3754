"""``agentrl gateway``: a policy behind endpoints, without a run."""

import json
import re
import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest
from shared_runs import Running, gone, here

from agentrl.cli.gateway import gateway_config
from agentrl.cli.main import build_parser
from agentrl.gateway.client import AgentClient


def variables(output: str) -> dict[str, str]:
    """Return what the command tells its user to export."""
    return dict(re.findall(r"^export (\w+)=(\S+)$", output, re.MULTILINE))


def test_agents_talk_to_a_policy_and_ctrl_c_writes_what_they_said(tmp_path: Path) -> None:
    run = Running(
        "gateway", "--model", "multihop-warm", "--port", "0", "--out", "sessions.jsonl",
        "sampler.embedded.threads=1", "sampler.embedded.context=512", cwd=tmp_path,
    )  # fmt: skip
    try:
        run.wait_for(lambda: "starts another session" in run.output())
        env = variables(run.output())
        url, key = env["ANTHROPIC_BASE_URL"], {"authorization": f"Bearer {env['OPENAI_API_KEY']}"}
        assert env["OPENAI_BASE_URL"] == f"{url}/v1"
        chat, user = "/v1/chat/completions", [{"role": "user", "content": "Who founded Gabecorp?"}]
        with httpx.Client(base_url=url, headers=key, timeout=60, verify=False) as client:
            turn = client.post(chat, json={"messages": user, "max_tokens": 4}).json()["choices"][0]["message"]
            messages = [*user, turn, {"role": "user", "content": "And where?"}]
            stream = client.post(chat, json={"messages": messages, "max_tokens": 4, "stream": True})
            assert stream.text.endswith("data: [DONE]\n\n")
            assert client.post("/v1/session/end", json={"reward": 0.5}).json() == {"turns": 2}
            # The same key has the next session at once.
            reply = client.post("/v1/messages", json={"messages": user, "max_tokens": 4}).json()
            assert reply["usage"]["output_tokens"] == 4
            full = [{"role": "user", "content": "word " * 600}]
            assert "rollout.max_tokens" in client.post("/v1/responses", json={"input": full}).text
            assert client.post("/v1/responses", json={"input": user, "max_output_tokens": 4}).status_code == 200
        sessions = AgentClient(url)
        session = sessions.start()
        assert session is not None
        with httpx.Client(base_url=session.session_url, timeout=60, verify=False) as client:
            assert client.post("/chat/completions", json={"messages": user, "max_tokens": 4}).status_code == 200
        processes = [psutil.Process(run.process.pid), *run.descendants()]
        run.send(signal.SIGINT)
        assert run.finish() == 0, run.output()
        assert gone(processes) == []
    finally:
        run.end()
    rollouts = [json.loads(line) for line in (tmp_path / "sessions.jsonl").read_text().splitlines()]
    first, *others = rollouts
    assert (first["prompt_id"], first["reward"], len(first["rows"]), len(first["turns"])) == ("session-0", 0.5, 1, 2)
    # Those that were open when it ended: of the standing key, and of the client.
    assert sorted(rollout["prompt_id"] for rollout in others) == ["session-1", "session-2"]
    assert all(sum(row["mask"]) == 4 for rollout in others for row in rollout["rows"])
    audited = here("audit", "sessions.jsonl", cwd=tmp_path)
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert "session-0" in here("view", "sessions.jsonl", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "old.jsonl"], "--out old.jsonl: old.jsonl exists"),
        (["--out", "samples.txt"], "end it in .jsonl or .parquet"),
        (["--host", "0.0.0.0"], "set AGENTRL_AGENT_TOKEN in the environment"),
        (["--port", "PORT"], "rollout.agent.port (--port of agentrl gateway)"),
        (["--port", "70000"], "rollout.agent.port"),
        (["--model", "no/such/model/at all"], "--model"),
    ],
)
def test_mistakes_are_told(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = [str(listener.getsockname()[1]) if word == "PORT" else word for word in words]
        model = [] if "--model" in words else ["--model", "multihop-warm"]
        done = here("gateway", *model, *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ([], 2048),  # the model's positions
        (["sampler.embedded.context=512"], 512),
        (["rollout.max_tokens=256"], 256),
        (["sampler.backend=sglang"], 2040),
        (["sampler.backend=sglang", "sampler.sglang.context_length=1024"], 1016),
    ],
)
def test_a_conversation_may_be_as_long_as_engine_and_model_take(settings: list[str], tokens: int) -> None:
    parser = build_parser("gateway")
    config = gateway_config(parser.parse_args(["gateway", "--model", "multihop-warm", *settings]))
    assert config.rollout.max_tokens == tokens


@pytest.mark.parametrize(
    ("words", "port"),
    [([], 8100), (["rollout.agent.port=0"], 0), (["rollout.agent.port=0", "--port=9000"], 9000)],
    ids=["default", "key", "option"],
)
def test_the_port_is_that_of_the_option_or_else_of_the_key(words: list[str], port: int) -> None:
    parser = build_parser("gateway")
    config = gateway_config(parser.parse_args(["gateway", "--model", "multihop-warm", *words]))
    assert config.rollout.agent is not None
    assert (config.rollout.agent.host, config.rollout.agent.port) == ("127.0.0.1", port)
