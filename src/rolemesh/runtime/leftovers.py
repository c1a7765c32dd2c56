"""What runs have on this machine, by their marks and folders: for `rolemesh clean`. Needs no janitor to be alive, but frees through one."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rolemesh.runtime.janitor import JanitorLink, is_watched
from rolemesh.runtime.janitor_process import RUN, base_folder, folder_of, is_alive, owned, processes, read_bytes, read_record

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What one run has on this machine."""

    run: str
    """Its id; of a folder that does not say, empty."""
    state: Literal["driven", "waiting", "left"]
    """It has a driver (perhaps on another machine), it is within its time to live, or neither."""
    driver: int
    """Pid of its last driver here; 0 if there was none."""
    since: float
    """When it was started here, seconds of the wall clock."""
    address: str
    """Cluster that it joined; empty when that is its own."""
    processes: tuple[dict[str, Any], ...]
    """`pid`, `command` and `bytes` of resident memory of each."""
    folder: Path
    folder_bytes: int
    """In it, and in folders that it has elsewhere."""

    def free(self) -> None:
        """End all of it, and its driver if it has one."""
        if self.run:
            JanitorLink(self.run, "look").bye("free")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def find_leftovers() -> list[Leftover]:
    """One entry for each run with processes or a folder on this machine, the oldest first."""
    base = Path(base_folder())
    folders = [path for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
    marked = (entry for found in processes() for entry in found.environment if entry.startswith(f"{RUN}=".encode()))
    runs = {entry.partition(b"=")[2].decode() for entry in marked}
    named = {path: read_record(str(path)).get("run", "") for path in folders} | {Path(folder_of(run)): run for run in runs}
    return sorted((_leftover(run, folder) for folder, run in named.items()), key=lambda found: found.since)


def _leftover(run: str, folder: Path) -> Leftover:
    record = read_record(str(folder))
    found = owned(run) if run else []
    since = record.get("since") or (folder.stat().st_mtime if folder.is_dir() else time.time())
    return Leftover(
        run=run,
        state=_state(run, record),
        driver=record.get("pid", 0),
        since=since,
        address="" if record.get("own", True) else record["address"],
        processes=tuple({"pid": process.pid, **_looks(process.pid)} for process in found),
        folder=folder,
        folder_bytes=sum(map(_bytes, (folder, *map(Path, record.get("folders", []))))),
    )


def _bytes(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with suppress(OSError):  # it has just gone
            found += path.lstat().st_size if path.is_file() else 0
    return found


def _state(run: str, record: dict[str, Any]) -> Literal["driven", "waiting", "left"]:
    watched = bool(run) and is_watched(run)
    if record and is_alive(record["pid"], record["started"]) and not record["left"]:
        return "driven"
    if record:
        return "waiting" if watched and record["ttl"] else "left"
    return "driven" if watched else "left"  # workers of a driver on another machine


def _looks(pid: int) -> dict[str, Any]:
    try:
        command = read_bytes(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        return {"command": command[:120], "bytes": int(read_bytes(f"/proc/{pid}/statm").split()[1]) * PAGE}
    except OSError:  # it has just ended
        return {"command": "", "bytes": 0}
