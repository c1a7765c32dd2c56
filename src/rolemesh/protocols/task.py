"""The JSON of the `task` column, written by data sources and read by verifiers, with nothing lost on the way.

Plain JSON would turn tuples into lists and number keys into text, and verifiers that compare such values would then call right answers
wrong. So a tuple is written as ``{"$tuple": [...]}`` and a mapping whose keys JSON cannot hold as ``{"$dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

TUPLE: Final = "$tuple"
DICT: Final = "$dict"


def dump_task(task: Mapping[str, Any]) -> str | None:
    """JSON of `task`; None for an empty one. Raises TypeError for values other than text, numbers, booleans, None and containers."""
    return json.dumps(_encode(dict(task)), ensure_ascii=False, separators=(",", ":")) if task else None


def load_task(text: str | None) -> dict[str, Any]:
    """The task that `dump_task` was given."""
    return dict(_decode(json.loads(text))) if text is not None else {}


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                return {DICT: [[_encode(key), _encode(item)] for key, item in value.items()]}
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, tuple):
        return {TUPLE: [_encode(item) for item in value]}
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if TUPLE in value:
            return tuple(_decode(item) for item in value[TUPLE])
        if DICT in value:
            return {_decode(key): _decode(item) for key, item in value[DICT]}
        return {key: _decode(item) for key, item in value.items()}
    return value
