"""agentrl: multi-turn agentic reinforcement learning for language models.

The names here are the public interface for environments, tools, tasks, rewards and multi-turn loops of other projects;
`agentrl.testing` has the fakes and contract checks for their tests. `agentrl.algo.base` has the contracts of algorithms.
"""

from agentrl.core.callback import Callback, OptimizerBatch, RunHandle
from agentrl.core.data_source import DataSource
from agentrl.core.env import AsyncEnv, Env, Step
from agentrl.core.errors import ConfigError, MissingError, TaskError, ToolFailure, UserError, unknown_name
from agentrl.core.multi_agent_env import AecAdapter, MultiAgentEnv, MultiReset, MultiStep, Player, RandomPlayer, View
from agentrl.core.registry import make_env, register_env, register_tool, served_tools
from agentrl.core.task import MadeTasks, Task, TaskSet
from agentrl.core.tool import Tool, ToolService, tool
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
)
from agentrl.episode.chat import Agent, Chat
from agentrl.episode.custom_loop import uses_tools
from agentrl.rewards.sample import Sample

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AecAdapter",
    "Agent",
    "AsyncEnv",
    "CallStatus",
    "Callback",
    "Chat",
    "ConfigError",
    "DataSource",
    "Env",
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
    "RandomPlayer",
    "Rewrite",
    "Rollout",
    "RunHandle",
    "Sample",
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
    "TurnGame",
    "UserError",
    "View",
    "make_env",
    "register_env",
    "register_tool",
    "served_tools",
    "tool",
    "unknown_name",
    "uses_tools",
]
