"""Small pictures out of characters: bars, sparklines and a plot. Pure text, for the display in the terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_EIGHTHS: Final = len(BLOCKS) - 1


def shrink(values: Sequence[float], width: int) -> list[float]:
    """At most `width` numbers: means of neighbours. Every value counts once, in the window that its position falls into."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * column // width for column in range(width + 1)]
    return [math.fsum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]


def bar(share: float, width: int) -> str:
    """A bar of `width` characters, filled from the left by a share of 0 to 1."""
    eighths = round(min(1.0, max(0.0, share)) * width * _EIGHTHS)
    full, rest = divmod(eighths, _EIGHTHS)
    return ("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")).ljust(width)


def sparkline(values: Sequence[float], width: int) -> str:
    """One line of blocks, the smallest value lowest. Equal values give a flat line in the middle."""
    return plot(values, width, 1)[0].rstrip() if values else ""


def plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines of `width` characters, top first: columns of blocks between the smallest and the largest value.

    More values than columns are averaged; every column shows at least one eighth of a block.
    """
    columns = shrink([value for value in values if math.isfinite(value)], width)
    if not columns:
        return [" " * width] * height
    low, high = min(columns), max(columns)
    steps = height * _EIGHTHS - 1
    levels = [1 + (round((value - low) / (high - low) * steps) if high > low else steps // 2) for value in columns]
    lines = []
    for row in reversed(range(height)):
        filled = [min(_EIGHTHS, max(0, level - row * _EIGHTHS)) for level in levels]
        lines.append("".join(BLOCKS[count] for count in filled).ljust(width))
    return lines
