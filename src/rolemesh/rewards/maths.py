"""The verifier `math_verify`: is the final answer of the response mathematically equal to the reference? The home of `math_verify`.

The library bounds its own running time with alarm signals, which cannot interrupt a long computation in C; so they are switched off here
and what is known to run for ever is refused beforehand, as a wrong answer. The deadline of the scoring pool bounds what remains.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any, Final

from rolemesh.protocols.reward import Sample
from rolemesh.rewards.declare import reward_function
from rolemesh.rewards.final_answer import final_answer, reference_answer

MAX_CHARACTERS: Final = 200
MAX_NESTING: Final = 10
MAX_NODES: Final = 200
MAX_DIGITS: Final = 1000
"""Largest number, in decimal digits, that an answer may stand for."""
MAX_EXPANSION: Final = 20
"""Largest power of a sum with unknowns, which comparing would expand."""


def _prepare() -> None:
    """The library, and what it builds when it first reads an expression."""
    _parse("1")


@reward_function(needs=("answer",), prepare=_prepare)
def math_verify(sample: Sample) -> float:
    r"""1 if the final answer of the response equals that of the reference answer, else 0.

    `final_answer` says which part of the text is the answer: the last ``\boxed{...}``, what follows ``####``, or the last number; of
    several boxes only the last counts. No answer, one that cannot be parsed, and one too large to compare (``9^9^9``: more than 200
    characters, 1000 digits, or sums, products and integrals left to work out) are wrong answers. Raises ValueError when that is true of
    the reference.
    """
    if sample.answer is None:
        raise ValueError("the problem has no reference answer")
    gold = reference_answer(sample.answer)
    expected = _parse(gold)
    if expected is None:
        raise ValueError(f"the reference answer cannot be verified: {gold[:MAX_CHARACTERS]!r} is no expression, or too large to compare")
    given = final_answer(sample.final)
    if given is None:
        return 0.0
    if given == gold:
        return 1.0
    return float(_is_equal(expected, given))


@cache
def _library() -> Any:
    """The library, imported when first needed, without its warning that alarms are off."""
    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library


def _parse(answer: str) -> list[Any] | None:
    """The answer as the library's alternatives (an expression, and its text); None if there is none that is safe to compare."""
    if len(answer) > MAX_CHARACTERS or _nesting(answer) > MAX_NESTING or "binom" in answer:
        return None
    library = _library()
    config = library.LatexExtractionConfig(boxed_match_priority=0)
    found: list[Any] = library.parse(rf"\boxed{{{answer}}}", [config], parsing_timeout=None, raise_on_error=True)
    expressions = [item for item in found if not isinstance(item, str)]
    return found if found and all(_is_comparable(expression) for expression in expressions) else None


def _is_equal(expected: list[Any], given: str) -> bool:
    library = _library()
    try:
        parsed = _parse(given)
        return parsed is not None and bool(library.verify(expected, parsed, timeout_seconds=None, raise_on_error=True))
    except Exception:
        # Odd answers make the library raise; then the answer is wrong. If it fails on the reference too, the verifier is broken.
        if library.verify(expected, expected, timeout_seconds=None, raise_on_error=True):
            return False
        raise


def _nesting(text: str) -> int:
    """Deepest nesting of brackets; the parser's time grows with a power of it."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _is_comparable(expression: Any) -> bool:
    """False for expressions that could take very long to compare: large numbers and powers, many terms, unfinished sums and integrals."""
    import sympy  # type: ignore[import-untyped]

    unfinished = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
    for count, node in enumerate(sympy.preorder_traversal(expression)):
        if count > MAX_NODES or isinstance(node, unfinished):
            return False
        if isinstance(node, sympy.Pow) and node.base.is_Add and node.base.free_symbols and _digits(node.exp) > math.log10(MAX_EXPANSION):
            return False
        if isinstance(node, sympy.Expr) and _digits(node) > MAX_DIGITS:
            return False
    return True


def _digits(node: Any) -> float:
    """Upper estimate of log10 |value| of an expression, unknowns taken as 1; infinite beyond what floats can hold."""
    import sympy

    if isinstance(node, sympy.Number):
        return _digits_of_number(node)
    inner = [_digits(argument) for argument in node.args if isinstance(argument, sympy.Expr)]
    if isinstance(node, sympy.Pow | sympy.exp):
        base = inner[0] if isinstance(node, sympy.Pow) else math.log10(math.e)
        return max(base, math.log10(2)) * _power_of_ten(inner[-1])
    if isinstance(node, sympy.factorial | sympy.gamma):
        value = _power_of_ten(inner[0])
        return value * max(1.0, inner[0])  # n! < n^n
    if isinstance(node, sympy.Mul):
        return sum(digits for digits in inner if digits > 0)
    return max(inner, default=0.0) + math.log10(max(len(inner), 1))


def _digits_of_number(number: Any) -> float:
    if number.is_Rational:
        return max(abs(int(number.p)), abs(int(number.q))).bit_length() * math.log10(2)
    value = abs(float(number))
    if number.is_zero or not number.is_finite:
        return 0.0
    return abs(math.log10(value)) if 0 < value < math.inf else math.inf


def _power_of_ten(digits: float) -> float:
    return 10.0**digits if digits < 300 else math.inf
