"""Publication of 500 MB of weights within a node, by each route, against one plain copy of the same bytes.

    python benchmarks/publication.py [--quick]

process         the rollout worker shares its process with the actor and reads the weights where they lie: one copy, into the engine
shared memory   it is another process of the node; while a bucket is loaded, the next is packed
object store    the same with buckets that travel as objects, as between nodes; on one node this is the object store's shared memory
copy            `numpy.copyto` of as many bytes in one process, from memory to memory that is there already

Publisher, actor and rollout worker are the real ones in real processes, each on one thread; only the model is a dictionary of float32
matrices. `copy time / route time` is at most 1: the aim is 0.6 through shared memory on an idle machine with two cores. Prints one JSON
line last.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _harness import arguments, finish, interleaved_async, median_ratio

from rolemesh.config import Config
from rolemesh.names import ACTOR, ROLLOUT
from rolemesh.plan.routes import Route
from rolemesh.roles.actor import ActorWorker
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.runtime import Backend, Pool, Worker, WorkerGroup, create_backend
from rolemesh.training.publication import Publisher

WIDTH = 1024
MATRIX_BYTES = 4 * WIDTH * WIDTH


def matrices(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    torch.set_num_threads(1)
    return ((f"layers.{number}.weight", torch.full((WIDTH, WIDTH), float(number))) for number in range(count))


class Source(ActorWorker):
    """An actor whose model is `trainer.steps` matrices: its settings have no other number to spare."""

    def load(self) -> None:
        """Makes the matrices."""
        weights = list(matrices(self.config.trainer.steps))
        forms = [(name, weight.to("meta")) for name, weight in weights]
        self.engine: Any = SimpleNamespace(merged_weights=lambda: iter(weights), empty_weights=lambda: iter(forms))


class Sink(RolloutWorker):
    """A rollout worker whose engine has a place for each."""

    def load(self) -> None:
        """Makes the places."""
        self.places = {name: torch.zeros_like(weight) for name, weight in matrices(self.config.trainer.steps)}

    def take_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        for name, weight in weights:
            self.places[name].copy_(weight)
        return version


class OneWay(Publisher):
    """By one route, whatever the plan would say."""

    route: Route

    def routes(self, role: str) -> list[Route]:
        return [self.route]


async def new_group(pool: Pool, role: str, worker: type[Worker], count: int) -> WorkerGroup:
    group = WorkerGroup(role, worker, pool, [0], worker_kwargs={"config": Config.model_validate({"trainer": {"steps": count}})})
    await group.create(deadline=60)
    await group.init()
    return group


async def measure(backend: Backend, count: int, rounds: int) -> dict[str, list[float]]:
    pools = [await Pool.of_slots(backend, name, [1]) for name in ("train", "serve")]
    for pool in pools:
        await pool.create(60)
    actor = await new_group(pools[0], ACTOR, Source, count)
    sinks = {pool.name: await new_group(pool, ROLLOUT, Sink, count) for pool in pools}
    version = 0

    def case(pool: str, route: Route) -> Any:
        publisher = OneWay(SimpleNamespace(groups={ACTOR: actor, ROLLOUT: sinks[pool]}, backend=backend))  # type: ignore[arg-type]
        publisher.route = route

        async def publish() -> None:
            nonlocal version
            version += 1
            await publisher.give(ROLLOUT, version)

        return publish

    source, target = np.ones(count * MATRIX_BYTES, dtype=np.uint8), np.ones(count * MATRIX_BYTES, dtype=np.uint8)

    async def copy() -> None:
        np.copyto(target, source)

    cases = {
        "process": case("train", "process"),
        "shared memory": case("serve", "shared_memory"),
        "object store": case("serve", "object_store"),
        "copy": copy,
    }
    return await interleaved_async(cases, rounds)


def main() -> None:
    options = arguments(__doc__)
    count = (50 if options.quick else 500) * 10**6 // MATRIX_BYTES
    path = [str(Path(__file__).parent), *filter(None, sys.path)]
    backend = create_backend("ray", num_cpus=2, object_store_bytes=1_000_000_000, pythonpath=path)
    backend.start()  # type: ignore[attr-defined]
    try:
        times = backend.run(measure(backend, count, 3 if options.quick else 9))
    finally:
        backend.stop()
    copy = times.pop("copy")
    speed = {
        f"{name} GB/s": round(count * MATRIX_BYTES / statistics.median(taken) / 1e9, 2) for name, taken in (*times.items(), ("copy", copy))
    }
    finish("publication", {name: median_ratio(copy, taken) for name, taken in times.items()}, ["rolemesh", "torch", "ray"], figures=speed)


if __name__ == "__main__":
    main()
