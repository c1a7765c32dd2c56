"""What scoring one sample gave (`Outcome`), and the table of many. Pure. Called by `rewards.scorer` and by whoever joins its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from rolemesh.batch import Batch
from rolemesh.batch.columns import EXTRA
from rolemesh.rewards.work import ERROR_KEY, Extra

Status: TypeAlias = Literal["ok", "error", "timeout", "not_finite", "abstained", "environment"]

ERROR_COLUMN: Final = f"{EXTRA}{ERROR_KEY}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The reward of one sample, or why it has none. A row without a reward is masked in training; it never counts as 0."""

    reward: float | None
    """Weighted sum of the parts; None unless the status is `ok`."""
    status: Status = "ok"
    error: str = ""
    """For `error`, `timeout` and `not_finite`: the function, the type of the failure and its message. For `environment`: what it failed
    with."""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Score of each function after its threshold, before its weight."""
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """What functions returned beside the score."""


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
