"""Evaluates an expression by walking its syntax tree; nothing of it is ever executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

from .functions import CONSTANTS, FUNCTIONS
from .numbers import MAX_DIGITS, CalculatorError, Number, check_size, literal, power

MAX_CHARS = 2000
"""Characters of an expression. With numbers of bounded size this bounds the time too: some milliseconds."""
MAX_DEPTH = 100
"""How deep an expression may be nested."""

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "π": " pi ", "\n": " ", "\r": " "})
_OPERATORS: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda dividend, divisor: Fraction(dividend // divisor),
    ast.Mod: operator.mod,
    ast.Pow: power,
}


def evaluate(expression: str) -> Number:
    """Return the value of an expression in Python's notation; ``^`` is a power, too.

    Raises:
        CalculatorError: it is not an expression, or too large.
    """
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"an expression may have {MAX_CHARS} characters, this one has {len(expression)}")
    text = expression.translate(_SIGNS).replace("^", "**").strip()
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise CalculatorError(f"this is no expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise CalculatorError("the expression is nested too deeply") from None
    except ValueError:  # of characters that no source may hold
        raise CalculatorError("this is no expression") from None
    return _Walk(text).value(tree, 0)


class _Walk:
    def __init__(self, text: str) -> None:
        self._source = text.encode("utf-8", "surrogatepass")

    def value(self, node: ast.expr, depth: int) -> Number:
        if depth > MAX_DEPTH:
            raise CalculatorError("the expression is nested too deeply")
        try:
            return check_size(self._value(node, depth + 1))
        except ZeroDivisionError:
            raise CalculatorError("division by zero") from None
        except OverflowError:
            raise CalculatorError("the result is too large") from None

    def _value(self, node: ast.expr, depth: int) -> Number:
        match node:
            case ast.Constant():
                return self._literal(node)
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand, depth)
            case ast.UnaryOp(op=ast.UAdd()):
                return self.value(node.operand, depth)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return self._chain(node, depth)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                return _call(name, [self.value(argument, depth) for argument in node.args])
            case ast.Name(id=name) if name in CONSTANTS:
                return CONSTANTS[name]
        raise CalculatorError(_refusal(node))

    def _chain(self, node: ast.BinOp, depth: int) -> Number:
        """Return the value of ``1 + 2 - 3 + …``, which nests to the left, without a deeper stack for a longer one."""
        steps: list[ast.BinOp] = [node]
        while isinstance(node.left, ast.BinOp):
            node = node.left
            steps.append(node)
        result = self.value(node.left, depth)
        for step in reversed(steps):
            if type(step.op) not in _OPERATORS:
                raise CalculatorError(_refusal(step))
            result = check_size(_OPERATORS[type(step.op)](result, self.value(step.right, depth)))
        return result

    def _literal(self, node: ast.Constant) -> Fraction:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise CalculatorError(f"{node.value!r:.40} is no number")
        if isinstance(node.value, int):
            return Fraction(node.value)
        # The float has lost digits: what stands there has them all.
        return literal(self._source[node.col_offset : node.end_col_offset].decode())


def _call(name: str, arguments: list[Number]) -> Number:
    try:
        return FUNCTIONS[name](*arguments)
    except TypeError:
        raise CalculatorError(f"{name} does not take {len(arguments)} numbers") from None


def _refusal(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            return f"there is no {name[:40]!r}; there are: {', '.join([*CONSTANTS, *FUNCTIONS])}"
        case ast.Tuple():
            return "one expression a call, and no commas within numbers"
        case ast.Starred():
            return "a list is no number"
    return f"{type(node).__name__} is not arithmetic; numbers may have {MAX_DIGITS} digits, with + - * / // % ** and functions"
