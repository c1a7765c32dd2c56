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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its Arrow kind, meaning, the role that writes it, and whether a row may lack a value (scalar kinds only).

    A whole batch may lack an `optional` column; who reads it then works without it."""

    name: str
    kind: Kind
    meaning: str
    producer: str
    nullable: bool = False
    optional: bool = False

    @property
    def arrow_type(self) -> pa.DataType:
        return ARROW_TYPES[self.kind]


def _declare(*columns: Column) -> dict[str, Column]:
    return {column.name: column for column in columns}


COLUMNS: Final[dict[str, Column]] = _declare(
    Column(name="draw", kind="int", producer="data", meaning="number of the prompt in the data stream of the run, from 0, never repeated"),
    Column(name="sample", kind="int", producer="data", meaning="number of the answer to this prompt, from 0"),
    Column(name="source", kind="string", producer="data", meaning="data source of the prompt, for rewards and metrics by source"),
    Column(name="prompt", kind="string", producer="data", meaning="prompt text as given to the tokenizer"),
    Column(
        name="messages",
        kind="string",
        producer="data",
        optional=True,
        meaning="JSON of the chat messages that the prompt was made of; with `data.chat` only",
    ),
    Column(name="prompt_ids", kind="tokens", producer="data", meaning="token ids of the prompt, exactly one BOS where the model has one"),
    Column(name="answer", kind="string", producer="data", nullable=True, meaning="reference answer, if the source has one"),
    Column(
        name="task",
        kind="string",
        producer="data",
        nullable=True,
        meaning="JSON with what the verifier of the source needs beyond the answer",
    ),
    Column(name="response_ids", kind="tokens", producer="rollout", meaning="sampled token ids, the sampled end token included"),
    Column(name="response", kind="string", producer="rollout", meaning="text of `response_ids` without special tokens"),
    Column(
        name="rollout_logprobs",
        kind="token_floats",
        producer="rollout",
        meaning="log-probability of each sampled token in the engine, after temperature; 0 for one that a tool put in",
    ),
    Column(
        name="response_mask",
        kind="tokens",
        producer="rollout",
        optional=True,
        meaning="1 for each token of response_ids that the policy sampled, 0 for one that a tool put in; without it all were sampled",
    ),
    Column(
        name="turns",
        kind="string",
        producer="rollout",
        optional=True,
        meaning="JSON of an answer of several turns: [{role, text, tokens}, ...], by the model (`assistant`), tools and environment",
    ),
    Column(
        name="environment_reward",
        kind="float",
        producer="rollout",
        nullable=True,
        optional=True,
        meaning="sum of the rewards that the environment gave; null where it gave none",
    ),
    Column(
        name="environment_error",
        kind="string",
        producer="rollout",
        nullable=True,
        optional=True,
        meaning="what the environment failed with; the row has no reward then",
    ),
    Column(name="response_length", kind="int", producer="rollout", meaning="number of sampled tokens of response_ids"),
    Column(name="finish_reason", kind="string", producer="rollout", meaning="stop (end token), length (cut) or abort"),
    Column(
        name="weight_version",
        kind="int",
        producer="rollout",
        meaning="version of the weights that sampled the row; the oldest, if several did",
    ),
    Column(
        name="weight_spans",
        kind="string",
        producer="rollout",
        nullable=True,
        optional=True,
        meaning="JSON [[version, first token, end], ...] of a row that went on over a change of weights; null where one version sampled it",
    ),
    Column(name="engine", kind="string", producer="rollout", meaning="name of the engine that sampled the row"),
    Column(
        name="reward",
        kind="float",
        producer="reward",
        nullable=True,
        meaning="total reward; null when scoring failed or abstained, and then the row is masked",
    ),
    Column(
        name="reward_status",
        kind="string",
        producer="reward",
        meaning="ok, or why there is no reward: error, timeout, not_finite, abstained, environment",
    ),
    Column(
        name="ref_logprobs",
        kind="token_floats",
        producer="ref",
        meaning="log-probability of each response token under the reference model, after temperature",
    ),
    Column(
        name="kl",
        kind="float",
        producer="ref",
        meaning="estimated divergence of the sampling policy from the reference model, mean over the row's sampled tokens, in nats",
    ),
    Column(
        name="values",
        kind="token_floats",
        producer="critic",
        meaning="the critic's value of the state before each response token is sampled, at the start of the step",
    ),
    Column(
        name="advantages",
        kind="token_floats",
        producer="algorithm",
        meaning="advantage of each response token, not yet normalised (algorithms with a critic); 0 for tokens that are not trained",
    ),
    Column(
        name="returns",
        kind="token_floats",
        producer="algorithm",
        meaning="what the value of each response token should have been; 0 for tokens that are not trained",
    ),
    Column(
        name="advantage",
        kind="float",
        producer="algorithm",
        meaning="advantage of every response token of the row; with a critic the mean of `advantages` over its sampled tokens",
    ),
    Column(
        name="advantage_spread",
        kind="float",
        producer="algorithm",
        meaning="sum over the row's sampled tokens of the squared distance of `advantages` from `advantage`",
    ),
    Column(name="return_mean", kind="float", producer="algorithm", meaning="mean of `returns` over the row's sampled tokens"),
    Column(
        name="return_spread",
        kind="float",
        producer="algorithm",
        meaning="sum over the row's sampled tokens of the squared distance of `returns` from `return_mean`",
    ),
    Column(
        name="token_weight",
        kind="float",
        producer="algorithm",
        meaning="weight of each response token of the row in the loss of its mini-batch; 0 masks the row",
    ),
    Column(name="minibatch", kind="int", producer="algorithm", meaning="mini-batch of the step that the row belongs to, from 0"),
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
