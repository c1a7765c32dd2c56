"""What scoring one sample gave (`Outcome`), and the table of many. Pure. Called by `rewards.scorer` and by whoever joins its results."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, SupportsFloat, TypeAlias

import pyarrow as pa

from rolemesh.batch import Batch
from rolemesh.batch.columns import EXTRA

Status: TypeAlias = Literal["ok", "error", "not_finite", "abstained"]
Extra: TypeAlias = float | str | None
"""A value beside the score: numbers and booleans as floats, NaN as None, text, anything else as JSON text."""

ERROR_COLUMN: Final = f"{EXTRA}reward_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The reward of one sample, or why it has none. A row without a reward is masked in training; it never counts as 0."""

    reward: float | None
    """Weighted sum of the parts; None unless the status is `ok`."""
    status: Status = "ok"
    error: str = ""
    """For `error` and `not_finite`: the function, the exception's type and message."""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Score of each function after its threshold, before its weight."""
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """What functions returned beside the score."""


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
    wrong = [key for key in extras if not isinstance(key, str) or not key or EXTRA + key == ERROR_COLUMN]
    if wrong:
        raise TypeError(f"returned extras with the key {wrong[0]!r}; keys must be text and not 'reward_error'")
    return (None if score is None else float(score)), {key: _plain(value) for key, value in extras.items()}


def outcome_columns(outcomes: Sequence[Outcome]) -> dict[str, pa.Array]:
    """Columns `reward`, `reward_status`, `extra/reward_error` and one `extra/KEY` for each key of any outcome, gaps null.

    Columns, types and values do not depend on the order of the outcomes: a key whose values are all numbers is a float column, any
    other a text column with numbers as text.
    """
    keys = sorted({key for outcome in outcomes for key in outcome.extras})
    return {
        "reward": pa.array([outcome.reward for outcome in outcomes], pa.float64()),
        "reward_status": pa.array([outcome.status for outcome in outcomes], pa.large_string()),
        ERROR_COLUMN: pa.array([outcome.error or None for outcome in outcomes], pa.large_string()),
        **{EXTRA + key: _extra([outcome.extras.get(key) for outcome in outcomes]) for key in keys},
    }


def concat_scored(batches: Sequence[Batch]) -> Batch:
    """The rows of batches that were scored apart, as if they had been scored together: `extra/` columns that a batch lacks are null."""
    kinds: dict[str, set[str]] = {}
    for batch in batches:
        for name in batch.names:
            if name.startswith(EXTRA):
                kinds.setdefault(name, set()).add(batch.kind(name))
    return Batch.concat([batch.with_columns({name: _aligned(batch, name, kinds[name]) for name in kinds}) for batch in batches])


def top_errors(errors: Sequence[str], count: int = 3) -> list[tuple[str, int]]:
    """The commonest errors and how often each occurred; empty texts are no errors."""
    return Counter(error for error in errors if error).most_common(count)


def _plain(value: Any) -> Extra:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, SupportsFloat):
        number = float(value)
        return number if math.isfinite(number) else None
    return json.dumps(value, sort_keys=True, default=str)


def _extra(values: Sequence[Extra]) -> pa.Array:
    if any(isinstance(value, str) for value in values):
        return pa.array([_text(value) for value in values], pa.large_string())
    return pa.array(values, pa.float64())


def _text(value: Extra) -> str | None:
    return repr(value) if isinstance(value, float) else value


def _aligned(batch: Batch, name: str, kinds: set[str]) -> pa.Array:
    """An extra column as `outcome_columns` of all rows would give it."""
    if name not in batch.names:
        return pa.nulls(len(batch), pa.float64() if kinds == {"float"} else pa.large_string())
    if batch.kind(name) == "float" and kinds != {"float"}:
        return pa.array([_text(value) for value in batch.table.column(name).to_pylist()], pa.large_string())
    return batch.table.column(name)
