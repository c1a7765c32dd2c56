r"""Find the final answer in a mathematical text. Used by `rewards.maths`, for responses and for reference answers.

The rules, the first that applies: the inside of the last complete ``\boxed{...}``; what follows the last ``####`` on its line; for a
response the last number, for a reference the whole text.
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = "####"
_BOXED: Final = re.compile(r"\\boxed\s*\{")
_NUMBER: Final = re.compile(
    r"""
    (?:(?<![\w)\]}.])[-+])?             # a sign, unless it stands between two terms
    (?<![\w.])
    (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))  # 1,234 or 1234
    (?:\.\d+)?                          # .5
    (?:/\d+|[eE][-+]?\d+)?             # a fraction, or a power of ten
    """,
    re.VERBOSE,
)
_MONEY: Final = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_SCIENTIFIC: Final = re.compile(r"([-+]?[\d.]+)[eE]([-+]?\d+)")


def final_answer(text: str) -> str | None:
    """The final answer of a response, or None if it gives none."""
    marked = _marked(text)
    if marked is not None:
        return _tidy(marked) or None
    numbers = [found.group() for found in _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-"))]
    return _tidy(numbers[-1]) if numbers else None


def reference_answer(text: str) -> str:
    """The final answer of a reference: a worked solution with a mark, or the bare answer."""
    marked = _marked(text)
    return _tidy(text if marked is None else marked)


def _marked(text: str) -> str | None:
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, after = text.rpartition(MARK)
    return after.strip().partition("\n")[0] if mark else None


def _last_boxed(text: str) -> str | None:
    r"""Inside of the last ``\boxed{...}`` whose braces close; a cut-off one does not count."""
    for start in reversed([found.end() for found in _BOXED.finditer(text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start:end]
    return None


def _tidy(answer: str) -> str:
    """Without what does not belong to the answer: dollar signs, the full stop of the sentence, commas between thousands. 1e5 in LaTeX."""
    bare = answer.strip().removesuffix(".").strip().strip("$").strip()
    if _MONEY.fullmatch(bare):
        return bare.replace(",", "").replace("$", "")
    return _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", bare) if _SCIENTIFIC.fullmatch(bare) else bare
