"""What runs inside a worker process, whatever backend started it: some workers, one compute thread, one control thread.

The backend calls `execute` on the compute thread, one call at a time, and `control` on another thread at any time. A call carries
(epoch, generation); older ones than seen are refused. A mutating call runs once: its answer is kept, and the same id again gets it.
A controller that takes over a process says so on the control thread, so that what an older one has queued here is refused already.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolemesh.batch import Batch, BlockMeta, assemble, block_meta
from rolemesh.errors import BatchError, RolemeshError, StaleCall
from rolemesh.observe import Metrics
from rolemesh.protocols.backend import Call, Failure, Reply, Report, Resident, WorkerSpec
from rolemesh.runtime.stored import fill
from rolemesh.runtime.worker import Settled, Worker, WorkerContext, settled_methods

NUMBERS = ("int", "float", "bool")
"""Columns of these kinds get a block of their own, so that the controller can read them without touching tokens."""
KEPT_ANSWERS = 2
"""Answers of mutating calls that each group keeps for asking again; the controller has at most one under way."""


Answered = tuple[Reply, tuple[Any, Any]]
"""Reply, and the two blocks: numbers, and everything else."""


class ProcessHost:
    """The workers of one process, which is theirs alone unless it is `shared`. `clock` is the wall clock, unless time is simulated."""

    def __init__(self, name: str, node: str, *, shared: bool = True, clock: Callable[[], float] = time.time) -> None:
        self.name, self.node, self._shared, self._clock = name, node, shared, clock
        self._dressed: WorkerContext | None = None
        """Whose variables the environment holds."""
        self._workers: dict[str, Worker] = {}
        self._methods: dict[str, dict[str, Settled]] = {}
        self._fence: dict[str, tuple[int, int]] = {}
        self._kept: dict[str, OrderedDict[str, Answered]] = {}
        self._makes: dict[str, str] = {}
        self._whole: set[str] = set()
        """Groups whose worker was loaded and has not been left by a changing call half-way since."""
        self._epoch = 0
        """Of the controller that took this process over."""
        self._call, self._since = "", clock()
        self._compute_thread: int | None = None
        self.leaving = False
        """This process was told to end."""

    def add_worker(self, spec: WorkerSpec) -> Failure | None:
        """Make a worker; it replaces an earlier one of the same group."""
        group, context = spec.group, spec.context
        self._call, self._since = f"{group}.__init__", self._clock()
        try:
            if spec.epoch < self._epoch:
                raise StaleCall(group=group, rank=context.rank, got=(spec.epoch, 0), current=(self._epoch, 0))
            with self._environment(context):
                worker = spec.worker_class(context, **spec.kwargs)
                methods = settled_methods(spec.worker_class, spec.kwargs)
        except Exception as error:  # noqa: BLE001 - the process boundary: it travels to the controller as data
            return _failure(error, self._clock())
        finally:
            self._call, self._since = "", self._clock()
        worker.peers = MappingProxyType(self._workers)
        self._methods[group] = methods
        self._makes[group] = spec.make
        self._whole.discard(group)
        self._kept[group] = OrderedDict()
        self._fence.setdefault(group, (0, 0))
        self._workers[group] = worker  # last: from here on it is reported
        return None

    def execute(self, call: Call, blocks: Sequence[Any]) -> Answered:
        """Run one call. Returns the small reply and the blocks it wrote (None without `writes` or `stores`)."""
        kept = self._kept.get(call.group, OrderedDict())
        if call.id in kept:
            return kept[call.id]
        self._call, self._since, self._compute_thread = f"{call.group}.{call.method}", self._clock(), threading.get_ident()
        try:
            answer = self._run(call, blocks)
        except Exception as error:  # noqa: BLE001 - the process boundary, as above
            answer = Reply(failure=_failure(error, self._clock()), started=self._since, ended=self._clock()), (None, None)
        finally:
            self._call, self._since = "", self._clock()
        registered = self._methods.get(call.group, {}).get(call.method)
        if registered is not None and registered.mutates:
            kept[call.id] = answer
            while len(kept) > KEPT_ANSWERS:
                kept.popitem(last=False)
        return answer

    def _run(self, call: Call, blocks: Sequence[Any]) -> Answered:
        started = self._clock()
        worker, method = self._workers[call.group], self._methods[call.group][call.method]
        self._check_fence(call, worker)
        worker.metrics = Metrics()
        worker.spans.drain()  # of a call that raised
        args, kwargs = fill(call.args, blocks), fill(call.kwargs or {}, blocks)
        batch = assemble(call.assembly, blocks[: call.batch_blocks]) if call.assembly is not None else None
        if batch is not None:
            args = (batch, *args)
        whole = call.method == "load" or call.group in self._whole
        if method.mutates:
            self._whole.discard(call.group)
        with self._environment(worker.context):
            result = getattr(worker, call.method)(*args, **kwargs)
        if whole:
            self._whole.add(call.group)
        value, metas, written = _pack(method, f"{call.group}.{call.method}()", batch, result)
        reply = Reply(
            value=value,
            metas=metas,
            metrics=worker.metrics or None,
            spans=tuple(worker.spans.drain()),
            started=started,
            ended=self._clock(),
        )
        return reply, written

    def _check_fence(self, call: Call, worker: Worker) -> None:
        got, current = (call.epoch, call.generation), max(self._fence[call.group], (self._epoch, 0))
        if got < current:
            raise StaleCall(group=call.group, rank=worker.context.rank, got=got, current=current)
        self._fence[call.group] = got

    @contextmanager
    def _environment(self, context: WorkerContext) -> Iterator[None]:
        """The worker's standard variables. A shared process (the local backend's is even the controller's) has them around the worker's
        own code only; in another they stay until a worker with others runs."""
        if self._dressed is context:
            yield
            return
        before = {name: os.environ.get(name) for name in context.env()}
        os.environ.update(context.env())
        try:
            yield
        finally:
            if self._shared:
                _restore(before)
            else:
                self._dressed = context

    def control(self, request: str, *, group: str = "", stack: bool = False, epoch: int = 0, message: Any = None) -> Any:
        """Answer on the control thread: `report` (with `stack`, what the compute thread is doing), `abort` the worker of `group`, `talk` to
        it, or `take` the process over: calls of epochs before `epoch` are refused from now on, and communicators cut."""
        if request == "abort":
            worker = self._workers.get(group)
            return worker.abort() if worker is not None else 0
        if request == "talk":
            return self._workers[group].talk(message)
        if request == "take":
            self._take(epoch)
        elif request != "report":
            raise ValueError(f"control request must be report, abort, talk or take, got {request!r}")
        return self._report(stack=stack)

    def _take(self, epoch: int) -> None:
        served = max([self._epoch, *(seen for seen, _ in self._fence.values())])
        if epoch <= served:
            raise StaleCall(group=f"process {self.name}", rank=None, got=(epoch, 0), current=(served, 0))
        self._epoch = epoch
        for worker in list(self._workers.values()):
            worker.abort()

    def _report(self, *, stack: bool) -> Report:
        frame = sys._current_frames().get(self._compute_thread or 0) if stack and self._call else None
        call, since = self._call, self._since
        residents = {}
        for group in list(self._workers):
            epoch, generation = self._fence[group]
            residents[group] = Resident(make=self._makes[group], whole=group in self._whole, epoch=epoch, generation=generation)
        return Report(
            pid=os.getpid(),
            node=self.node,
            workers=residents,
            state="computing" if call else "idle",
            call=call,
            since=since,
            leaving=self.leaving,
            stack="".join(traceback.format_stack(frame)) if frame is not None else "",
        )


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _pack(
    method: Settled, who: str, sent: Batch | None, result: Any
) -> tuple[Any, tuple[BlockMeta | None, BlockMeta | None], tuple[Any, Any]]:
    if method.stores:
        value, stored = result
        return value, (None, None), (None, stored)
    if not method.writes:
        return result, (None, None), (None, None)
    if not isinstance(result, Batch):
        raise BatchError(f"{who} declares writes={method.writes} and must return a Batch, got {type(result).__name__}")
    missing = [name for name in method.writes if name not in result.names]
    if missing:
        raise BatchError(f"{who} must write {', '.join(method.writes)}; {', '.join(missing)} is missing")
    ids = result.ids
    if sent is not None:
        _check_rows(who, sent.ids, ids)
    numbers = [name for name in method.writes if result.kind(name) in NUMBERS]
    others = [name for name in method.writes if name not in numbers]
    parts = [result.select(names).compact() if names else None for names in (numbers, others)]
    metas = [block_meta(part, ids) if part is not None else None for part in parts]
    return None, (metas[0], metas[1]), (parts[0], parts[1])


def _check_rows(who: str, sent: NDArray[np.int64], result: NDArray[np.int64]) -> None:
    """A method writes exactly the rows it was given, in any order. Raises BatchError naming the first that differs."""
    if np.array_equal(sent, result):
        return
    got, returned = (Counter(map(tuple, ids.tolist())) for ids in (sent, result))
    for word, rows in (("lost", got - returned), ("made up or repeated", returned - got)):
        if rows:
            draw, sample = min(rows)
            raise BatchError(
                f"{who} got {got.total()} rows and returned {returned.total()}: {rows.total()} were {word}, first (draw {draw}, sample "
                f"{sample}). Return one row for each row given; a row without a result has null in its scalar columns"
            )


def _failure(error: Exception, at: float) -> Failure:
    return Failure(
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        at=at,
        error=error if isinstance(error, RolemeshError) else None,
    )
