"""Publication of weights within a node, by each route and in several sizes, against a plain copy of the same bytes.

    python benchmarks/publication.py [--quick]

process         the rollout worker shares its process with the actor and reads the weights where they lie: one copy, into the engine
shared memory   it is another process of the node, and its engine keeps what the actor has written there in place of weights of its own
  copied        the same with an engine that copies, as those on other devices do
  full checksum the same as the first, with `trainer.verify_weights=full`
  bfloat16      the same as the first, with an engine in bfloat16: float32 is cast on the way, and half of the bytes written
object store    buckets travel as objects, as between nodes; on one node this is the object store's shared memory
disk            buckets go through files in the folder for temporary ones (TMPDIR), synced as for other nodes: mostly the speed of its disk
copy            `numpy.copyto` of as many bytes in one process, from memory to memory that is there already, in one call
copy by weight  the same in one call a matrix, as weights lie in a model

Publisher, actor, rollout worker and the engine's way of taking weights over are the real ones in real processes, each on one thread;
only the model is a list of float32 matrices. Figures are `copy time / route time`; the aim is 0.6 for 500 MB, by process and by shared
memory. The copy is one block of hundreds of megabytes, which the system writes past the caches, as workers write a matrix; by itself it may
not do that with a matrix, which `copy by weight` shows. Prints one JSON line last.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _harness import arguments, finish, interleaved_async, median_ratio

from rolemesh.config import Config
from rolemesh.engines.rollout.parameters import ParameterTable
from rolemesh.names import ACTOR, ROLLOUT
from rolemesh.plan.routes import Route
from rolemesh.protocols.engine import LastingWeights
from rolemesh.roles.actor import ActorWorker
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.runtime import Backend, Pool, Worker, WorkerGroup, create_backend, register
from rolemesh.training.publication import Publisher

WIDTH = 1024
MATRIX_BYTES = 4 * WIDTH * WIDTH
SIZES = {"50 MB": 50, "500 MB": 500, "1 GB": 1000}


def matrices(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    torch.set_num_threads(1)
    return ((f"weight_{number}", torch.full((WIDTH, WIDTH), float(number))) for number in range(count))


class Source(ActorWorker):
    """An actor whose model is `trainer.steps` matrices: its settings have no other number to spare."""

    def load(self) -> None:
        """Makes the matrices."""
        weights = list(matrices(self.config.trainer.steps))
        forms = [(name, weight.to("meta")) for name, weight in weights]
        self.engine: Any = SimpleNamespace(merged_weights=lambda: iter(weights), empty_weights=lambda: iter(forms))

    @register(dispatch="all")
    def verify(self, full: bool) -> None:
        """What checksums cover from here on."""
        self._outlet._full = full


class Sink(RolloutWorker):
    """A rollout worker whose engine has a parameter for each."""

    copies = False

    def load(self) -> None:
        """Makes the parameters."""
        dtype = getattr(torch, self.config.model.dtype)
        model = torch.nn.ParameterDict(
            {name: torch.zeros_like(weight, dtype=dtype) for name, weight in matrices(self.config.trainer.steps)}
        )
        self.parameters = ParameterTable(model.requires_grad_(False))

    @register(dispatch="all")
    def copy(self, copies: bool) -> None:
        """Whether the engine copies whatever it is given, from here on."""
        self.copies = copies

    def take_weights(self, weights: Iterator[tuple[str, torch.Tensor]] | LastingWeights, version: int) -> int:
        self.parameters.load(iter(item for item in weights) if self.copies else weights)
        return version


class OneWay(Publisher):
    """By one route, whatever the plan would say."""

    route: Route

    def routes(self, role: str) -> list[Route]:
        return [self.route]


def config(count: int, dtype: str = "float32", folder: str | None = None) -> Config:
    return Config.model_validate({"trainer": {"steps": count, "publish_folder": folder}, "model": {"dtype": dtype}})


async def new_group(pool: Pool, role: str, worker: type[Worker], settings: Config) -> WorkerGroup:
    group = WorkerGroup(role, worker, pool, [0], worker_kwargs={"config": settings})
    await group.create(deadline=60)
    await group.init()
    return group


async def measure(backend: Backend, count: int, rounds: int, folder: str) -> dict[str, list[float]]:
    full, half = config(count, folder=folder), config(count, "bfloat16", folder)
    Path(folder, "rolemesh-benchmark").mkdir(exist_ok=True)
    pools = [await Pool.of_slots(backend, name, [1]) for name in ("train", "serve", "serve-half")]
    for pool in pools:
        await pool.create(60)
    actor = await new_group(pools[0], ACTOR, Source, full)
    sinks = [await new_group(pool, ROLLOUT, Sink, settings) for pool, settings in zip(pools, (full, full, half), strict=True)]
    version = 0

    def case(pool: int, route: Route, *, copies: bool = False, checks: bool = False) -> Any:
        groups = {ACTOR: actor, ROLLOUT: sinks[pool]}
        session = SimpleNamespace(groups=groups, backend=backend, config=half if pool == 2 else full, run_id="benchmark")
        publisher = OneWay(session)  # type: ignore[arg-type]
        publisher.route = route

        async def publish() -> float:
            nonlocal version
            version += 1
            await actor.verify(checks)
            await sinks[pool].copy(copies)
            began = backend.time()
            await publisher.give(ROLLOUT, version)
            return backend.time() - began

        return publish

    source, target = np.ones(count * MATRIX_BYTES, dtype=np.uint8), np.ones(count * MATRIX_BYTES, dtype=np.uint8)

    async def copy() -> None:
        np.copyto(target, source)

    async def copy_by_weight() -> None:
        for begin in range(0, count * MATRIX_BYTES, MATRIX_BYTES):
            np.copyto(target[begin : begin + MATRIX_BYTES], source[begin : begin + MATRIX_BYTES])

    cases = {
        "process": case(0, "process"),
        "shared memory": case(1, "shared_memory"),
        "shared memory, copied": case(1, "shared_memory", copies=True),
        "shared memory, full checksum": case(1, "shared_memory", checks=True),
        "shared memory, bfloat16": case(2, "shared_memory"),
        "object store": case(1, "object_store"),
        "disk": case(1, "disk"),
        "copy by weight": copy_by_weight,
        "copy": copy,
    }
    try:
        return await interleaved_async(cases, rounds)
    finally:
        for pool in pools:
            await pool.close()


def main() -> None:
    options = arguments(__doc__)
    sizes = {"50 MB": 50} if options.quick else SIZES
    path = [str(Path(__file__).parent), *filter(None, sys.path)]
    backend = create_backend("ray", num_cpus=3, object_store_bytes=1_000_000_000, pythonpath=path)
    backend.start()  # type: ignore[attr-defined]
    ratios, figures = {}, {}
    folder = TemporaryDirectory(prefix="rolemesh-benchmark-")
    try:
        for size, megabytes in sizes.items():
            count = megabytes * 10**6 // MATRIX_BYTES
            times = backend.run(measure(backend, count, 3 if options.quick else 9, folder.name))
            for name, taken in times.items():
                figures[f"{size}: {name} GB/s"] = round(count * MATRIX_BYTES / statistics.median(taken) / 1e9, 2)
                if name != "copy":
                    ratios[f"{size}: {name}"] = median_ratio(times["copy"], taken)
    finally:
        backend.stop()
        folder.cleanup()
    finish("publication", ratios, ["rolemesh", "torch", "ray"], figures=figures)


if __name__ == "__main__":
    main()
