"""The event log of a run, `events.jsonl`: state changes, failures, replacements, each with time, stage and subject.

Written by the controller only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, get_args

from rolemesh.observe.files import Closing, JsonLines

Stage = Literal["prepare", "schedule", "create", "load", "join", "run", "recover", "save", "end"]
STAGES: Final[tuple[str, ...]] = get_args(Stage)

Event = dict[str, Any]


class EventLog(Closing):
    """Appends one JSON object a line: `time` (seconds since the epoch), `stage`, `subject`, `kind`, then details.

    A detail `level="warning"` or `"error"` marks what a user should see.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._lines = JsonLines(path)
        self._clock = clock

    def write(self, stage: Stage, subject: str, kind: str, **details: Any) -> Event:
        """Write one event and return it. `subject` is a role, rank, pool, node or file; `kind` says what happened in a word.

        Raises ValueError for an unknown stage or a detail called `time`.
        """
        if stage not in STAGES:
            raise ValueError(f"stage must be one of {', '.join(STAGES)}; got {stage!r}")
        if "time" in details:
            raise ValueError("the event log sets `time` itself; give the detail another name")
        event = {"time": self._clock(), "stage": stage, "subject": subject, "kind": kind, **details}
        self._lines.write(event)
        return event

    def close(self) -> None:
        self._lines.close()
