"""The tool of the recipe `tools`: what can't be known, but asked for."""

from __future__ import annotations


def price(item: int) -> int:
    """The price of an item.

    Args:
        item: Number of the item, 10 to 99
    """
    if not 10 <= item <= 99:
        raise ValueError(f"no item {item}")
    return (item * 61 + 17) % 89 + 10
