"""The columns that travel between roles, each declared once: the protocol of the system.

A role reads some columns and writes others (`@register(reads=..., writes=...)`); what a column means is said here and nowhere else.
Every row is one sample and is identified by (`draw`, `sample`): `draw` counts prompts taken from the data stream and never repeats
in a run, `sample` numbers the answers to that prompt. Rows are joined by this id, never by position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """One column: its Arrow kind, what it means, whether a row may lack a value (scalar kinds only), and the role that writes it.

    A whole batch may lack an `optional` column; who reads it then works without it."""

    kind: Kind
    meaning: str
    nullable: bool = False
    optional: bool = False
    name: str = ""
    producer: str = ""


def _declare(**written: Mapping[str, Column]) -> dict[str, Column]:
    """Columns by name, from those that each role writes."""
    named = ((role, name, column) for role, columns in written.items() for name, column in columns.items())
    return {name: replace(column, name=name, producer=role) for role, name, column in named}


COLUMNS: Final[dict[str, Column]] = _declare(
    data={
        "draw": Column("int", "number of the prompt in the data stream of the run, from 0, never repeated"),
        "sample": Column("int", "number of the answer to this prompt, from 0"),
        "source": Column("string", "data source of the prompt, for rewards and metrics by source"),
        "prompt": Column("string", "prompt text as given to the tokenizer"),
        "messages": Column("string", "JSON of the chat messages that the prompt was made of; with `data.chat` only", optional=True),
        "prompt_ids": Column("tokens", "token ids of the prompt, exactly one BOS where the model has one"),
        "answer": Column("string", "reference answer, if the source has one", nullable=True),
        "task": Column("string", "JSON with what the verifier of the source needs beyond the answer", nullable=True),
    },
    rollout={
        "response_ids": Column("tokens", "sampled token ids, the sampled end token included"),
        "response": Column("string", "text of `response_ids` without special tokens"),
        "rollout_logprobs": Column(
            "token_floats", "log-probability of each sampled token in the engine, after temperature; 0 for one that a tool put in"
        ),
        "response_mask": Column(
            "tokens",
            "1 for each token of response_ids that the policy sampled, 0 for one that a tool put in; without it all were sampled",
            optional=True,
        ),
        "turns": Column(
            "string",
            "JSON of an answer of several turns: [{role, text, tokens}, ...], by the model (`assistant`), tools and environment",
            optional=True,
        ),
        "environment_reward": Column(
            "float", "sum of the rewards that the environment gave; null where it gave none", nullable=True, optional=True
        ),
        "environment_error": Column("string", "what the environment failed with; the row has no reward then", nullable=True, optional=True),
        "response_length": Column("int", "number of sampled tokens of response_ids"),
        "response_digest": Column("int", "hash of response_ids, by which equal answers are found without reading them", optional=True),
        "finish_reason": Column("string", "stop (end token), length (cut) or abort"),
        "weight_version": Column("int", "version of the weights that sampled the row; the oldest, if several did"),
        "weight_spans": Column(
            "string",
            "JSON [[version, first token, end], ...] of a row that went on over a change of weights; null where one version sampled it",
            nullable=True,
            optional=True,
        ),
        "engine": Column("string", "name of the engine that sampled the row"),
    },
    reward={
        "reward": Column("float", "total reward; null when scoring failed or abstained, and then the row is masked", nullable=True),
        "reward_status": Column("string", "ok, or why there is no reward: error, timeout, not_finite, abstained, environment"),
    },
    ref={
        "ref_logprobs": Column("token_floats", "log-probability of each response token under the reference model, after temperature"),
        "kl": Column(
            "float", "estimated divergence of the sampling policy from the reference model, mean over the row's sampled tokens, in nats"
        ),
    },
    critic={
        "values": Column("token_floats", "the critic's value of the state before each response token is sampled, at the start of the step"),
    },
    algorithm={
        "advantages": Column(
            "token_floats",
            "advantage of each response token, not yet normalised (algorithms with a critic); 0 for tokens that are not trained",
        ),
        "returns": Column("token_floats", "what the value of each response token should have been; 0 for tokens that are not trained"),
        "advantage": Column(
            "float", "advantage of every response token of the row; with a critic the mean of `advantages` over its sampled tokens"
        ),
        "advantage_spread": Column("float", "sum over the row's sampled tokens of the squared distance of `advantages` from `advantage`"),
        "return_mean": Column("float", "mean of `returns` over the row's sampled tokens"),
        "return_spread": Column("float", "sum over the row's sampled tokens of the squared distance of `returns` from `return_mean`"),
        "token_weight": Column("float", "weight of each response token of the row in the loss of its mini-batch; 0 masks the row"),
        "minibatch": Column("int", "mini-batch of the step that the row belongs to, from 0"),
    },
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
