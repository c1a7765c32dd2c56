"""What a scoring function says about itself, so that data which it cannot score is refused before the run starts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_PREPARE: Final = "__rolemesh_prepare__"
_CHECK: Final = "__rolemesh_check__"


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

    def declare(function: F) -> F:
        function.needs = tuple(needs)  # type: ignore[attr-defined]
        function.sources = None if sources is None else frozenset(sources)  # type: ignore[attr-defined]
        setattr(function, _PREPARE, prepare or _nothing)
        setattr(function, _CHECK, check or _nothing)
        return function

    return declare


def declared_needs(function: Callable[..., Any]) -> tuple[str, ...]:
    """What `reward_function` declared as needed."""
    return tuple(getattr(function, "needs", ()))


def declared_sources(function: Callable[..., Any]) -> frozenset[str] | None:
    """The sources that `reward_function` declared; None when it declared none."""
    return getattr(function, "sources", None)


def declared_preparation(function: Callable[..., Any]) -> Callable[[], object]:
    """The `prepare` that `reward_function` declared; one that does nothing otherwise."""
    prepare: Callable[[], object] = getattr(function, _PREPARE, _nothing)
    return prepare


def declared_check(function: Callable[..., Any]) -> Callable[..., object]:
    """The `check` that `reward_function` declared; one that accepts everything otherwise."""
    check: Callable[..., object] = getattr(function, _CHECK, _nothing)
    return check


def _nothing(**options: object) -> None:
    pass
