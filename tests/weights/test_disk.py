"""Weights on disk: what a reader gets, what it refuses, what is left, and that others can read the files."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rolemesh.config.schema import ModelConfig
from rolemesh.errors import DeadlineExceeded, RolemeshError, StaleWeights
from rolemesh.models import load_model
from rolemesh.weights import FileReader, Intake, Outlet, WeightManifest, disk, find_token, leave_token

KIB = 1024


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Of several formats, of sizes that fill no unit of alignment, one of them a single number, one empty."""
    numbers = {f"w{number}": torch.full((100, 41), 10.0 * version + number) for number in range(5)}
    odd = {"half": torch.full((33, 3), version + 0.5, dtype=torch.bfloat16), "count": torch.tensor(version), "none": torch.zeros(0, 3)}
    return numbers | odd | {"mask": torch.arange(5 + version, 12 + version) % 3 == 0, "last": torch.full((7,), float(version))}


def begin(outlet: Outlet, folder: Path, version: int, weights: dict[str, torch.Tensor] | None = None) -> WeightManifest:
    weights = weights or weights_of(version)
    return outlet.begin(version, weights.items(), iter(weights.items()), shared=False, folder=str(folder))


def publish(outlet: Outlet, folder: Path, version: int, weights: dict[str, torch.Tensor] | None = None) -> WeightManifest:
    manifest = begin(outlet, folder, version, weights)
    for number in range(len(manifest.buckets)):
        assert outlet.pack(version, number) is None
    return manifest


def new_outlet(full: bool = True) -> Outlet:
    return Outlet(bucket_bytes=40 * KIB, path="", leads=True, full=full)


def taken(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """What an engine is given, by the way that all buckets go."""
    found: dict[str, torch.Tensor] = {}

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> int:
        found.update((name, weight.clone()) for name, weight in weights)
        return manifest.version

    reader, held = FileReader(manifest, waiter="rollout rank 0"), None
    intake = Intake(manifest, load, waiter="rollout rank 0", deadline=30)
    try:
        for number in range(len(manifest.buckets)):
            held = intake.take(number, reader.read(number))
    finally:
        intake.close()
    assert held == manifest.version
    return found


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == weight.dtype and torch.equal(found[name], weight) for name, weight in expected.items()
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("full", [True, False])
def test_every_version_arrives_bit_for_bit_and_the_last_whole_one_alone_stays(tmp_path: Path, full: bool):
    outlet, seen = new_outlet(full), set()
    for version in (0, 1, 1, 2):
        manifest = publish(outlet, tmp_path, version)
        assert len(manifest.buckets) == 3
        assert equal(taken(manifest), weights_of(version))
        assert equal(taken(manifest), weights_of(version)), "for as many readers as there are"
        assert names_in(tmp_path) == [Path(manifest.folder).name]
        assert names_in(Path(manifest.folder)) == [
            *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
            "model.safetensors.index.json",
        ]
        seen.add(manifest.folder)
    assert len(seen) == 4, "no name is used twice, not for a version that is published again"
    under_way = begin(outlet, tmp_path, 3)
    outlet.pack(3, 0)
    assert names_in(tmp_path) == sorted(Path(folder).name for folder in (manifest.folder, under_way.folder))
    assert equal(taken(manifest), weights_of(2)), "the last whole version stays until the next one is whole"
    again = publish(outlet, tmp_path, 3)
    assert names_in(tmp_path) == [Path(again.folder).name], "what was given up goes"
    other = publish(new_outlet(), tmp_path, 4)
    assert names_in(tmp_path) == [Path(other.folder).name], "as goes what an actor that died has left"


def test_the_files_are_those_of_a_hugging_face_folder(tmp_path: Path):
    weights = {name: weight.detach() for name, weight in load_model(ModelConfig(), seed=3).named_parameters()}
    outlet = Outlet(bucket_bytes=600 * KIB, path="", leads=True)
    manifest = publish(outlet, tmp_path, 7, weights)
    folder = Path(manifest.folder)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 5
    found = {name: weight for path in files for name, weight in load_file(path).items()}
    assert equal(found, weights)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(weight.nbytes for weight in weights.values()), "version": 7, "content": "merged"}
    assert all(name in load_file(folder / index["weight_map"][name]) for name in weights)
    assert index["weight_map"].keys() == weights.keys()
    mixed = publish(outlet, tmp_path, 8, weights_of(8))
    assert equal(
        {name: weight for path in Path(mixed.folder).glob("*.safetensors") for name, weight in load_file(path).items()}, weights_of(8)
    )


def test_F01_cut_stale_foreign_and_changed_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "VISIBLE_SECONDS", 0.2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    outlet, other = new_outlet(), new_outlet()
    old = publish(outlet, tmp_path / "mine", 5)
    name = "model-00002-of-00003.safetensors"
    stale = (Path(old.folder) / name).read_bytes()
    manifest = publish(outlet, tmp_path / "mine", 6)
    foreign = (Path(publish(other, tmp_path / "theirs", 6).folder) / name).read_bytes()
    path = Path(manifest.folder) / name
    whole = path.read_bytes()
    third = (path.parent / "model-00003-of-00003.safetensors").read_bytes()

    def changed(at: int) -> bytes:
        return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]

    damages: list[tuple[bytes | None, type[Exception], str]] = [
        (whole[:-1], ValueError, rf"{name} must have {len(whole)} bytes, found {len(whole) - 1}: it is half-written"),
        (whole[:100], ValueError, f"must have {len(whole)} bytes, found 100"),
        (b"", ValueError, "found 0"),
        (third, ValueError, f"must have {len(whole)} bytes, found {len(third)}"),
        (stale, StaleWeights, "bucket 2 of 3 of weight version 6 holds weight version 5, asked for 6"),
        (foreign, ValueError, "bucket 2 of 3 of weight version 6 is of another publication than its manifest"),
        (whole.replace(b'"w2"', b'"x2"'), ValueError, f"{name} does not have the tensors of its manifest"),
        (bytes(len(whole)), ValueError, "does not begin as a file of a publication does"),
        (changed(len(whole) - 1), ValueError, "bucket 2 of 3 of weight version 6 does not have the checksum"),
        (changed(len(whole) - 20_000), ValueError, "does not have the checksum"),
        (None, RolemeshError, f"rollout rank 0 does not see {path}, which the actor has written, after 0.2 s"),
    ]
    assert len(foreign) == len(stale) == len(whole)
    for data, error, message in damages:
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(error, match=message):
            taken(manifest)
        path.write_bytes(whole)
    assert equal(taken(manifest), weights_of(6))
    path.unlink()
    path.mkdir()
    with pytest.raises(RolemeshError, match=r"could not read .* for rollout rank 0 in .*IsADirectoryError.*; free there are \d+ bytes"):
        taken(manifest)


def test_a_reader_is_freed_when_the_publication_ends_half_way(tmp_path: Path):
    outlet = new_outlet()
    manifest = begin(outlet, tmp_path, 1)
    outlet.pack(1, 0)
    reader = FileReader(manifest, waiter="rollout rank 0")
    intake = Intake(manifest, lambda weights: len(list(weights)), waiter="rollout rank 0", deadline=0.2)
    assert intake.take(0, reader.read(0)) is None
    outlet.pack(1, 1)
    bucket = reader.read(1)
    time.sleep(0.5)
    with pytest.raises(DeadlineExceeded, match=r"rollout rank 0 waited 0\.2 s for bucket 2 of 3 of weight version 1 from the actor"):
        intake.take(1, bucket)


def test_room_is_asked_for_before_a_version_and_what_was_there_stays(tmp_path: Path):
    outlet = new_outlet()
    manifest = publish(outlet, tmp_path, 1)
    huge, need = {"w": torch.empty(2**50, device="meta")}, 2**52 + 64
    with pytest.raises(
        RolemeshError, match=rf"publishing weight version 2 needs {need} bytes in {tmp_path}, free are \d+\. Make room there"
    ):
        begin(outlet, tmp_path, 2, huge)
    with pytest.raises(ValueError, match="bucket 1 of weight version 2 was asked for, but none is being published"):
        outlet.pack(2, 0)
    assert names_in(tmp_path) == [Path(manifest.folder).name]
    assert equal(taken(manifest), weights_of(1))
    assert equal(taken(publish(outlet, tmp_path, 3)), weights_of(3))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_fills_while_a_version_is_written_is_told_with_numbers_and_is_used_again(small_disk: Path):
    outlet = new_outlet()
    manifest = publish(outlet, small_disk, 1)  # 5 matrices of 16.4 KB, in three files of whole pages
    begin(outlet, small_disk, 2)
    outlet.pack(2, 0)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    filler = small_disk / "filler"
    filler.write_bytes(bytes(free - 8 * KIB))
    message = r"could not write bucket 2 of 3 of weight version 2, \d+ bytes, in \S+: OSError: \[Errno 28\] .*; free there are \d+ bytes"
    with pytest.raises(RolemeshError, match=message):
        outlet.pack(2, 1)
    assert names_in(small_disk) == ["filler", Path(manifest.folder).name]
    assert equal(taken(manifest), weights_of(1))
    with pytest.raises(RolemeshError, match=r"publishing weight version 2 needs \d+ bytes in \S+, free are \d+\."):
        begin(outlet, small_disk, 2)
    filler.unlink()
    assert equal(taken(publish(outlet, small_disk, 2)), weights_of(2))


def test_a_folder_that_is_gone_or_may_not_be_written_is_told(tmp_path: Path):
    with pytest.raises(RolemeshError, match=rf"could not publish weight version 1 in {tmp_path}/gone: FileNotFoundError"):
        begin(new_outlet(), tmp_path / "gone", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(RolemeshError, match="NotADirectoryError"):
        begin(new_outlet(), tmp_path / "file", 1)


def test_a_token_is_found_where_it_was_left_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "VISIBLE_SECONDS", 0.2)
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    earlier, _ = leave_token(str(folders[0]))
    token, wrong = leave_token(str(folders[0]))
    assert (wrong, names_in(folders[0])) == ("", [f"token-{token}"])
    assert find_token(str(folders[0]), token) == ""
    assert find_token(str(folders[0]), earlier) == f"{folders[0]}/token-{earlier} is not there after 0.2 s"
    assert find_token(str(folders[1]), token) == f"{folders[1]}/token-{token} is not there after 0.2 s"
    (folders[1] / f"token-{token}").write_text("another")
    assert find_token(str(folders[1]), token).endswith("holds 'another'")
    assert leave_token(str(tmp_path / "gone"))[1].startswith("FileNotFoundError")
