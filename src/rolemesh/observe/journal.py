"""The journal of a run: epochs of its controllers and generations of its groups, on disk before anybody acts on them.

A worker refuses calls of an older (epoch, generation). Both therefore have to rise over the death of a controller, and the journal is
where the next one learns from which numbers on. Whoever opens it is in charge of the run; a run directory has one such process at a time.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolemesh.errors import ConfigError
from rolemesh.observe.files import Closing, JsonLines, sync_directory


@dataclass(slots=True)
class JournalState:
    """What a journal says. Kinds of lines that nobody here knows are passed over."""

    epoch: int = 0
    """Of the last controller; 0 before the first."""
    generations: dict[str, int] = field(default_factory=dict)
    """The last one of each group."""
    whole: int = 0
    """Bytes up to the end of the last line that is one."""
    torn: str = ""
    """What stands behind that: a line that was cut short as it was written."""


def read_journal(path: Path) -> JournalState:
    """Read it, as far as it was written. Raises ConfigError when a line before the last is damaged."""
    state = JournalState()
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no end of line")
            _take_in(state, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines):
                need = f"{path} must be as the run wrote it"
                found = f"line {number} of {len(lines)}: {type(error).__name__}: {error}"
                raise ConfigError.one("run", need, found, "Restore it, or start a new run from a checkpoint's model folder") from error
            state.torn = line.decode(errors="replace")
            break
        state.whole += len(line)
    return state


def _take_in(state: JournalState, record: Mapping[str, Any]) -> None:
    if record["kind"] == "epoch":
        state.epoch = max(state.epoch, int(record["epoch"]))
    elif record["kind"] == "generation":
        group = str(record["group"])
        state.generations[group] = max(state.generations.get(group, 0), int(record["generation"]))


class Journal(Closing):
    """Opened by a controller for itself: its `epoch` is a new one and on disk already. `torn` is a last line that had to be dropped."""

    def __init__(self, path: Path) -> None:
        state = read_journal(path)
        if state.torn:
            os.truncate(path, state.whole)
        self.epoch, self.torn = state.epoch + 1, state.torn
        self._generations = state.generations
        self._lines = JsonLines(path, sync=True)
        self._write("epoch", epoch=self.epoch, pid=os.getpid(), machine=socket.gethostname())
        sync_directory(path.parent)

    def generation(self, group: str) -> int:
        """The last generation of a group; 0 before the first."""
        return self._generations.get(group, 0)

    def next_generation(self, group: str) -> int:
        """A new generation of a group, higher than any before."""
        self._generations[group] = generation = self.generation(group) + 1
        self._write("generation", group=group, generation=generation, epoch=self.epoch)
        return generation

    def _write(self, kind: str, **fields: Any) -> None:
        self._lines.write({"time": time.time(), "kind": kind, **fields})

    def close(self) -> None:
        self._lines.close()
