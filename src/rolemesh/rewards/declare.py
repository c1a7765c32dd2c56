"""What a scoring function says about itself, so that data which it cannot score is refused before the run starts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_DECLARED: Final = "__rolemesh_reward__"


def _nothing(**options: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What `reward_function` was told; by default that the function scores anything."""

    needs: tuple[str, ...] = ()
    sources: frozenset[str] | None = None
    prepare: Callable[[], object] = _nothing
    check: Callable[..., object] = _nothing


def reward_function(
    *,
    needs: Collection[str] = (),
    sources: Collection[str] | None = None,
    prepare: Callable[[], object] | None = None,
    check: Callable[..., object] | None = None,
) -> Callable[[F], F]:
    """Decorator for scoring functions, built-in or a user's own; without it a function is taken to score anything.

    `needs` names what every problem must have: `answer`, or `task.KEY` for a key of `Sample.task`. `sources` names the only values of
    `Sample.source` that the function knows. `check_rewards` compares both with the data. `prepare` is called once, in the process from
    which all scoring processes are forked: there belong imports and tables that would cost each of them time and memory. `check` is
    called with the options before the run starts and raises ValueError for values that cannot be used.
    """
    known = None if sources is None else frozenset(sources)
    told = Declared(needs=tuple(needs), sources=known, prepare=prepare or _nothing, check=check or _nothing)

    def declare(function: F) -> F:
        setattr(function, _DECLARED, told)
        return function

    return declare


def declared(function: Callable[..., Any]) -> Declared:
    """What a function says about itself."""
    told: Declared = getattr(function, _DECLARED, Declared())
    return told
