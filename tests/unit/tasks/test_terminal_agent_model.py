"""The model class of mini-swe-agent in the image of the shell's exercises, with a fake in place of the class that it extends."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from agentrl_tasks.terminal.agent_packages import MODEL

OPENROUTER = """
class OpenRouterModel:
    def __init__(self, **config):
        self.config = config
        self._api_url, self._api_key = "https://elsewhere.test/api/v1/chat/completions", ""
"""


def test_the_model_class_requests_turns_at_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "minisweagent" / "models"
    models.mkdir(parents=True)
    (models / "openrouter_model.py").write_text(OPENROUTER)
    (tmp_path / MODEL.name).write_text(MODEL.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1234/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "key of a session")
    names = ("minisweagent", "minisweagent.models", "minisweagent.models.openrouter_model", MODEL.stem)
    try:
        model = import_module(MODEL.stem).RequestsModel(model_name="policy")
    finally:
        for name in names:
            sys.modules.pop(name, None)
    assert model.config == {"model_name": "policy"}
    assert (model._api_url, model._api_key) == ("http://127.0.0.1:1234/v1/chat/completions", "key of a session")
