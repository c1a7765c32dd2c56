"""How a call of a group becomes calls of its workers (split), and how their answers become one result (collect).

Built-in ways are in `DISPATCHES`; users give their own pair as `Dispatch(name, split, collect)`. A split returns one `Share` per rank,
None for a rank that is not called. A call to a chosen subset is split over that subset as if it were the whole group: ranks here are
places among the ranks chosen. Splitting a `BatchRef` is metadata only. Every way that shards a batch is mesh-aware: it shards
over data-parallel groups, gives the same share to all tensor-parallel ranks of a group and collects from the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rolemesh.batch import BatchRef, BlockMeta
from rolemesh.errors import BatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks called: `world_size = data_parallel * tensor_parallel`; neighbours are tensor-parallel."""

    world_size: int
    tensor_parallel: int = 1

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.tensor_parallel

    def is_leader(self, rank: int) -> bool:
        """True for the rank whose answer stands for its tensor-parallel group."""
        return rank % self.tensor_parallel == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A group call as the user wrote it."""

    method: str
    batch: BatchRef | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reads: Sequence[str] | None = None
    """Columns that the method reads: no others need to be split. None where that is not known."""


class Share(NamedTuple):
    """What one rank is called with."""

    batch: BatchRef | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Answer(NamedTuple):
    """What one rank answered: a small value, or the columns it wrote."""

    rank: int
    value: Any
    written: Sequence[tuple[Any, BlockMeta]] = ()
    """The objects that hold the columns, all with the same rows."""

    @property
    def batch(self) -> BatchRef | None:
        return BatchRef.of_written([self.written]) if self.written else None

    @property
    def result(self) -> Any:
        return self.batch if self.written else self.value


Split = Callable[[Topology, Request], list[Share | None]]
Collect = Callable[[Topology, Request, Sequence[Answer]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A split/collect pair."""

    name: str
    split: Split
    collect: Collect


def _whole(request: Request) -> Share:
    return Share(batch=request.batch, args=request.args, kwargs=request.kwargs)


def split_all(topology: Topology, request: Request) -> list[Share | None]:
    """The same arguments to every rank."""
    return [_whole(request)] * topology.world_size


def split_rank_zero(topology: Topology, request: Request) -> list[Share | None]:
    """Only the first rank is called."""
    return [_whole(request), *[None] * (topology.world_size - 1)]


def split_one_each(topology: Topology, request: Request) -> list[Share | None]:
    """Each positional argument is a list with one entry per rank."""
    if request.batch is not None:
        raise BatchError(f"{request.method}() gives each rank an entry of a list; it cannot take a BatchRef as first argument")
    for position, values in enumerate(request.args):
        if len(values) != topology.world_size:
            raise BatchError(
                f"{request.method}(): argument {position} must have one entry for each of {topology.world_size} ranks, got {len(values)}"
            )
    return [
        Share(batch=None, args=tuple(values[rank] for values in request.args), kwargs=request.kwargs) for rank in range(topology.world_size)
    ]


def _sharded(topology: Topology, request: Request, parts: Sequence[BatchRef]) -> list[Share | None]:
    shares = [Share(part, request.args, request.kwargs) for part in parts]
    return [shares[rank // topology.tensor_parallel] for rank in range(topology.world_size)]


def _batch(request: Request) -> BatchRef:
    if request.batch is None:
        raise BatchError(f"{request.method}() shards a batch: its first argument must be a BatchRef")
    return request.batch


def _read(request: Request) -> BatchRef:
    batch = _batch(request)
    return batch if request.reads is None else batch.reading(request.reads)


def split_rows(topology: Topology, request: Request) -> list[Share | None]:
    """Rows in order, counts as equal as can be (10 over 4: 3, 3, 2, 2); a rank may get none."""
    return _sharded(topology, request, _read(request).split_rows(topology.data_parallel))


def split_balanced(topology: Topology, request: Request) -> list[Share | None]:
    """Rows balanced by tokens."""
    return _sharded(topology, request, _read(request).split_tokens(topology.data_parallel, _batch(request).token_counts))


def collect_all(topology: Topology, request: Request, answers: Sequence[Answer]) -> Any:
    """Values (or columns) of all ranks, in rank order."""
    return [answer.result for answer in answers]


def collect_first(topology: Topology, request: Request, answers: Sequence[Answer]) -> Any:
    """The value (or columns) of the first rank called."""
    return answers[0].result


def collect_shards(topology: Topology, request: Request, answers: Sequence[Answer]) -> Any:
    """Columns of all leaders as one BatchRef in the order of the rows sent; without columns, the leaders' values."""
    leaders = [answer for answer in answers if topology.is_leader(answer.rank)]
    written = [answer.written for answer in leaders if answer.written]
    if not written:
        return [answer.value for answer in leaders]
    return _batch(request).select([]).join(BatchRef.of_written(written))  # workers return exactly the rows they got


DISPATCHES: Final[dict[str, Dispatch]] = {
    dispatch.name: dispatch
    for dispatch in (
        Dispatch(name="all", split=split_all, collect=collect_all),
        Dispatch(name="rank_zero", split=split_rank_zero, collect=collect_first),
        Dispatch(name="one_each", split=split_one_each, collect=collect_all),
        Dispatch(name="data_parallel", split=split_rows, collect=collect_shards),
        Dispatch(name="balanced", split=split_balanced, collect=collect_shards),
    )
}
