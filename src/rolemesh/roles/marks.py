"""Marks: how the ranks of a role tell the controller that their parts of a checkpoint are done. Needs no torch, as the controller does.

The controller makes an empty mark for every rank in the folder of the checkpoint. A rank overwrites its own in place, so that also a full
disk takes the news of a failure.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)
MARK_BYTES: Final = 4096


def mark_path(folder: Path, role: str, rank: int) -> Path:
    """Where a rank leaves word."""
    return folder / f".{role}-{rank}"


def make_mark(path: Path) -> None:
    """An empty mark. Raises OSError."""
    path.write_bytes(b" " * MARK_BYTES)


def read_mark(path: Path) -> dict[str, Any] | None:
    """{"seconds"}, and {"error"} when the rank could not write its part; None while it writes. Raises OSError."""
    text = path.read_text(encoding="utf-8").strip()
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:  # empty, or read while it was written
        return None
    return found


def tell_mark(mark: Path, told: dict[str, Any]) -> None:
    """What `read_mark` gives from here on. Nothing when the mark is gone."""
    try:
        with mark.open("r+b") as place:
            place.write(json.dumps(told).encode().ljust(MARK_BYTES))
    except FileNotFoundError:
        logger.warning("%s is gone: nobody waits any more for this part of a checkpoint", mark)
