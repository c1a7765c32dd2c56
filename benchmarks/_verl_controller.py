"""The other side of `controller_overhead.py --verl-python`: the same work with verl's controller, in an environment that has verl.

Runs in a process of its own, with a Ray cluster of its own. Reads a JSON list from each line of its input, [what, arguments...], does it
and answers the seconds that it took, or an object with the reason why not. With `--quick` there is one group, which reads
what it has written and whose start is the one that counts: starting workers takes most of the time. Imports nothing of rolemesh.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever Ray and verl print is no answer
ROWS, WORKERS = 1024, 2


def main() -> None:
    try:
        import ray
        from verl.single_controller.ray import RayWorkerGroup  # noqa: F401
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=ANSWERS)
        return
    quick = "--quick" in sys.argv
    ray.init(
        address="local", num_cpus=WORKERS if quick else 8, include_dashboard=False, log_to_driver=False, object_store_memory=1_000_000_000
    )
    side = Side(quick)
    print(json.dumps({"version": __import__("verl").__version__}), file=ANSWERS)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(getattr(side, what)(*arguments)), file=ANSWERS)
    ray.shutdown()


class Side:
    """What can be asked for. Every method answers seconds."""

    def __init__(self, quick: bool) -> None:
        self.started = 0.0
        began = time.perf_counter()
        self.writers = self.readers = group()
        if quick:
            self.writers.no_op()
            self.started = time.perf_counter() - began
        else:
            self.readers = group()
        self.tokens = 0

    def no_op(self, times: int) -> float:
        """Of one call."""
        began = time.perf_counter()
        for _ in range(times):
            self.writers.no_op()
        return (time.perf_counter() - began) / times

    def hand_over(self, tokens: int, serialization: str) -> float:
        """Two workers write two columns of so many tokens a row, two others read them. `serialization`: numpy, or verl's own default."""
        import torch
        from verl import DataProto

        os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = serialization
        for workers in (self.writers, self.readers):
            workers.use(serialization)
        if tokens != self.tokens:
            self.writers.prepare(tokens)
            self.tokens = tokens
        prompts = DataProto.from_single_dict({"prompt_ids": torch.zeros(ROWS, 8, dtype=torch.int64)})
        began = time.perf_counter()
        self.readers.read(self.writers.write(prompts))
        return time.perf_counter() - began

    def start(self) -> float:
        """A pool and a group until its first answer."""
        import ray

        if self.started:
            return self.started
        began = time.perf_counter()
        workers = group()
        workers.no_op()
        seconds = time.perf_counter() - began
        for worker in workers.workers:
            ray.kill(worker)
        for placed in workers.resource_pool.pgs:
            ray.util.remove_placement_group(placed)
        return seconds


def group() -> Any:
    """Two workers with a CPU each."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool([WORKERS], use_gpu=False, max_colocate_count=1)
    workers = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(worker_class())), device_name="cpu")
    workers.resource_pool = pool
    return workers


def worker_class() -> type:
    import numpy as np
    import torch
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register

    class Columns(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def no_op(self) -> None: ...

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def use(self, serialization: str) -> None:
            os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = serialization

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def prepare(self, tokens: int) -> None:
            shape = (ROWS // WORKERS, tokens)
            columns = {"response_ids": torch.ones(shape, dtype=torch.int32), "rollout_logprobs": torch.ones(shape)}
            self.made = DataProto.from_single_dict(columns)

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def write(self, data: Any) -> Any:
            return self.made

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def read(self, data: Any) -> Any:
            pages = sum(float(column.numpy().reshape(-1)[::1024].sum()) for column in data.batch.values())
            return DataProto.from_single_dict({"pages": torch.full((len(data),), np.float32(pages).item())})

    return Columns


if __name__ == "__main__":
    main()
