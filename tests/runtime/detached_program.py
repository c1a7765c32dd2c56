"""A controller of a detached pool, as a program of its own: `python detached_program.py FOLDER END`.

It takes over what stands under its run, or starts it, tells what it found, begins calls, and is killed. The folder has the journal, and
gates: files named by processes that have been taken over.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from runtime_workers import Adder, Summer

from rolemesh.observe import Journal
from rolemesh.runtime import Backend, KvStore, Pool, Process, WorkerGroup, create_backend


def run_of(folder: Path) -> str:
    return f"run-{folder.name}"


def open_backend(gates: Path) -> Backend:
    """Opens the gate of every process that it has taken over."""
    backend = create_backend(
        "ray",
        run=run_of(gates),
        detached=True,
        time_to_live=90,
        num_cpus=4,
        object_store_bytes=200_000_000,
        pythonpath=[str(Path(__file__).parent), *sys.path],
    )
    control = backend.control

    async def opening(process: Process, request: str, deadline: float, **kwargs: Any) -> Any:
        answer = await control(process, request, deadline, **kwargs)
        if request == "take":
            (gates / str(process.pid)).touch()
        return answer

    backend.control = opening
    return backend


async def open_pool(backend: Backend, journal: Journal, *, slots: int = 2, bonus: int = 0) -> tuple[Pool, WorkerGroup, WorkerGroup, dict]:
    """Two workers that count and two that sum, in the same two processes; and what was found of them."""
    pool = await Pool.of_slots(backend, "main", [slots], cpus=0.5)
    attached = await pool.attach(60, epoch=journal.epoch)
    if not attached:
        await pool.create(60)
    counters = WorkerGroup("counters", Adder, pool, [0, 1], worker_kwargs={"bonus": bonus}, journal=journal)
    summers = WorkerGroup("summers", Summer, pool, [0, 1], journal=journal)
    for group in (counters, summers):
        await group.create()
        await group.init()
    pids = await summers.pid()
    seconds = time.time() - psutil.Process().create_time()
    found = {"attached": attached, "seconds": seconds, "pids": pids, "epoch": journal.epoch, "generation": summers.generation}
    found |= {"loads": await counters.loads_seen(), "counts": await counters.counted(), "sums": await summers.step(1.0)}
    return pool, counters, summers, found


async def queued(backend: Backend, counters: WorkerGroup, summers: WorkerGroup, gates: Path) -> list[asyncio.Future[int]]:
    """A call under way and two in the queue."""
    store = await KvStore.start(backend, run_of(gates))
    await store.put("step", 7)
    return [asyncio.ensure_future(counters.count_after(str(gates))) for _ in range(3)]


async def stuck(backend: Backend, counters: WorkerGroup, summers: WorkerGroup, gates: Path) -> list[asyncio.Future[int]]:
    """Rank 1 sleeps, and rank 0 waits for it in a collective."""
    calls = [asyncio.ensure_future(counters.call("sleep", 600, ranks=(1,)))]
    await asyncio.sleep(0.2)
    return [*calls, asyncio.ensure_future(summers.step(1.0))]


async def main(backend: Backend, folder: Path, end: str) -> None:
    _, counters, summers, found = await open_pool(backend, Journal(folder / "journal"))
    calls = await {"queued": queued, "stuck": stuck}[end](backend, counters, summers, folder)
    await asyncio.sleep(0.5)
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    assert not any(call.done() for call in calls)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, end = sys.argv[1:]
    backend = open_backend(Path(folder))
    backend.run(main(backend, Path(folder), end))
