"""The verifier `regex`: a pattern finds the answer in the response."""

from __future__ import annotations

import dataclasses
import re

from rolemesh.protocols.reward import Sample
from rolemesh.rewards.declare import reward_function
from rolemesh.rewards.exact import exact


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
    return exact(_answering(sample, found.group(1) or ""), ignore_case=ignore_case) if found.re.groups else 1.0


def _answering(sample: Sample, text: str) -> Sample:
    return dataclasses.replace(sample, response=text, turns=())
