"""Shell commands in the episode's sandbox."""

from .service import ShellOptions, ShellService
from .tool import ShellTool

__all__ = ["ShellOptions", "ShellService", "ShellTool"]
