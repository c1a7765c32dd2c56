"""The verifier `exact`: the response is the reference answer, letter by letter."""

from __future__ import annotations

from rolemesh.protocols.reward import Sample
from rolemesh.rewards.declare import reward_function


@reward_function(needs=("answer",))
def exact(sample: Sample, *, ignore_case: bool = False) -> float:
    """1 if response and answer are equal, else 0. White space at both ends does not count, and inside any run of it counts as one space."""
    if sample.answer is None:
        raise ValueError("the problem has no reference answer")
    return float(_normal(sample.final, ignore_case) == _normal(sample.answer, ignore_case))


def _normal(text: str, ignore_case: bool) -> str:
    joined = " ".join(text.split())
    return joined.casefold() if ignore_case else joined
