"""The built-in verifiers by name, and those that need no library. Importing this loads neither reasoning-gym nor math-verify; each is
imported when it first scores."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Final

from rolemesh.protocols.reward import Sample
from rolemesh.rewards.declare import reward_function
from rolemesh.rewards.maths import math_verify
from rolemesh.rewards.reasoning import reasoning_gym


def environment(sample: Sample) -> float | None:
    """The sum of the rewards of the episode's turns; abstains where the environment gave none."""
    return sample.environment_reward


@reward_function(needs=("answer",))
def exact(sample: Sample, *, ignore_case: bool = False) -> float:
    """1 if response and answer are equal, else 0. White space at both ends does not count, and inside any run of it counts as one space."""
    if sample.answer is None:
        raise ValueError("the problem has no reference answer")
    return float(_normal(sample.final, ignore_case) == _normal(sample.answer, ignore_case))


def _normal(text: str, ignore_case: bool) -> str:
    joined = " ".join(text.split())
    return joined.casefold() if ignore_case else joined


def _check(*, pattern: object, **options: object) -> None:
    if not isinstance(pattern, str):
        raise ValueError(f"pattern must be text, found {pattern!r}")
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    if found.groups > 1:
        raise ValueError(f"pattern {pattern!r} has {found.groups} groups; one says where the answer is, write the others as (?:...)")


@reward_function(check=_check)
def regex(sample: Sample, *, pattern: str, ignore_case: bool = False) -> float:
    """1 if the first match of `pattern` in the response gives the right answer, else 0.

    The answer is what the group of the pattern holds; it is compared as by `exact`. A pattern without a group asks for a form alone: any
    match is right, and no reference answer is needed. A response without a match is wrong. Python's `re` syntax; a pattern that takes
    for ever on some response is ended by the deadline. Raises ValueError when a reference answer is needed and missing.
    """
    found = re.search(pattern, sample.final, re.IGNORECASE if ignore_case else 0)
    if found is None:
        return 0.0
    if not found.re.groups:
        return 1.0
    return exact(dataclasses.replace(sample, response=found.group(1) or "", turns=()), ignore_case=ignore_case)


REWARDS: Final[dict[str, Callable[..., float | None]]] = {
    "environment": environment,
    "exact": exact,
    "regex": regex,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}
