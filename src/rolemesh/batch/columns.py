"""The columns that travel between roles, each declared once: the protocol of the system.

A role reads some columns and writes others (`@register(reads=..., writes=...)`); what a column means is said here and nowhere else.
Every row is one sample and is identified by (`draw`, `sample`): `draw` counts prompts taken from the data stream and never repeats
in a run, `sample` numbers the answers to that prompt. Rows are joined by this id, never by position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

from rolemesh.errors import BatchError
from rolemesh.registry import nearest

Kind = Literal["tokens", "token_floats", "int", "float", "bool", "string", "binary"]

ARROW_TYPES: Final[dict[Kind, pa.DataType]] = {
    "tokens": pa.large_list(pa.int32()),
    "token_floats": pa.large_list(pa.float32()),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.large_string(),
    "binary": pa.large_binary(),
}

ID: Final = ("draw", "sample")

COUNTED: Final[tuple[str, ...]] = ("prompt_ids", "response_ids")
"""The columns whose lengths add up to the token count of a row, by which batches are balanced and cut."""

EXTRA: Final = "extra/"
"""Prefix of columns that are not declared here: a user's own scalars, always nullable."""

EXTRA_KINDS: Final[tuple[Kind, ...]] = ("int", "float", "bool", "string")
RAGGED_KINDS: Final[tuple[Kind, ...]] = ("tokens", "token_floats")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow kind, the role that writes it, what it means, and whether a row may lack a value (scalar kinds only).

    A whole batch may lack an `optional` column; who reads it then works without it."""

    name: str
    kind: Kind
    producer: str
    meaning: str
    nullable: bool = False
    optional: bool = False


def _declare(*columns: Column) -> dict[str, Column]:
    return {column.name: column for column in columns}


COLUMNS: Final[dict[str, Column]] = _declare(
    Column("draw", "int", "data", "number of the prompt in the data stream of the run, from 0, never repeated"),
    Column("sample", "int", "data", "number of the answer to this prompt, from 0"),
    Column("source", "string", "data", "data source of the prompt, for rewards and metrics by source"),
    Column("prompt", "string", "data", "prompt text as given to the tokenizer"),
    Column("messages", "string", "data", "JSON of the chat messages that the prompt was made of; with `data.chat` only", optional=True),
    Column("prompt_ids", "tokens", "data", "token ids of the prompt, exactly one BOS where the model has one"),
    Column("answer", "string", "data", "reference answer, if the source has one", nullable=True),
    Column("task", "string", "data", "JSON with what the verifier of the source needs beyond the answer", nullable=True),
    Column("response_ids", "tokens", "rollout", "sampled token ids, the sampled end token included"),
    Column("response", "string", "rollout", "text of `response_ids` without special tokens"),
    Column(
        "rollout_logprobs",
        "token_floats",
        "rollout",
        "log-probability of each sampled token in the engine, after temperature; 0 for one that a tool put in",
    ),
    Column(
        "response_mask",
        "tokens",
        "rollout",
        "1 for each token of response_ids that the policy sampled, 0 for one that a tool put in; without it all were sampled",
        optional=True,
    ),
    Column(
        "turns",
        "string",
        "rollout",
        "JSON of an answer of several turns: [{role, text, tokens}, ...], by the model (`assistant`), tools and environment",
        optional=True,
    ),
    Column(
        "environment_reward",
        "float",
        "rollout",
        "sum of the rewards that the environment gave; null where it gave none",
        nullable=True,
        optional=True,
    ),
    Column(
        "environment_error",
        "string",
        "rollout",
        "what the environment failed with; the row has no reward then",
        nullable=True,
        optional=True,
    ),
    Column("response_length", "int", "rollout", "number of sampled tokens of response_ids"),
    Column("finish_reason", "string", "rollout", "stop (end token), length (cut) or abort"),
    Column("weight_version", "int", "rollout", "version of the weights that sampled the row; the oldest, if several did"),
    Column(
        "weight_spans",
        "string",
        "rollout",
        "JSON [[version, first token, end], ...] of a row that went on over a change of weights; null where one version sampled it",
        nullable=True,
        optional=True,
    ),
    Column("engine", "string", "rollout", "name of the engine that sampled the row"),
    Column("reward", "float", "reward", "total reward; null when scoring failed or abstained, and then the row is masked", nullable=True),
    Column("reward_status", "string", "reward", "ok, or why there is no reward: error, timeout, not_finite, abstained, environment"),
    Column("ref_logprobs", "token_floats", "ref", "log-probability of each response token under the reference model, after temperature"),
    Column(
        "kl",
        "float",
        "ref",
        "estimated divergence of the sampling policy from the reference model, mean over the row's sampled tokens, in nats",
    ),
    Column(
        "values",
        "token_floats",
        "critic",
        "the critic's value of the state before each response token is sampled, at the start of the step",
    ),
    Column(
        "advantages",
        "token_floats",
        "algorithm",
        "advantage of each response token, not yet normalised (algorithms with a critic); 0 for tokens that are not trained",
    ),
    Column(
        "returns", "token_floats", "algorithm", "what the value of each response token should have been; 0 for tokens that are not trained"
    ),
    Column(
        "advantage",
        "float",
        "algorithm",
        "advantage of every response token of the row; with a critic the mean of `advantages` over its sampled tokens",
    ),
    Column(
        "advantage_spread",
        "float",
        "algorithm",
        "sum over the row's sampled tokens of the squared distance of `advantages` from `advantage`",
    ),
    Column("return_mean", "float", "algorithm", "mean of `returns` over the row's sampled tokens"),
    Column(
        "return_spread", "float", "algorithm", "sum over the row's sampled tokens of the squared distance of `returns` from `return_mean`"
    ),
    Column("token_weight", "float", "algorithm", "weight of each response token of the row in the loss of its mini-batch; 0 masks the row"),
    Column("minibatch", "int", "algorithm", "mini-batch of the step that the row belongs to, from 0"),
)


_OPTIONAL: Final = frozenset(column.name for column in COLUMNS.values() if column.optional)


def kind_of(name: str, arrow_type: pa.DataType) -> Kind:
    """Kind of a stored column. Raises BatchError when the name is not declared or the type is not the declared one."""
    allowed: Sequence[Kind] = (COLUMNS[name].kind,) if name in COLUMNS else EXTRA_KINDS
    check_name(name)
    for kind in allowed:
        if ARROW_TYPES[kind] == arrow_type:
            return kind
    expected = " or ".join(f"{kind} ({ARROW_TYPES[kind]})" for kind in allowed)
    raise BatchError(f"column {name!r} has the Arrow type {arrow_type}; expected {expected}")


def check_name(name: str) -> None:
    """Raise BatchError unless `name` is declared or carries the prefix for a user's own columns."""
    if name in COLUMNS or (name.startswith(EXTRA) and len(name) > len(EXTRA)):
        return
    hint = nearest(name, COLUMNS)
    did_you_mean = f"Did you mean {hint!r}? " if hint else ""
    raise BatchError(f"column {name!r} is not declared. {did_you_mean}A column of your own needs a name like {EXTRA + name!r}")


def is_nullable(name: str) -> bool:
    """True if a row may lack a value: null there means missing, failed or abstained."""
    return COLUMNS[name].nullable if name in COLUMNS else True


def readable(reads: Iterable[str], present: Collection[str]) -> tuple[str, ...]:
    """The names of `reads` without the ids and without optional columns that are not `present`: what a role that reads these gets."""
    return tuple(dict.fromkeys([name for name in reads if name not in ID and (name not in _OPTIONAL or name in present)]))


def missing_columns(missing: Iterable[str], present: Iterable[str]) -> BatchError:
    """The error for columns that a batch does not hold: says what is there and which role writes the missing ones."""
    wanted = []
    for name in missing:
        hint = nearest(name, COLUMNS)
        if name in COLUMNS:
            wanted.append(f"{name!r} (written by {COLUMNS[name].producer})")
        else:
            wanted.append(f"{name!r} (not declared{f'; did you mean {hint!r}?' if hint else ''})")
    return BatchError(f"the batch has no column {', '.join(wanted)}; it has {', '.join(present)}")


def columns_reference() -> str:
    """The declared columns as a Markdown table, for the documentation."""
    lines = ["| column | kind | null | written by | meaning |", "|---|---|---|---|---|"]
    for column in COLUMNS.values():
        null = "yes" if column.nullable else "no"
        lines.append(f"| `{column.name}` | {column.kind} | {null} | {column.producer} | {column.meaning} |")
    lines.append(f"| `{EXTRA}...` | {', '.join(EXTRA_KINDS)} | yes | user | a column of your own |")
    return "\n".join(lines) + "\n"
