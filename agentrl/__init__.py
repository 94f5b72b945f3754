"""agentrl: multi-turn agentic reinforcement learning for language models."""

from agentrl.core.env import AsyncEnv, Env
from agentrl.core.registry import make_env, register_env, register_tool, served_tools
from agentrl.core.task import Task, TaskSet
from agentrl.core.tool import Tool, ToolService, tool
from agentrl.core.types import (
    Message,
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
    "Agent",
    "AsyncEnv",
    "Chat",
    "Env",
    "Message",
    "Rewrite",
    "Rollout",
    "Sample",
    "StopReason",
    "Task",
    "TaskSet",
    "Tool",
    "ToolCall",
    "ToolCalls",
    "ToolResult",
    "ToolResults",
    "ToolService",
    "ToolStatus",
    "make_env",
    "register_env",
    "register_tool",
    "served_tools",
    "tool",
    "uses_tools",
]
