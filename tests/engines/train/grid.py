"""Ranks of a grid as processes of this machine, over gloo. Shared by the tests of this folder."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo

from rolemesh.engines.train import Groups

TIMEOUT = timedelta(seconds=120)
CONTEXT = multiprocessing.get_context("forkserver")  # its server imports what takes long once for all ranks
CONTEXT.set_forkserver_preload(
    ["rolemesh.engines.train", "rolemesh.algorithms", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "peft"]
)


class Grid:
    """One of several ranks that meet in a folder. `groups` forms groups among the first, second ... so many of them."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank, self.size, self.folder = rank, size, Path(folder)
        self._store = FileStore(f"{folder}/store", size)
        self._formed = 0

    def groups(self, size: int, tensor: int = 1) -> Groups:
        """Of the block of `size` ranks that this one is in, as rows of `tensor`."""
        self._formed += 1
        first = self.rank // size * size
        everyone, mine = range(size), self.rank - first
        world = self._group("world", first, everyone)
        row, column = everyone[mine // tensor * tensor :][:tensor], everyone[mine % tensor :: tensor]
        return Groups(world=world, data=self._group("column", first, column), tensor=self._group("row", first, row))

    def _group(self, kind: str, first: int, ranks: range) -> Any:
        if len(ranks) == 1:
            return None
        store = PrefixStore(f"{self._formed} {kind} {first} {ranks}", self._store)
        return ProcessGroupGloo(store, ranks.index(self.rank - first), len(ranks), TIMEOUT)


def _rank_main(main: Callable[[Grid], Any], rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.save(main(Grid(rank, size, folder)), f"{folder}/{rank}.pt")


def run_grid(main: Callable[[Grid], Any], size: int, folder: Path) -> list[Any]:
    """`main` on every rank in a process of its own, in which it returns what can be saved; the results in rank order."""
    ranks = [CONTEXT.Process(target=_rank_main, args=(main, rank, size, str(folder)), daemon=True) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        waiting, ends = {rank.sentinel for rank in ranks}, time.monotonic() + 150
        while waiting and not any(rank.exitcode for rank in ranks) and time.monotonic() < ends:
            waiting -= set(wait(waiting, 5))
        assert [rank.exitcode for rank in ranks] == [0] * size  # None for one that waits for others
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
