"""What the controller costs beyond Ray itself, and what verl's costs, in one run.

    python benchmarks/controller_overhead.py [--quick] [--verl-python PATH]

Ray's own floor is two bare actors and the least that the same work needs of them. A ratio is our time over the other's; rounds of all
sides alternate.

no-op      a registered method without arguments on a group of two: Ray's two calls and one wait, from sync code and from asyncio.
           `no_op_above_ray_ms` are the milliseconds that a group adds.
N MB       two workers write two columns of so many bytes together, and two others read them, data-parallel. Ray: two actors return the
           same Arrow tables (or numpy arrays) and two others get the references at once, without a wait in between. Who reads touches every
           page. `controller_ms` is the CPU time of the controller's thread in both calls, `driver_ms` that of its whole process.
           Counted from when every process has been in all of the store: until then most of the time is the kernel's, for pages that a
           process has not touched, and whoever called last had touched most.
start      a pool and a group of two until both are initialized, over two actors that import the same modules.
dispatch   split, submit and collect of a data-parallel call on 8,192 rows for 1,000 fake processes, which answer in no time: ms.

verl runs beside it in a process and a Ray cluster of its own, when PATH is the Python of an environment that has it. Its default
serialization and its numpy one are both measured. Prints one JSON line last.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pyarrow as pa
import ray
from _harness import Side, arguments, finish, interleaved_async, median_ratio

from rolemesh.batch import Batch, BatchRef, block_meta
from rolemesh.plan.schema import NodeInfo
from rolemesh.protocols.backend import Call, OnAnswer, Process, Reply
from rolemesh.runtime import Backend, Bundle, LocalBackend, Pool, Worker, WorkerGroup, create_backend, register

Times = dict[str, list[float]]
Case = Callable[[], Awaitable[float | None]]
ROWS, WORKERS = 1024, 2
TOKEN_BYTES = 8
"""Of an id and a log-probability."""
FAKES, FAKE_ROWS = 1000, 8192
IN_A_ROW = 20
STORE_BYTES = 600_000_000
VERL_SECONDS = 120.0


# -- what is called -----------------------------------------------------------------------------------------------------------


def columns(rows: int, tokens: int) -> dict[str, Any]:
    """Two columns of `tokens` a row, and one of numbers."""
    offsets = pa.array(np.arange(rows + 1, dtype=np.int64) * tokens)
    ragged = {"response_ids": np.ones(rows * tokens, dtype=np.int32), "rollout_logprobs": np.ones(rows * tokens, dtype=np.float32)}
    lists = {name: pa.LargeListArray.from_arrays(offsets, pa.array(values)) for name, values in ragged.items()}
    return {**lists, "response_length": np.full(rows, tokens)}


def touch(table: pa.Table) -> float:
    """Something of every page of the token columns."""
    chunks = [chunk for name in ("response_ids", "rollout_logprobs") for chunk in table.column(name).chunks]
    return sum(float(chunk.flatten().to_numpy()[::1024].sum()) for chunk in chunks)


class Columns(Worker):
    """Writes columns that it has made before."""

    @register(dispatch="all")
    def no_op(self) -> None: ...

    @register(dispatch="all")
    def modules(self) -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "rolemesh"]

    @register(dispatch="data_parallel")
    def prepare(self, batch: Batch, tokens: int) -> None:
        self.made = batch.select([]).with_columns(columns(len(batch), tokens))

    @register(dispatch="data_parallel", writes=("response_ids", "rollout_logprobs", "response_length"))
    def write(self, batch: Batch) -> Batch:
        return self.made

    @register(dispatch="data_parallel", reads=("prompt_ids",), writes=("response_length",))
    def count(self, batch: Batch) -> Batch:
        raise NotImplementedError("a fake process answers without running it")

    @register(dispatch="data_parallel", reads=("response_ids", "rollout_logprobs"))
    def read(self, batch: Batch) -> float:
        return touch(batch.table)


@ray.remote(num_cpus=1)
class Bare:
    """What Ray alone can do."""

    def no_op(self) -> None: ...

    def load(self, modules: Sequence[str]) -> None:
        for name in modules:
            importlib.import_module(name)

    def prepare(self, tokens: int) -> None:
        rows = ROWS // WORKERS
        self.table = pa.table({"draw": np.arange(rows), "sample": np.zeros(rows, dtype=np.int64), **columns(rows, tokens)})
        self.array = np.ones(rows * tokens * TOKEN_BYTES // 4, dtype=np.float32)

    def write(self, *, arrow: bool) -> Any:
        return self.table if arrow else self.array

    def read(self, written: Any) -> float:
        return touch(written) if isinstance(written, pa.Table) else float(written[::1024].sum())


def bare_actors() -> list[Any]:
    return [Bare.remote() for _ in range(WORKERS)]


async def new_group(backend: Backend, name: str) -> WorkerGroup:
    pool = await Pool.of_slots(backend, name, [WORKERS])
    await pool.create(deadline=60)
    group = WorkerGroup(name, Columns, pool, range(WORKERS))
    await group.create(deadline=120)
    await group.init()
    return group


def prompts(backend: Backend, rows: int) -> BatchRef:
    ids = {"draw": np.arange(rows), "sample": np.zeros(rows, dtype=np.int64)}
    batch = Batch.from_columns({**ids, "prompt_ids": [[1] * 8] * rows})
    return BatchRef.from_blocks([(backend.put(batch), block_meta(batch))])


# -- verl -----------------------------------------------------------------------------------------------------------------------


@contextmanager
def verl_at(python: str | None, quick: bool) -> Iterator[tuple[Side | None, str]]:
    """verl's side, `_verl_controller.py`, or why there is none."""
    if not python:
        yield None, "verl: no --verl-python"
        return
    script = str(Path(__file__).with_name("_verl_controller.py"))
    verl = Side("verl's side", [python, script, *(["--quick"] if quick else [])], VERL_SECONDS).greet()
    try:
        yield (None, f"verl: {verl.missing}") if verl.missing else (verl, "")
    finally:
        verl.close()


def asked(verl: Side, what: str, *parameters: Any) -> Case:
    async def case() -> float:
        seconds: float = verl.ask(what, *parameters)
        return seconds

    return case


# -- the cases ------------------------------------------------------------------------------------------------------------------


async def no_op(group: WorkerGroup, actors: Sequence[Any], verl: Side | None, rounds: int) -> Times:
    """Each side has actors of its own and is called several times in a row: those that were called last are the quickest to answer."""

    def row(call: Callable[[], Awaitable[object]]) -> Case:
        async def case() -> float:
            began = time.perf_counter()
            for _ in range(IN_A_ROW):
                await call()
            return (time.perf_counter() - began) / IN_A_ROW

        return case

    async def sync() -> None:
        ray.get([actor.no_op.remote() for actor in actors[:WORKERS]], timeout=60)

    async def asynchronous() -> None:
        await asyncio.gather(*[actor.no_op.remote() for actor in actors[WORKERS:]])

    cases = {"rolemesh": row(group.no_op), "Ray, sync": row(sync), "Ray, asyncio": row(asynchronous)}
    if verl:
        cases["verl"] = asked(verl, "no_op", IN_A_ROW)
    return await interleaved_async(cases, rounds)


async def hand_over(
    groups: Sequence[WorkerGroup], actors: Sequence[Any], verl: Side | None, megabytes: int, rounds: int, warmups: int
) -> tuple[Times, dict[str, float]]:
    """Times, and what the controller itself took of ours."""
    (writers, readers), tokens = groups, megabytes * 1_000_000 // (ROWS * TOKEN_BYTES)
    batch, own = prompts(writers.pool.backend, ROWS), []
    await writers.prepare(batch, tokens)
    ray.get([actor.prepare.remote(tokens) for actor in actors], timeout=60)

    async def ours() -> None:
        thread, process = time.thread_time(), time.process_time()
        await readers.read(await writers.write(batch))
        own.append((time.thread_time() - thread, time.process_time() - process))

    def floor(*, arrow: bool) -> Case:
        async def case() -> None:
            written = [actor.write.remote(arrow=arrow) for actor in actors[:WORKERS]]
            ray.get([actor.read.remote(ref) for actor, ref in zip(actors[WORKERS:], written, strict=True)], timeout=60)

        return case

    cases: dict[str, Case] = {"rolemesh": ours, "Ray, Arrow": floor(arrow=True), "Ray, numpy": floor(arrow=False)}
    if verl:
        cases |= {name: asked(verl, "hand_over", tokens, way) for name, way in (("verl", ""), ("verl, numpy", "numpy"))}
    times = await interleaved_async(cases, rounds, warmups)
    own_ms = {
        name: statistics.median(side) * 1e3 for name, side in zip(("controller_ms", "driver_ms"), zip(*own, strict=True), strict=True)
    }
    return times, own_ms


async def start(backend: Backend, modules: Sequence[str], verl: Side | None, rounds: int, warmups: int) -> Times:
    async def ours() -> float:
        began = time.perf_counter()
        group = await new_group(backend, "started")
        seconds = time.perf_counter() - began
        await group.pool.close()
        return seconds

    async def bare() -> float:
        began = time.perf_counter()
        actors = bare_actors()
        ray.get([actor.load.remote(modules) for actor in actors], timeout=120)
        seconds = time.perf_counter() - began
        for actor in actors:
            ray.kill(actor)
        return seconds

    cases: dict[str, Case] = {"rolemesh": ours, "Ray": bare}
    if verl:
        cases["verl"] = asked(verl, "start")
    return await interleaved_async(cases, rounds, warmups)


class Fakes(LocalBackend):
    """Processes that know their answers. All answer in the next turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, Reply] = {}
        self._asked: list[tuple[OnAnswer, Reply]] = []

    def call(self, process: Process, call: Call, blocks: Sequence[Any], answered: OnAnswer) -> tuple[Any, Any]:
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._answer)
        self._asked.append((answered, self.answers[process.spec.bundle]))
        return object(), None

    def _answer(self) -> None:
        for answered, answer in self._asked:
            answered(answer)
        self._asked.clear()


async def dispatch(rounds: int) -> list[float]:
    """Seconds of each call."""
    backend = Fakes()
    pool = Pool(backend, "fakes", [Bundle(node=0, cpus=0, gpus=0)] * FAKES, [NodeInfo(name="fake", cpus=1, memory_bytes=1)])
    await pool.create(deadline=10)
    group = WorkerGroup("fakes", Columns, pool, range(FAKES))
    await group.create(deadline=60)
    batch = prompts(backend, FAKE_ROWS)
    for rank, part in enumerate(batch.split_rows(FAKES)):
        written = Batch.from_columns({"draw": part.ids[:, 0], "sample": part.ids[:, 1], "response_length": part.ids[:, 0]})
        backend.answers[rank] = Reply(metas=(block_meta(written), None))

    async def call() -> None:
        written = await group.count(batch)
        assert len(written) == FAKE_ROWS

    return (await interleaved_async({"rolemesh": call}, rounds, warmups=3))["rolemesh"]


# -- the run ----------------------------------------------------------------------------------------------------------------------


async def measure(backend: Backend, verl: Side | None, quick: bool) -> dict[str, Any]:
    """Everything; (what, side) -> seconds of the rounds, and the figures behind."""
    found: dict[str, Times] = {}
    figures: dict[str, float] = {}
    groups = [await new_group(backend, "writers"), await new_group(backend, "readers")]
    actors = bare_actors() + bare_actors()
    modules = (await groups[0].modules())[0]
    ray.get([actor.load.remote(modules) for actor in actors], timeout=120)
    found["no-op"] = told("no-op", await no_op(groups[0], actors, verl, 5 if quick else 100))
    for megabytes, rounds in ((1, 50), (10, 30), (100, 30)):
        times, own = await hand_over(groups, actors, verl, megabytes, *((3, 1) if quick else (rounds, 25)))
        found[f"{megabytes} MB"] = told(f"{megabytes} MB", times)
        figures |= {f"{megabytes} MB {name}": value for name, value in own.items()}
    for group in groups:
        await group.pool.close()
    for actor in actors:
        ray.kill(actor)
    found["start"] = told("start", await start(backend, modules, verl, *((1, 0) if quick else (7, 1))))
    for floor in ("Ray, sync", "Ray, asyncio"):
        added = [ours - theirs for ours, theirs in zip(found["no-op"]["rolemesh"], found["no-op"][floor], strict=True)]
        figures[f"no-op above {floor} ms"] = statistics.median(added) * 1e3
    return {"found": found, "figures": figures}


def told(what: str, times: Times) -> Times:
    """Say how it went, as the run takes minutes."""
    print(f"{what}: " + ", ".join(f"{side} {statistics.median(of) * 1e3:.2f} ms" for side, of in times.items()), flush=True)
    return times


def main() -> None:
    options = arguments(__doc__ or "", verl_python="the Python of an environment that has verl")
    dispatched = asyncio.run(dispatch(5 if options.quick else 50))  # before there is a cluster, whose processes take turns with this one
    print(f"dispatch to {FAKES:,}: {statistics.median(dispatched) * 1e3:.2f} ms", flush=True)
    backend = create_backend("ray", num_cpus=8, object_store_bytes=STORE_BYTES)
    with verl_at(options.verl_python, options.quick) as (verl, skipped):
        try:
            measured = backend.run(measure(backend, verl, options.quick))
        finally:
            backend.stop()
        version = verl.version if verl else ""
    found: dict[str, Times] = measured["found"]
    ratios = {
        f"{what}, rolemesh / {side}": median_ratio(times["rolemesh"], times[side])
        for what, times in found.items()
        for side in times
        if side != "rolemesh"
    }
    milliseconds = {f"{what}, {side}": round(statistics.median(of) * 1e3, 3) for what, times in found.items() for side, of in times.items()}
    measured["figures"]["dispatch to 1,000 ms"] = statistics.median(dispatched) * 1e3
    figures = {name: round(value, 3) for name, value in measured["figures"].items()}
    finish(
        "controller_overhead", ratios, ["rolemesh", "ray", "pyarrow", "numpy"],
        figures=figures, milliseconds=milliseconds, verl=version, skipped=[skipped] if skipped else [],
    )  # fmt: skip


if __name__ == "__main__":
    main()
