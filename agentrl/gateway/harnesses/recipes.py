"""The recipes by name. docs/how_to/agent_harnesses.md has a section for each."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.sandbox import SandboxLimits
from agentrl.gateway.harnesses.base import Harness

if TYPE_CHECKING:
    from agentrl.gateway.harnesses.installed import Installation

_PYTHON = SandboxLimits(cpu_s=600, memory_mb=1024, processes=128, open_files=1024, output_kb=16384)
_JAVASCRIPT = SandboxLimits(
    cpu_s=600, memory_mb=2048, processes=256, open_files=4096, file_mb=256, disk_mb=1024, inodes=65536, output_kb=16384
)

HARNESSES = {
    "mini_swe_agent": Harness(
        command=(
            "mini", "--model=openai/$OPENAI_MODEL", "--agent-class=default", "--cost-limit=0",
            "--output=$HOME/trajectory.json", "--config=mini.yaml", "--config=$HOME/task.yaml",
            "--config=model.model_kwargs.api_base=$OPENAI_BASE_URL",
        ),
        install="pip install mini-swe-agent==2.4.6",
        tried="2.4.6",
        distribution="mini-swe-agent",
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        home_files={"task.yaml": "run: {task: $PROMPT_YAML}"},  # a word of a command has 128 KiB at most
        limits=_PYTHON,
    ),
    "claude_code": Harness(
        command=("claude", "--print", "--dangerously-skip-permissions", "--model=$ANTHROPIC_MODEL"),
        install="npm install --global @anthropic-ai/claude-code@2.1.332",
        tried="2.1.332",
        env={
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",  # all tools are in the first request
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
            "IS_SANDBOX": "1",  # root may skip permissions only so
        },
        limits=_JAVASCRIPT,
    ),
    "codex": Harness(
        command=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"),
        install="npm install --global @openai/codex@0.171.0",
        tried="0.171.0",
        home_files={
            ".codex/config.toml": """
model = "$OPENAI_MODEL"
model_provider = "agentrl"
check_for_update_on_startup = false

[model_providers.agentrl]
name = "agentrl"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
requires_openai_auth = false

[analytics]
enabled = false

[features]
apps = false
plugins = false
"""
        },
        limits=_JAVASCRIPT,
    ),
    "opencode": Harness(
        command=("opencode", "run", "--title=task", "--model=agentrl/$OPENAI_MODEL"),
        install="npm install --global opencode-ai@1.18.33",
        tried="1.18.33",
        env={
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "npm_config_offline": "true",  # it installs its plugin package otherwise
        },
        home_files={
            ".config/opencode/opencode.json": """
{
  "autoupdate": false,
  "share": "disabled",
  "permission": {"*": "allow"},
  "provider": {
    "agentrl": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "agentrl",
      "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {"$OPENAI_MODEL": {"name": "$OPENAI_MODEL", "tool_call": true}}
    }
  }
}
"""
        },
        limits=_JAVASCRIPT,
    ),
    "openai_agents": Harness(
        command=("python3",),
        install="pip install openai-agents==0.24.0",
        tried="0.24.0",
        distribution="openai-agents",
        script=Path(__file__).with_name("openai_agents.py"),
        limits=_PYTHON,
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    ),
    "smolagents": Harness(
        command=(
            "smolagent", "--model-type=OpenAIModel", "--model-id=$OPENAI_MODEL", "--api-base=$OPENAI_BASE_URL",
            "--api-key=$OPENAI_API_KEY", "--imports", "*", "--tools", "--",
        ),
        install="pip install 'smolagents[openai]==1.26.0'",
        tried="1.26.0",
        distribution="smolagents",
        script=Path(__file__).with_name("smolagents_prompt.py"),
        limits=_PYTHON,
    ),
}  # fmt: skip


@cache
def installed_harness(name: str, path: str | None, key: str) -> Installation:
    """Return how a program is installed on this machine; see `Harness.check`."""
    return HARNESSES[name].check(name, path, key)
