"""Tasks from files of prompts: JSONL and parquet."""

from agentrl.data.tasks import FileTasks, read_tasks

__all__ = ["FileTasks", "read_tasks"]
