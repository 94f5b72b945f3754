"""agentrl: multi-turn agentic reinforcement learning for language models."""

from agentrl.env import AsyncEnv, Env
from agentrl.registry import make_env, register_env
from agentrl.task import Task, TaskSet
from agentrl.tool import Tool, ToolService, tool
from agentrl.types import Message, StopReason, ToolCall, ToolCalls, ToolResult, ToolResults, ToolStatus

__version__ = "0.1.0"

__all__ = [
    "AsyncEnv",
    "Env",
    "Message",
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
    "tool",
]
