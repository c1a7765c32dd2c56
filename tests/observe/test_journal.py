"""Epochs and generations of a run on disk: they rise over the death of controllers, and a torn last line costs nothing else."""

import json
import os
from pathlib import Path

import pytest

from rolemesh.errors import ConfigError
from rolemesh.observe import Journal, read_journal


def test_every_controller_has_a_higher_epoch_and_goes_on_from_the_generations_before(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as first:
        assert (first.epoch, first.generation("actor"), first.torn) == (1, 0, "")
        assert [first.next_generation("actor"), first.next_generation("actor"), first.next_generation("critic")] == [1, 2, 1]
    with Journal(tmp_path / "journal") as second:
        assert (second.epoch, second.generation("actor"), second.generation("critic")) == (2, 2, 1)
        assert second.next_generation("actor") == 3


def test_what_is_returned_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []

    def sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", sync)
    with Journal(tmp_path / "journal") as journal:
        size = (tmp_path / "journal").stat().st_size
        assert size > 0
        assert size in synced
        journal.next_generation("actor")
        assert synced[-1] == (tmp_path / "journal").stat().st_size > size


@pytest.mark.parametrize("torn", [b'{"kind": "generation", "group": "actor", "gen', b"\x00\x00\x00\n", b'{"kind": "epoch"}\n'])
def test_a_torn_last_line_is_dropped_and_told(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.next_generation("actor")
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert read_journal(path).torn == torn.decode()
    with Journal(path) as journal:
        assert (journal.epoch, journal.generation("actor"), journal.torn) == (2, 1, torn.decode())
    lines = path.read_bytes().splitlines()
    assert lines[:-1] == whole.splitlines()
    assert json.loads(lines[-1])["epoch"] == 2


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.next_generation("actor")
    path.write_bytes(path.read_bytes().replace(b'"epoch": 1', b'"epoch": ?', 1))
    with pytest.raises(ConfigError, match=r"journal must be as the run wrote it; found line 1 of 2: JSONDecodeError.*Restore it"):
        Journal(path)


def test_kinds_that_nobody_knows_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"kind": "commit", "step": 3}\n')
    assert read_journal(path).epoch == 0
