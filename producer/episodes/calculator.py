"""The tool `calculator`: arithmetic, read as a syntax tree and never evaluated as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

MAX_LENGTH = 500
"""Characters of an expression."""
MAX_BITS = 4096
"""Of an integer, in every step of a calculation."""
Number = int | float

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "abs": abs, "min": min, "max": max, "round": round, "floor": math.floor, "ceil": math.ceil,
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "log2": math.log2, "log10": math.log10,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "gcd": math.gcd,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}
_ROUNDED_TO = range(-15, 16)


class Calculator:
    """Calculates `expression`: numbers, + - * / // % **, parentheses, and some functions. Raises ValueError.

    The cost of a call is bounded by the length of the expression and the size of its integers.
    """

    SCHEMA: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": f"Calculates. Functions: {', '.join(_FUNCTIONS)}. Constants: pi, e.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "For example (3 + 4) * 2 ** 5"}},
                "required": ["expression"],
            },
        },
    }

    async def __call__(self, expression: str) -> str:
        if not isinstance(expression, str) or len(expression) > MAX_LENGTH:
            raise ValueError(f"expression: a text of at most {MAX_LENGTH} characters")
        try:
            value = _value(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"expression: {expression[:80]!r} cannot be read") from None
        except (ArithmeticError, TypeError) as error:
            raise ValueError(f"expression: {error}") from None
        return str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=bool()):  # Python counts True among the integers
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            one, other = _value(left), _value(right)
            if isinstance(op, ast.Pow):
                _check_power(one, other)
            return _bounded(_BINARY[type(op)](one, other))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            given = [_value(argument) for argument in args]
            if name == "round" and len(given) == 2 and given[1] not in _ROUNDED_TO:
                raise ValueError("round: to between -15 and 15 digits")
            return _bounded(_FUNCTIONS[name](*given))
        case _:
            pass
    raise ValueError(f"expression: {ast.unparse(node)[:80]!r} is not arithmetic")


def _check_power(base: Number, exponent: Number) -> None:
    """Before it is taken: its integer may be too large to have."""
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and exponent > 0 and abs(base) > 1 and int(base).bit_length() * exponent > 2 * MAX_BITS:
        raise ValueError(f"expression: a power of more than {MAX_BITS} bits")


def _bounded(value: Any) -> Number:
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    raise ValueError("expression: the result is no finite real number of a reasonable size")
