"""How a worker is made, as one short text, so that a controller can tell whether one that it finds is the one that it would make."""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

UNKNOWN = ""
"""Of workers whose settings cannot be compared: they are made anew."""


class _Plain(pickle.Pickler):
    """Equal settings give equal bytes: nothing depends on which objects are the same one, or on how a config came about."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.fast = True

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, BaseModel):
            return NotImplemented
        read_again = type(value).model_validate(value.model_dump())  # defaults as they would be read: 0.0 for a float of 0
        return type(value), (dict(read_again),)


def make_of(worker_class: type, context: Any, kwargs: Mapping[str, Any]) -> str:
    """A digest of class, place among its group, and settings. The class counts with its source, as a notebook may define it anew."""
    file = io.BytesIO()
    try:
        _Plain(file).dump((worker_class.__module__, worker_class.__qualname__, context, dict(kwargs)))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError):
        return UNKNOWN
    code = "".join(_source(base) for base in worker_class.__mro__ if base.__module__ == worker_class.__module__)
    return hashlib.sha256(file.getvalue() + code.encode()).hexdigest()[:32]


@lru_cache(maxsize=64)
def _source(code: type) -> str:
    """Finding it means parsing the whole module: once for a class, not once a rank."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # typed in somewhere
        return ""
