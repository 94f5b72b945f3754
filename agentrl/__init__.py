"""agentrl: multi-turn agentic reinforcement learning for language models."""

from agentrl.env import AsyncEnv, Env
from agentrl.episode.agent import Agent, Chat
from agentrl.episode.generate import uses_tools
from agentrl.registry import make_env, register_env, register_tool, served_tools
from agentrl.rewards.sample import Sample
from agentrl.task import Task, TaskSet
from agentrl.tool import Tool, ToolService, tool
from agentrl.types import (
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
