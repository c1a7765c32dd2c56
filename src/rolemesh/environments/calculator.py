"""The tool `calculator`: arithmetic without running what the model wrote."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

LONGEST: Final = 200
"""Characters of an expression."""
LARGEST: Final = 10**30
"""Of any number on the way, so that no expression takes long."""

_OPERATIONS: Final[Mapping[type, Callable[..., Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Works out an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % and parentheses, for example (3 + 4) * 2
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an arithmetic expression: {expression!r}") from error
    return str(value.numerator) if value.denominator == 1 else str(float(value))


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = Fraction(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        value = Fraction(_OPERATIONS[type(node.op)](_value(node.operand)))
    else:
        raise ValueError(f"{ast.unparse(node)} is not arithmetic; use numbers, + - * / // % and parentheses")
    if abs(value.numerator) > LARGEST or value.denominator > LARGEST:
        raise ValueError("a number is too large")
    return value
