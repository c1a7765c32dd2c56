"""The built-in verifiers by name. Importing this loads neither reasoning-gym nor math-verify; each is imported when it first scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rolemesh.rewards.environment import environment
from rolemesh.rewards.exact import exact
from rolemesh.rewards.maths import math_verify
from rolemesh.rewards.pattern import regex
from rolemesh.rewards.reasoning import reasoning_gym

REWARDS: Final[dict[str, Callable[..., float | None]]] = {
    "environment": environment,
    "exact": exact,
    "regex": regex,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}
