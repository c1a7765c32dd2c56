"""Hugging Face datasets that `Dataset.save_to_disk` left in a folder, as Arrow tables. Called by `data.files`.

The folder holds `state.json`, which lists the data files in order, and these files, Arrow streams: they are mapped into memory, not read.
This needs pyarrow alone. A `DatasetDict` is a folder with one such folder for each split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pyarrow as pa

from rolemesh.errors import ConfigError

STATE: Final = "state.json"


def data_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved dataset, in the order of their rows. Raises OSError and ValueError for a broken `state.json`."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return [folder / entry["filename"] for entry in state["_data_files"]]


def read_saved_dataset(folder: Path, subject: str) -> pa.Table:
    """All rows. Raises ConfigError naming `subject` for a folder of another kind or a selection of rows that was not saved as data."""
    try:
        files = data_files(folder)
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError.one(subject, f"{folder} must be a saved dataset with a {STATE}", found, _splits(folder)) from error
    if state.get("_indices_data_files"):
        found = "rows selected by an index beside the data"
        raise ConfigError.one(subject, f"{folder} must hold its rows in order", found, "Call `flatten_indices()` before `save_to_disk`")
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ConfigError.one(subject, f"{folder} must hold the files that its {STATE} lists", f"no {', '.join(missing) or 'data files'}")
    return pa.concat_tables([_mapped(file) for file in files])


def _mapped(file: Path) -> pa.Table:
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        return stream.read_all()


def _splits(folder: Path) -> str:
    splits = sorted(state.parent.name for state in folder.glob(f"*/{STATE}"))
    return f"Name one of its splits: {folder / splits[0]} ({', '.join(splits)})" if splits else ""
