"""Workers that the runtime tests run in real processes."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from rolemesh.batch import Batch
from rolemesh.protocols.store import StoreLink
from rolemesh.runtime import Answer, BlockingKvStore, Dispatch, Rendezvous, Request, Share, Topology, Worker, WorkerContext, register


def split_reversed(topology: Topology, request: Request) -> list[Share | None]:
    return [Share(batch=None, args=(topology.world_size - 1 - rank,), kwargs={}) for rank in range(topology.world_size)]


def collect_sum(topology: Topology, request: Request, answers: list[Answer]) -> int:
    return sum(answer.value for answer in answers)


TOO_FEW = Dispatch(name="too few", split=lambda topology, request: [Share(None, request.args, request.kwargs)], collect=collect_sum)


class Adder(Worker):
    def __init__(self, context: WorkerContext, *, bonus: int = 0) -> None:
        super().__init__(context)
        self.bonus, self.count, self.loads = bonus, 0, 0

    def load(self) -> None:
        self.loads += 1

    @register(dispatch="all")
    def who(self) -> dict[str, str | int]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_NAME", "MASTER_ADDR", "MASTER_PORT")
        return {name: os.environ[name] for name in names} | {"pid": os.getpid()}

    @register(dispatch="data_parallel", reads=("prompt_ids",), writes=("response_length",))
    def lengths(self, batch: Batch) -> Batch:
        counts = [len(row) + self.bonus for row in batch.rows("prompt_ids")]
        for count in counts:
            self.metrics.mean("length", count)
        with self.spans.span("counting"):
            return batch.select([]).with_columns({"response_length": np.array(counts, dtype=np.int64)})

    @register(dispatch="balanced", reads=("prompt_ids",), writes=("response_length",))
    def lengths_balanced(self, batch: Batch) -> Batch:
        return self.lengths(batch)

    @register(dispatch="data_parallel", reads=("response_length", "prompt_ids"))
    def total(self, batch: Batch) -> int:
        return int(batch.scalars("response_length").sum())

    @register(dispatch="data_parallel", reads=("prompt_ids",))
    def columns_seen(self, batch: Batch) -> list[str]:
        return list(batch.names)

    @register(dispatch=TOO_FEW)
    def too_few(self) -> int:
        return 1

    @register(dispatch="one_each")
    def double(self, value: int) -> int:
        return 2 * value

    @register(dispatch="rank_zero")
    def first(self) -> int:
        return self.context.rank

    @register(dispatch=Dispatch(name="own", split=split_reversed, collect=collect_sum))
    def own(self, value: int) -> int:
        return value * 10

    @register(dispatch="all", mutates=True)
    def count_up(self) -> int:
        self.count += 1
        return self.count

    @register(dispatch="all", mutates=True)
    def count_after(self, gates: str) -> int:
        """Count once a file is there that is named by this process."""
        ends = time.monotonic() + 60
        while not os.path.exists(f"{gates}/{os.getpid()}"):
            assert time.monotonic() < ends, "nobody opened the gate"
            time.sleep(0.01)
        return self.count_up()

    @register(dispatch="all")
    def counted(self) -> int:
        return self.count

    @register(dispatch="all")
    def loads_seen(self) -> int:
        return self.loads

    @register(dispatch="rank_zero", stores=True)
    def big(self, size: int) -> tuple[int, np.ndarray]:
        return size, np.arange(size, dtype=np.float32)

    @register(dispatch="all")
    def sum_of(self, array: np.ndarray) -> float:
        return float(array.sum())

    @register(dispatch="all")
    def fail_on(self, rank: int) -> int:
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} does not like this")
        return self.context.rank

    @register(dispatch="data_parallel", reads=("prompt_ids",), writes=("response_length",))
    def forgets(self, batch: Batch) -> Batch:
        return self.lengths(batch).select([])

    @register(dispatch="data_parallel", reads=("prompt_ids",), writes=("response_length",))
    def picks(self, batch: Batch, positions: list[int]) -> Batch:
        return self.lengths(batch).take(positions)

    @register(dispatch="all")
    def lock(self, rank: int) -> object:
        return threading.Lock() if self.context.rank == rank else None

    @register(dispatch="all")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(dispatch="all")
    def die(self, rank: int) -> None:
        if self.context.rank == rank:
            os.write(1, b"about to go\n")
            os.kill(os.getpid(), signal.SIGKILL)


class Flaky(Adder):
    def load(self) -> None:
        super().load()
        if self.context.rank == 1 and self.loads == 1:
            raise OSError("the disk was busy")


class DiesJoining(Adder):
    communicates = True

    @register(dispatch="all", mutates=True)
    def join(self, rendezvous: Rendezvous, deadline: float, timeout: float) -> None:
        if self.context.rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        super().join(rendezvous, deadline, timeout)


class Summer(Worker):
    """Sums over its communicator."""

    communicates = True

    @register(dispatch="all", mutates=True)
    def step(self, value: float, die_on: int = -1, how: int = signal.SIGKILL) -> float:
        import torch

        assert self.communicator is not None
        if self.context.rank == die_on:
            os.kill(os.getpid(), how)
        total = torch.full((200_000,), value + self.context.rank)
        for _ in range(3):
            self.communicator.group.allreduce([total]).wait()
            total /= self.context.world_size
        return float(total[0])

    @register(dispatch="all")
    def pid(self) -> int:
        return os.getpid()


class SlowToLoad(Worker):
    """Rank 1 takes its time, and says in the KV store when it is there."""

    def load(self) -> None:
        if self.context.rank == 1:
            time.sleep(1.5)
        self.kv.put(f"loaded/{self.context.rank}", self.context.group)

    @register(dispatch="all")
    def speaks_for(self) -> tuple[str, str, int]:
        return self.kv._store.owner, self.kv._store.group, self.kv.generation


class Registrar(Worker):
    """Tells the KV store where it is, and looks for its neighbour there."""

    def __init__(self, context: WorkerContext, *, link: StoreLink, run: str) -> None:
        super().__init__(context)
        owner = f"{context.group} rank {context.rank}"
        self.store = BlockingKvStore(link, owner=owner, namespace=run, group=context.group, generation=1)

    def load(self) -> None:
        self.store.put(f"{self.context.group}/{self.context.rank}", self.context.rank, lease=self.store.lease(20))

    @register(dispatch="all")
    def neighbour(self) -> int:
        return self.store.get(f"{self.context.group}/{1 - self.context.rank}", deadline=30)

    @register(dispatch="all")
    def missing(self) -> int:
        return self.store.get("nobody", deadline=0.5)


class Parent(Worker):
    """Has a child, a grandchild in a session of its own, and one that is a fork; and shared memory."""

    def load(self) -> None:
        command = ["bash", "-c", "setsid sleep 1000 & echo $!; wait"]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.child.stdout is not None
        self.grandchild = int(self.child.stdout.readline())
        self.memory = SharedMemory(create=True, size=4096)
        self.fork = os.fork()
        if self.fork == 0:
            time.sleep(1000)

    @register(dispatch="all")
    def family(self) -> dict[str, int | str]:
        children = {"child": self.child.pid, "grandchild": self.grandchild, "fork": self.fork}
        return {"pid": os.getpid(), **children, "memory": self.memory.name}

    @register(dispatch="all")
    def sigterm_here_and_in_a_fork(self) -> int:
        """Gets SIGTERM, and how a forked child ends on one."""
        os.kill(os.getpid(), signal.SIGTERM)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
            os._exit(0)
        return os.waitpid(child, 0)[1]


class SilentWhileMade(Worker):
    """Like a process that imports for long: its control thread answers for some seconds, then C code keeps it from that."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        time.sleep(3)
        ctypes.PyDLL(None).sleep(5)  # does not let go of the interpreter
