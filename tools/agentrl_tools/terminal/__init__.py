"""Machines of container tasks: the tool ``bash`` for policies, and ``terminal`` for environments, which opens and grades."""

from .bash import BashTool
from .episodes import Episodes
from .options import TerminalOptions
from .service import TerminalService
from .terminal import TerminalTool

__all__ = ["BashTool", "Episodes", "TerminalOptions", "TerminalService", "TerminalTool"]
