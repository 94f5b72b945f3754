"""``agentrl tools`` as a user types it; nothing here serves."""

from pathlib import Path

import pytest

from agentrl.cli.main import main


def test_search_needs_a_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools", "serve", "search", "--port=0"]) == 2
    assert "--corpus (tools.search.corpus): no corpus given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--config", "none.yaml"), "none.yaml"),
        (("serve", "python", "python.statefull=true"), "tools.python.stateful"),
        (("serve", "python", "server.max_session=3"), "server.max_session"),
        (("serve", "python", "sandbox.backend=podman"), "unknown sandbox backend 'podman' (sandbox.backend)"),
        (("sandbox", "--backend", "dcoker"), "Did you mean 'docker'?"),
        (("sandbox", "--backend", "none.py:Mine"), "none.py"),
        (("sandbox", "--backend", "agentrl.sandbox.base:Sandbox"), "is no subclass"),
        (("sandbox", "--backend", "unsafe_subprocess"), "unsafe_subprocess isolates nothing"),
        (("serve", "python", "--host", "0.0.0.0"), "AGENTRL_TOOLS_TOKEN"),
        (("serve", "python", "nonsense"), "key=value"),
        (("sandbox", "sandbox.limit.wall_s=3"), "sandbox.limit"),
    ],
)
def test_mistakes_exit_with_two_and_name_the_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.delenv("AGENTRL_TOOLS_TOKEN", raising=False)
    assert main(("tools", *words)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve",), "--config"),
        (("serve", "pyton"), "Did you mean 'python'"),
        (("serve", "none.py:tool"), "none.py"),
        (("serve", "search", "--topk=many"), "--topk"),
        (("serve", "python", "--no-such-option"), "--no-such-option"),
        ((), "ACTION"),
    ],
)
def test_words_that_cannot_be_read(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(("tools", *words))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_of_a_tool_shows_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words, shown in (
        (("serve", "search", "--help"), "--corpus"),
        (("serve", "python", "--help"), "key=value"),
        (("serve", "--help"), "file.py:name"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(("tools", *words))
        assert stop.value.code == 0
        assert shown in capsys.readouterr().out


def test_what_is_no_tool_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("three = 3\n")
    with pytest.raises(SystemExit):
        main(("tools", "serve", f"{tmp_path / 'mine.py'}:three"))
    assert "three" in capsys.readouterr().err


def test_the_table_says_why_a_backend_cannot_be_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nobody = f"sandbox.docker_url=unix://{tmp_path}/nobody.sock"
    assert main(("tools", "sandbox", "--backend", "docker", nobody)) == 0
    shown = capsys.readouterr().out
    assert "not usable" in shown
    assert "docker" in shown
