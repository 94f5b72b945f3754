"""Exact arithmetic without a sandbox."""

from .evaluate import evaluate
from .numbers import CalculatorError
from .service import CalculatorOptions, CalculatorService
from .tool import CalculatorTool

__all__ = ["CalculatorError", "CalculatorOptions", "CalculatorService", "CalculatorTool", "evaluate"]
