"""Communicators of several ranks in threads of this process: what a cut frees and what it leaves alone."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rolemesh.errors import DeadlineExceeded
from rolemesh.runtime import Communicator, Rendezvous

HERE = "127.0.0.1"


def formed(ranks: int, timeout: float = 60.0) -> list[Communicator]:
    store = Communicator.open_store(HERE, ranks, 20)
    rendezvous = Rendezvous(address=HERE, port=store.port, generation=1)
    found = [Communicator(rendezvous, rank=rank, world_size=ranks, address=HERE) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        done = [threads.submit(one.form, deadline=20, timeout=timeout, store=store if one.rank == 0 else None) for one in found]
        for future in done:
            future.result(30)
    return found


def test_a_cut_frees_a_blocked_collective_and_leaves_other_sockets_alone() -> None:
    """Sockets of others may appear while the ranks connect, so being new does not make one ours."""
    with socket.create_server((HERE, 0)) as server:
        stop, opened = threading.Event(), []

        def open_sockets() -> None:
            while not stop.is_set():
                opened.append((socket.create_connection(server.getsockname()), server.accept()[0]))
                time.sleep(0.001)

        with ThreadPoolExecutor(2) as threads:
            opening = threads.submit(open_sockets)
            ranks = formed(3)
            stop.set()
            opening.result(10)
            blocked = threads.submit(lambda: ranks[1].group.allreduce([torch.ones(4)]).wait())
            time.sleep(0.2)
            assert not blocked.done()
            assert ranks[1].cut() > 0
            with pytest.raises(RuntimeError):
                blocked.result(5)
        assert opened
        for near, far in opened:
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            near.close()
            far.close()


def test_two_communicators_of_one_process_are_cut_apart() -> None:
    first, second = formed(2), formed(2)
    first[0].cut()
    tensors = [torch.ones(1), torch.full((1,), 2.0)]
    for work in [one.group.allreduce([tensor]) for one, tensor in zip(second, tensors, strict=True)]:
        work.wait()
    assert [tensor.item() for tensor in tensors] == [3.0, 3.0]


def test_a_cut_ends_forming() -> None:
    store = Communicator.open_store(HERE, 2, 20)
    lonely = Communicator(Rendezvous(address=HERE, port=store.port, generation=1), rank=0, world_size=2, address=HERE)
    timer = threading.Timer(0.3, lonely.cut)
    timer.start()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="the attempt was cut"):
        lonely.form(deadline=30, timeout=30, store=store)
    assert time.monotonic() - started < 5
    timer.join()


def test_forming_is_bounded_by_its_deadline_and_a_collective_by_its_timeout() -> None:
    store = Communicator.open_store(HERE, 2, 20)
    lonely = Communicator(Rendezvous(address=HERE, port=store.port, generation=1), rank=0, world_size=2, address=HERE)
    with pytest.raises(DeadlineExceeded, match=rf"rank 0 waited \d.\d s for 2 ranks at {HERE}:{store.port} .generation 1.*end-1"):
        lonely.form(deadline=0.5, timeout=30, store=store)
    ranks = formed(2, timeout=0.5)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="500ms"):
        ranks[0].group.allreduce([torch.ones(4)]).wait()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_A17_ports_are_held_until_they_are_used(rounds: int) -> None:
    """Sixteen ranks on one machine, again and again: every port is picked by the system and kept, so none is taken twice."""
    for _ in range(rounds):
        ranks = formed(16)
        assert len({end for rank in ranks for end in rank._ends}) == 17, "one for the store, one for each rank"
        for rank in ranks:
            rank.cut()


def test_A17_a_port_that_somebody_else_holds_is_named_with_the_role() -> None:
    with socket.create_server((HERE, 0)) as foreign:
        port = foreign.getsockname()[1]
        met = Rendezvous(address=HERE, port=port, generation=3)
        with pytest.raises(DeadlineExceeded, match=rf"actor rank 1 waited \d\.\d s for 16 ranks at {HERE}:{port} .generation 3"):
            Communicator(met, rank=1, world_size=16, address=HERE, owner="actor").form(deadline=1, timeout=1)
