"""Weights in a node's shared memory: several readers, real processes, and everything that may happen to either side."""

import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from rolemesh.config.schema import ModelConfig
from rolemesh.engines.rollout import create_engine
from rolemesh.errors import DeadlineExceeded, RolemeshError, StaleWeights
from rolemesh.models import load_model
from rolemesh.protocols.engine import LastingWeights, RolloutEngine
from rolemesh.weights import Outlet, SharedFile, SharedWeights, WeightManifest

KIB = 1024


@pytest.fixture
def path() -> Iterator[str]:
    path = f"/dev/shm/rolemesh-test-{secrets.token_hex(6)}"
    yield path
    Path(path).unlink(missing_ok=True)


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((100, 41), 10.0 * version + number) for number in range(6)}


def begin(outlet: Outlet, version: int, weights: dict[str, torch.Tensor] | None = None) -> WeightManifest:
    weights = weights or weights_of(version)
    return outlet.begin(version, weights.items(), iter(weights.items()), shared=True)


def reader(manifest: WeightManifest, deadline: float = 30.0) -> SharedWeights:
    return SharedWeights(SharedFile.open(manifest.shared), manifest, waiter="rollout rank 0", deadline=deadline)


def read_all(shared: SharedWeights, found: list[dict[str, torch.Tensor]]) -> None:
    found.append({name: weight.clone() for name, weight in shared})


def new_engine(kind: str = "builtin", **model: str) -> RolloutEngine:
    torch.set_num_threads(1)
    made = load_model(ModelConfig(**model), seed=1)
    return create_engine(kind, made, slots=2, max_prompt_tokens=4, max_response_tokens=4, deterministic=True)


def parameters(engine: RolloutEngine) -> dict[str, torch.nn.Parameter]:
    return dict(engine._parameters._parameters)


def test_a_file_is_one_that_readers_follow_when_it_is_replaced(path: str):
    file = SharedFile(path, 100)
    file._memory[40] = 7
    opened = SharedFile.open(path)
    assert (opened.size, opened._memory[40]) == (100, 7)
    assert not opened._memory.flags.writeable
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert opened.is_current
    assert opened.has_writer
    newer = SharedFile(path, 50)
    assert not opened.is_current
    assert opened.has_writer, "the old one lives still"
    assert opened._memory[40] == 7, "memory that is mapped stays"
    file.close()
    assert not opened.has_writer
    newer.remove()
    assert not newer.is_current
    with pytest.raises(FileNotFoundError):
        SharedFile.open(path)


def test_a_file_that_has_no_room_says_so_before_anything_is_written(path: str):
    with pytest.raises(RolemeshError, match=rf"needs {2**47} bytes of shared memory for {path}, free are \d+\. .*--shm-size"):
        SharedFile(path, 2**47)
    assert not Path(path).exists()


def test_room_is_asked_for_whenever_a_version_needs_a_new_file(path: str):
    outlet = Outlet(bucket_bytes=40 * KIB, path=path, leads=True)
    begin(outlet, 1)
    outlet.fill(1)
    held, need = reader(outlet._manifest), 2**52 + 64
    with pytest.raises(RolemeshError, match=rf"needs {need} bytes of shared memory for {path}, free are \d+\. .*trainer\.publish_folder"):
        begin(outlet, 2, {"w": torch.empty(2**50, device="meta")})
    assert not Path(path).exists()
    with pytest.raises(ValueError, match="weight version 2 was asked for, but none is being published"):
        outlet.fill(2)
    assert len(list(held)) == 6, "who has mapped the version before still has it"
    manifest = begin(outlet, 3)
    outlet.fill(3)
    assert len(list(reader(manifest))) == 6


@pytest.mark.parametrize("full", [True, False])
def test_readers_get_every_version_while_it_is_written_and_one_file_serves_all(path: str, full: bool):
    outlet = Outlet(bucket_bytes=40 * KIB, path=path, leads=True, full=full)
    inode = 0
    for version in range(4):
        manifest = begin(outlet, version)
        assert [len(bucket.names) for bucket in manifest.buckets] == [2, 2, 2]
        assert manifest.nbytes == os.stat(path).st_size == 3 * (64 + 2 * 16448)  # 100 * 41 * 4 bytes are 256 * 64 + 16: 257 units
        readers, found = [reader(manifest) for _ in range(3)], []
        threads = [threading.Thread(target=read_all, args=(one, found)) for one in readers]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        assert not found, "nothing is read before it is there"
        outlet.fill(version)
        for thread in threads:
            thread.join(30)
        expected = weights_of(version)
        assert len(found) == 3
        assert all(torch.equal(one[name], weight) for one in found for name, weight in expected.items())
        assert all(one.intact and not one.kept for one in readers)
        assert inode in (0, os.stat(path).st_ino)
        inode = os.stat(path).st_ino
    begin(outlet, 8, {"w": torch.zeros(30_000)})
    assert os.stat(path).st_ino != inode
    assert all(one.intact for one in readers), "the old file keeps what it held"
    manifest = begin(outlet, 9)
    outlet.fill(9)
    late = reader(manifest)
    next(late)
    inode = os.stat(path).st_ino
    begin(outlet, 10, {"w": torch.zeros(10)})
    assert os.stat(path).st_ino == inode, "what fits has the place of what was there"
    assert not late.intact
    with pytest.raises(ValueError, match="bucket 1 of 3 of weight version 9 has no valid header"):
        list(late)
    outlet.close()
    assert not Path(path).exists()


def test_F01_stale_half_written_and_overwritten_versions_are_refused(path: str):
    outlet = Outlet(bucket_bytes=40 * KIB, path=path, leads=True)
    first = begin(outlet, 1)
    outlet.fill(1)
    second = begin(outlet, 2)
    assert not reader(first).intact
    with pytest.raises(DeadlineExceeded, match=r"rollout rank 0 waited 0.2 s for bucket 1 of 3 of weight version 2 from the actor"):
        list(reader(second, 0.2))
    outlet.pack(2, 0)
    half = reader(second, 0.2)
    assert [next(half)[0], next(half)[0]] == ["w0", "w1"]
    assert not half.intact
    with pytest.raises(DeadlineExceeded, match="bucket 2 of 3"):
        next(half)
    with pytest.raises(StaleWeights, match="holds weight version 2, asked for 1"):
        list(reader(first))  # too late: another version is there by now
    [outlet.pack(2, number) for number in (1, 2)]
    torn = reader(second)
    next(torn)
    begin(outlet, 3)
    with pytest.raises(ValueError, match="no valid header"):
        list(torn)  # the bucket changed while it was read
    outlet.fill(3)
    third = outlet._manifest
    assert third is not None
    whole = bytes(outlet._file._memory)
    for at, error, message in (
        (8, StaleWeights, "bucket 1 of 3"),
        (16, ValueError, "must come next"),
        (24, ValueError, "its header says"),
        (32, ValueError, "checksum"),
        (40, ValueError, "another publication than its manifest"),
        (64, ValueError, "checksum"),
    ):
        outlet._file._memory[at] ^= 1
        with pytest.raises(error, match=message):
            list(reader(third))
        outlet._file._memory[:] = bytearray(whole)
    assert len(list(reader(third))) == 6


def test_a_number_of_a_version_that_another_publisher_uses_again_is_not_taken_for_the_first(path: str):
    """Same numbers, names and shapes, so that the contents alone differ; the second publisher writes into the first one's memory."""
    first = Outlet(bucket_bytes=40 * KIB, path=path, leads=True)
    manifest = begin(first, 5)
    first.fill(5)
    kept, torn, late = reader(manifest), reader(manifest), reader(manifest)
    assert len(list(kept)) == 6
    next(torn)
    again = begin(first, 5, weights_of(8))
    assert again.nonce != manifest.nonce
    first.fill(5)
    assert not kept.intact, "who serves from there must not go on"
    for one in (torn, late):
        with pytest.raises(ValueError, match="weight version 5 is of another publication than its manifest"):
            list(one)
    taken = dict(reader(again))
    assert all(torch.equal(taken[name], weight) for name, weight in weights_of(8).items())


def test_a_publication_that_is_repeated_for_late_readers_is_the_same_to_those_that_have_it(path: str):
    outlet, weights = Outlet(bucket_bytes=40 * KIB, path=path, leads=True), weights_of(5)
    manifest = outlet.begin(5, weights.items(), iter(weights.items()), shared=True, nonce=7)
    outlet.fill(5)
    kept = reader(manifest)
    assert len(list(kept)) == 6
    repeated = outlet.begin(5, weights.items(), iter(weights.items()), shared=True, nonce=7)
    assert not kept.intact, "it is being written"
    outlet.fill(5)
    assert kept.intact
    assert len(list(reader(repeated))) == 6


def test_readers_hear_at_once_of_a_publication_that_is_given_up(path: str):
    outlet = Outlet(bucket_bytes=40 * KIB, path=path, leads=True)
    weights = weights_of(5)
    manifest = outlet.begin(5, weights.items(), iter(list(weights.items())[:3]), shared=True)
    one, began = reader(manifest), time.monotonic()
    with pytest.raises(ValueError, match="expected w3, found nothing more"):
        outlet.fill(5)
    with pytest.raises(ConnectionAbortedError, match="weight version 5 was given up before bucket 2 of 3"):
        list(one)
    assert time.monotonic() - began < 5
    with pytest.raises(ValueError, match="weight version 6 was asked for, but version 5 is being published"):
        outlet.fill(6)
    outlet = Outlet(bucket_bytes=40 * KIB, path=path, leads=False)
    outlet.begin(5, weights.items(), iter(weights.items()), shared=True)
    outlet.fill(5)
    assert outlet._file is None, "a rank that does not lead has no part of the memory"


def _write(path: str, pipe: Connection) -> None:
    outlet = Outlet(bucket_bytes=40 * KIB, path=path, leads=True)
    pipe.send(begin(outlet, 1))
    outlet.pack(1, 0)
    pipe.recv()


def _read(manifest: WeightManifest, pipe: Connection) -> None:
    shared = reader(manifest)
    pipe.send(next(shared)[0])
    pipe.recv()


def _started(target: Callable[..., None], *args: object) -> tuple[multiprocessing.Process, Connection]:
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    return process, mine


def test_a_dead_writer_frees_its_readers_and_a_dead_or_stopped_reader_holds_up_nobody(path: str):
    writer, pipe = _started(_write, path)
    assert pipe.poll(30)
    one = reader(pipe.recv())
    assert next(one)[0] == "w0"
    os.kill(writer.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ConnectionAbortedError, match="the actor's process is gone, rollout rank 0 waited for bucket 2 of 3"):
        list(one)
    assert time.monotonic() - began < 5
    writer.join(30)

    outlet = Outlet(bucket_bytes=40 * KIB, path=path, leads=True)
    manifest = begin(outlet, 2)
    for blow in (signal.SIGSTOP, signal.SIGKILL):
        outlet.pack(2, 0)
        process, pipe = _started(_read, manifest)
        assert pipe.poll(30)
        os.kill(process.pid, blow)
        for number in (1, 2):
            outlet.pack(2, number)
        assert len(list(reader(manifest))) == 6
        manifest = begin(outlet, 2)
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)


@pytest.mark.parametrize(("kind", "dtype"), [("fake", "float32"), ("builtin", "float32"), ("builtin", "bfloat16")])
def test_engines_keep_shared_weights_in_place_of_their_own(path: str, kind: str, dtype: str):
    source = {name: weight.detach() for name, weight in load_model(ModelConfig(), seed=0).named_parameters()}
    engines, outlet = [new_engine(kind, dtype=dtype) for _ in range(2)], Outlet(bucket_bytes=600 * KIB, path=path, leads=True)
    copied, inside = new_engine(kind, dtype=dtype), getattr(torch, dtype)
    for version in range(2):
        given = {name: weight * (1 + version) for name, weight in source.items()}
        manifest = outlet.begin(version, given.items(), iter(given.items()), shared=True, dtype=inside)
        outlet.fill(version)
        ways = [reader(manifest) for _ in engines]
        for engine, way in zip(engines, ways, strict=True):
            engine.load_weights(way, version)
        copied.load_weights(iter(reader(manifest)._read()), version)
        assert all(way.kept and way.intact for way in ways)
        found = [parameters(engine) for engine in (*engines, copied)]
        for name, weight in given.items():
            assert all(torch.equal(one[name], weight.to(inside)) for one in found), name
        assert found[0].keys() == given.keys()
    outlet._file.buckets(manifest)[0][64:] = 0
    assert [bool(one[manifest.buckets[0].names[0]].any()) for one in found] == [False, False, True], "the first two share their memory"
    outlet.begin(7, given.items(), iter(()), shared=True, dtype=inside)
    assert not any(way.intact for way in ways)
    # What does not last is copied again, into memory of the engine's own; so is what comes in another format.
    engines[0].load_weights(source.items(), 3)
    engines[0].load_weights(LastingWeights(iter({n: w.double() for n, w in source.items()}.items())), 4)
    assert all(torch.equal(weight, source[name].to(inside)) for name, weight in parameters(engines[0]).items())
    engines[1].load_weights(LastingWeights(iter([*source.items()])), 5)
    if dtype == "float32":
        assert all(weight.data_ptr() == source[name].data_ptr() for name, weight in parameters(engines[1]).items())
    engines[1].sleep(keep_weights=False)
    engines[1].wake()
    engines[1].load_weights(source.items(), 6)
    assert all(weight.data_ptr() != source[name].data_ptr() for name, weight in parameters(engines[1]).items())
