"""A driver with a cluster of its own, or in another: `python lifetime_program.py RUN OPTIONS END...`, the options for its backend, as JSON.

It says on a line what it has, then ends: `return`, `raise` (which it catches), or `wait` for a signal. Several ends are several runs in
this one process."""

import asyncio
import contextlib
import json
import sys
from typing import Any

from runtime_workers import Parent

from rolemesh.runtime import Pool, WorkerGroup, create_backend
from rolemesh.training.launch import run_on


class Planned(Exception):
    pass


def live(run: str, options: dict[str, Any], end: str) -> None:
    backend = create_backend("ray", num_cpus=2, object_store_bytes=100_000_000, run=run, pythonpath=sys.path, **options)

    async def main() -> None:
        pool = await Pool.of_slots(backend, "main", [2], cpus=0.5)
        await pool.create(deadline=60)
        group = WorkerGroup("parents", Parent, pool, bundles=[0, 1])
        await group.create(deadline=60)
        await group.init()
        sys.stdout.write(json.dumps({"families": await group.family(), "address": backend.address}) + "\n")
        sys.stdout.flush()
        if end == "raise":
            raise Planned
        if end == "wait":
            await asyncio.sleep(600)

    run_on(backend, main())


if __name__ == "__main__":
    name, settings, *ends = sys.argv[1:]
    for number, how in enumerate(ends):
        with contextlib.suppress(Planned):
            live(f"{name}-{number}", json.loads(settings), how)
