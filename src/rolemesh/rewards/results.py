"""What a scoring function may return, taken apart into plain data. Pure, and light to import: it runs where the functions run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, SupportsFloat, TypeAlias

Extra: TypeAlias = float | str | None
"""A value beside the score: numbers and booleans as floats, NaN as None, text, anything else as JSON text."""

ERROR_KEY: Final = "reward_error"
"""Key of the extras that is rolemesh's own."""


def split_result(result: Any) -> tuple[float | None, dict[str, Extra]]:
    """(score, extras) of what a function returned: a number or None, a pair (score, extras), or a mapping with the key `score`.

    Raises TypeError for anything else, and what converting a value raises.
    """
    score, extras = result, {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"returned a mapping without the key 'score': {sorted(map(str, result))}")
        extras = {key: value for key, value in result.items() if key != "score"}
        score = result["score"]
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        score, extras = result[0], dict(result[1])
    if score is not None and (isinstance(score, str | bytes) or not isinstance(score, SupportsFloat)):
        raise TypeError(f"returned {type(score).__name__}, expected a number, None, (number, extras) or a mapping with 'score'")
    wrong = [key for key in extras if not isinstance(key, str) or not key or key == ERROR_KEY]
    if wrong:
        raise TypeError(f"returned extras with the key {wrong[0]!r}; keys must be text and not {ERROR_KEY!r}")
    return (None if score is None else float(score)), {key: _plain(value) for key, value in extras.items()}


def _plain(value: Any) -> Extra:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, SupportsFloat):
        number = float(value)
        return number if math.isfinite(number) else None
    return json.dumps(value, sort_keys=True, default=str)
