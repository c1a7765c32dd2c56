"""Names of a package that are imported when they are used, so that a process loads only what its work needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose modules (the keys of `homes`) have these names. Type checkers need the imports all the same,
    under `TYPE_CHECKING`, and shall not see this `__getattr__`."""
    home_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return get
