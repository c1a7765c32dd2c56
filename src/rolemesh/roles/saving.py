"""One rank's part of a checkpoint: written beside the next step, with a mark that says how it ended.

The controller makes a mark for every rank (`marks.py`), calls `save` on all of them, and reads the marks until each says that its rank is
done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rolemesh.engines.train.tensor_file import Copying, TensorFile
from rolemesh.roles.marks import mark_path, tell_mark
from rolemesh.runtime import Dispatch, Worker, register
from rolemesh.runtime.dispatch import collect_first, split_all

GATHERED: Final = Dispatch(name="gathered", split=split_all, collect=collect_first)
"""Called on all ranks, each of which gives its part; the first has the result."""
_ERROR_CHARACTERS: Final = 1000


class SavedWorker(Worker):
    """One rank of a role that has state in checkpoints. A subclass has `files` and a registered `restore(folder, saved)`."""

    def files(self) -> dict[str, TensorFile]:
        """What it has in a checkpoint, by path in there: with the same names on every rank that writes any."""
        raise NotImplementedError

    @property
    def copying(self) -> Copying:
        """What its tensors wait for before they are changed."""
        raise NotImplementedError

    def scalars(self) -> dict[str, Any]:
        """What `restore` wants to hear beside the files, for JSON."""
        return {}

    def describe(self, folder: Path) -> None:
        """First rank: write into a checkpoint what it holds beside tensors. Called beside the next step, so that it must leave the engine
        as it is and have no part in a collective. Raises OSError."""

    @register(dispatch=GATHERED)
    def save_bytes(self) -> int:
        """Size of its files in a checkpoint."""
        return sum(file.size for file in self.files().values())

    @register(dispatch=GATHERED)
    def save(self, folder: str, *, beside: bool) -> dict[str, Any]:
        """Write the state of this moment into an existing folder, where this rank's mark lies; `beside` as for `write_part`. Returns what
        `restore` gets as `saved`."""
        files, context = self.files(), self.context
        mark, more = mark_path(Path(folder), context.group, context.rank), None if context.rank else self.describe
        write_part(mark, files, more, self.copying if beside else None)
        return {"files": list(files), **self.scalars()}


def write_part(mark: Path, files: Mapping[str, TensorFile], more: Callable[[Path], None] | None, beside: Copying | None) -> None:
    """Write this rank's blocks of `files`, which are named by their paths in the mark's folder, and whatever `more` writes there. What
    goes wrong stands in the mark.

    With `beside` this returns at once: a thread copies the blocks to host memory, says so there, and writes them.
    """
    if beside is None:
        _write(mark, files, more)
        return
    thread = threading.Thread(target=_copy_and_write, args=(mark, files, more, beside), name=f"save {mark.name}", daemon=True)
    beside.begin()
    try:
        thread.start()
    except RuntimeError:  # the machine has no thread left
        beside.end()
        raise


def _copy_and_write(mark: Path, files: Mapping[str, TensorFile], more: Callable[[Path], None] | None, copying: Copying) -> None:
    try:
        copies = {name: file.snapshot() for name, file in files.items()}
    except Exception as error:
        tell_mark(mark, {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS], "seconds": 0.0})
        raise
    finally:
        copying.end()
    _write(mark, copies, more)


def _write(mark: Path, files: Mapping[str, TensorFile], more: Callable[[Path], None] | None) -> None:
    began, told = time.monotonic(), dict[str, Any]()
    try:
        for name, file in files.items():
            (mark.parent / name).parent.mkdir(exist_ok=True)
            file.write(mark.parent / name)
        if more is not None:
            more(mark.parent)
    except OSError as error:
        told["error"] = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        raise
    finally:
        tell_mark(mark, told | {"seconds": time.monotonic() - began})
