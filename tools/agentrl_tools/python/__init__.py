"""Python in the episode's sandbox."""

from .service import PythonOptions, PythonService
from .tool import PythonTool

__all__ = ["PythonOptions", "PythonService", "PythonTool"]
