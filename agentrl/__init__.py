"""agentrl: multi-turn agentic reinforcement learning for language models.

The names here are the public interface for environments, tools, tasks, rewards and multi-turn loops of other projects;
`agentrl.testing` has the fakes and contract checks for their tests. `agentrl.algo.base` has the contracts of algorithms.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from agentrl.core.extras import missing_extra_error

if TYPE_CHECKING:
    from agentrl.api.evaluating import Evaluation, evaluate, rollout
    from agentrl.api.training import Checkpoint, Run, train
    from agentrl.core.callback import Callback, OptimizerBatch, RunHandle
    from agentrl.core.data_source import DataSource
    from agentrl.core.env import AsyncEnv, Env, Step
    from agentrl.core.errors import (
        CallbackError,
        ConfigError,
        MissingError,
        RunStopped,
        TaskError,
        ToolFailure,
        UserError,
        unknown_name,
    )
    from agentrl.core.images import IMAGE_MARK, Image, load_image
    from agentrl.core.multi_agent_env import (
        AecAdapter,
        MultiAgentEnv,
        MultiReset,
        MultiStep,
        Player,
        RandomPlayer,
        View,
    )
    from agentrl.core.policy_evaluation import PolicyEvaluation
    from agentrl.core.registry import make_env, register_env, register_tool, served_tools
    from agentrl.core.task import MadeTasks, Task, TaskSet
    from agentrl.core.tool import Tool, ToolService, tool
    from agentrl.core.training_sample import SampleRow, TrainingSample
    from agentrl.core.turn_game import TurnGame
    from agentrl.core.types import (
        Action,
        CallStatus,
        Info,
        Message,
        Observation,
        Rewrite,
        Rollout,
        StopReason,
        ToolCall,
        ToolCalls,
        ToolResult,
        ToolResults,
        ToolStatus,
        message_with_images,
    )
    from agentrl.episode.chat import Agent, Chat
    from agentrl.episode.custom_loop import uses_tools
    from agentrl.rewards.sample import Sample

__version__ = "0.1.0"

_MODULES = {
    "agentrl.api.evaluating": ("Evaluation", "evaluate", "rollout"),
    "agentrl.api.training": ("Checkpoint", "Run", "train"),
    "agentrl.core.callback": ("Callback", "OptimizerBatch", "RunHandle"),
    "agentrl.core.data_source": ("DataSource",),
    "agentrl.core.env": ("AsyncEnv", "Env", "Step"),
    "agentrl.core.errors": (
        "CallbackError",
        "ConfigError",
        "MissingError",
        "RunStopped",
        "TaskError",
        "ToolFailure",
        "UserError",
        "unknown_name",
    ),
    "agentrl.core.images": ("IMAGE_MARK", "Image", "load_image"),
    "agentrl.core.multi_agent_env": (
        "AecAdapter",
        "MultiAgentEnv",
        "MultiReset",
        "MultiStep",
        "Player",
        "RandomPlayer",
        "View",
    ),
    "agentrl.core.policy_evaluation": ("PolicyEvaluation",),
    "agentrl.core.registry": ("make_env", "register_env", "register_tool", "served_tools"),
    "agentrl.core.task": ("MadeTasks", "Task", "TaskSet"),
    "agentrl.core.tool": ("Tool", "ToolService", "tool"),
    "agentrl.core.training_sample": ("SampleRow", "TrainingSample"),
    "agentrl.core.turn_game": ("TurnGame",),
    "agentrl.core.types": (
        "Action",
        "CallStatus",
        "Info",
        "Message",
        "Observation",
        "Rewrite",
        "Rollout",
        "StopReason",
        "ToolCall",
        "ToolCalls",
        "ToolResult",
        "ToolResults",
        "ToolStatus",
        "message_with_images",
    ),
    "agentrl.episode.chat": ("Agent", "Chat"),
    "agentrl.episode.custom_loop": ("uses_tools",),
    "agentrl.rewards.sample": ("Sample",),
}
"""The names of this package by their modules, which are imported when a name is used: environments and tools need neither torch
nor Ray, and the keeper of an engine nothing of all this."""
_LAZY = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Return a name of `_LAZY`."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        if (extra_error := missing_extra_error(error, f"agentrl.{name}")) is None:
            raise
        raise extra_error from None
    return getattr(module, name)


class _Root(ModuleType):
    """The package: `train` stays the function also once the package ``agentrl.train`` is imported, which would replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _LAZY or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Root


def __dir__() -> list[str]:
    """Return all names, those that are not imported yet included."""
    return sorted({*globals(), *_LAZY})


__all__ = [
    "IMAGE_MARK",
    "Action",
    "AecAdapter",
    "Agent",
    "AsyncEnv",
    "CallStatus",
    "Callback",
    "CallbackError",
    "Chat",
    "Checkpoint",
    "ConfigError",
    "DataSource",
    "Env",
    "Evaluation",
    "Image",
    "Info",
    "MadeTasks",
    "Message",
    "MissingError",
    "MultiAgentEnv",
    "MultiReset",
    "MultiStep",
    "Observation",
    "OptimizerBatch",
    "Player",
    "PolicyEvaluation",
    "RandomPlayer",
    "Rewrite",
    "Rollout",
    "Run",
    "RunHandle",
    "RunStopped",
    "Sample",
    "SampleRow",
    "Step",
    "StopReason",
    "Task",
    "TaskError",
    "TaskSet",
    "Tool",
    "ToolCall",
    "ToolCalls",
    "ToolFailure",
    "ToolResult",
    "ToolResults",
    "ToolService",
    "ToolStatus",
    "TrainingSample",
    "TurnGame",
    "UserError",
    "View",
    "evaluate",
    "load_image",
    "make_env",
    "message_with_images",
    "register_env",
    "register_tool",
    "rollout",
    "served_tools",
    "tool",
    "train",
    "unknown_name",
    "uses_tools",
]
