"""Problems from `.jsonl` and `.parquet` files and saved datasets, checked row by row before anything starts. Called by `data.sources`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rolemesh.config.schema import DataConfig, SourceConfig
from rolemesh.data.sources import Problem
from rolemesh.errors import ConfigError
from rolemesh.errors import Problem as Wrong
from rolemesh.registry import nearest

SOURCE_KEY: Final = "source"
"""Column that names the data source of a row; without it the file's stem does."""
STATE: Final = "state.json"
"""What `Dataset.save_to_disk` of Hugging Face leaves beside Arrow streams, which it lists in order. A `DatasetDict` is a folder with one
such folder for each split."""

Row = dict[str, Any]


class FileSource:
    """The rows of one file or saved dataset. Columns other than prompt, answer and source go into `Problem.task`.

    `given` is the entry of `data`, whose name, if it has one, is the source of every row. `config` has the keys, `options` is the option
    that holds them, for messages. Raises ConfigError for a file that is missing, empty or unreadable, for missing columns (naming those
    there are), and for rows whose prompt, answer or source cannot be used, counted by reason.
    """

    generated: ClassVar[bool] = False

    def __init__(self, path: Path, given: SourceConfig, config: DataConfig, *, subject: str, options: str) -> None:
        if not path.exists():
            raise ConfigError.one(subject, "the file must exist", f"no file {path}", f"Paths are relative to {Path.cwd()}")
        self.name = given.label
        self._given_name, self._options = given.name, options
        self._prompt_key, self._answer_key = config.prompt_key, config.answer_key
        self._rows: _JsonLines | _Table = _JsonLines(path, subject) if path.suffix == ".jsonl" else _Table(path, subject)
        if not len(self._rows):
            raise ConfigError.one(subject, "must hold at least one problem", f"no rows in {path}")
        self._check_columns(path, subject)
        self._summary = self._check_rows(path, subject)
        self._fingerprint = hashlib.sha256(f"{_digest(path)} {self._prompt_key} {self._answer_key}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, index: int) -> Problem:
        row = self._rows.row(index)
        prompt, answer = row.pop(self._prompt_key), _answer(row.pop(self._answer_key, None))
        source = row.pop(SOURCE_KEY, self.name)
        return Problem(prompt=prompt, answer=answer, task=row, source=self._given_name or source)

    def _source(self, row: Row) -> Any:
        return self._given_name or row.get(SOURCE_KEY, self.name)

    def fingerprint(self) -> str:
        """Covers the bytes of the file and the keys, not its path."""
        return self._fingerprint

    def summary(self) -> dict[str, dict[str, int]]:
        return self._summary

    def _check_columns(self, path: Path, subject: str) -> None:
        problems = []
        for option, key in ((f"{self._options}.prompt_key", self._prompt_key), (f"{self._options}.answer_key", self._answer_key)):
            if key not in self._rows.columns:
                hint = nearest(key, self._rows.columns)
                remedy = (f"Did you mean {hint}? " if hint else "") + f"Set {option} to one of them"
                if option.endswith(".answer_key"):
                    remedy += "; problems without a reference answer need the column with nulls in it"
                found = f"columns {', '.join(self._rows.columns)}"
                problems.append(Wrong(subject=option, need=f"{subject} ({path}) must have the column {key!r}", free=found, remedy=remedy))
        if problems:
            raise ConfigError(problems=problems)

    def _check_rows(self, path: Path, subject: str) -> dict[str, dict[str, int]]:
        """Look at every row once. Returns `summary()`."""
        bad: Counter[str] = Counter()
        first: dict[str, int] = {}
        summary: dict[str, Counter[str]] = defaultdict(Counter)
        own = self._prompt_key, self._answer_key, SOURCE_KEY
        for number, row in enumerate(self._rows):
            for reason in self._complaints(row):
                bad[reason] += 1
                first.setdefault(reason, number)
            counts = summary[str(self._source(row))]
            counts["rows"] += 1
            counts["answer"] += _answer(row.get(self._answer_key)) is not None
            counts.update(f"task.{key}" for key in row if key not in own and row[key] is not None)
        if bad:
            listed = ", ".join(f"{count} with {reason} (first: row {first[reason]})" for reason, count in bad.most_common())
            remedy = "Rows are counted from 0. Repair or remove them: none is dropped without being asked to"
            raise ConfigError.one(subject, f"every row of {path} must be usable", f"{len(self)} rows, of these {listed}", remedy)
        return {source: dict(counts) for source, counts in summary.items()}

    def _complaints(self, row: Row) -> Iterator[str]:
        prompt, answer, source = row.get(self._prompt_key), row.get(self._answer_key), self._source(row)
        if prompt is None:
            yield "a null prompt"
        elif isinstance(prompt, str):
            if not prompt.strip():
                yield "an empty prompt"
        elif not _is_chat(prompt):
            yield "a prompt that is neither text nor chat messages"
        if not isinstance(answer, str | int | float | None) or isinstance(answer, bool):
            yield "an answer that is neither text nor a number"
        if not isinstance(source, str) or not source:
            yield f"an empty {SOURCE_KEY}"


def _answer(value: str | float | None) -> str | None:
    """Numbers as text. NaN is what a missing value becomes when tables are joined, so it means none."""
    missing = value is None or value != value
    return None if missing else str(value)


def _is_chat(prompt: Any) -> bool:
    """A non-empty list of messages, each with the texts `role` and `content`."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content")) for message in prompt)


class _JsonLines:
    """One JSON object a line; blank lines are skipped. Lines are kept as bytes and parsed when asked for."""

    def __init__(self, path: Path, subject: str) -> None:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError.one(subject, f"{path} must be readable", f"{type(error).__name__}: {error}") from error
        numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        self._lines = [line for _, line in numbered]
        columns: dict[str, None] = {}
        broken: list[tuple[int, str]] = []
        for number, line in numbered:
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is valid JSON, but no text
            except (ValueError, RecursionError) as error:
                broken.append((number, str(error)))
                continue
            if isinstance(row, dict):
                columns.update(dict.fromkeys(row))
            else:
                broken.append((number, f"a JSON {type(row).__name__}"))
        if broken:
            number, found = broken[0]
            raise ConfigError.one(
                subject, f"every line of {path} must be a JSON object", f"{len(broken)} that are not, first line {number}: {found}"
            )
        self.columns = tuple(columns)

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Row]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> Row:
        return dict(json.loads(self._lines[index]))


class _Table:
    """A Parquet file or saved dataset as one Arrow table; that of a saved dataset stays on disk and is read as it is used."""

    def __init__(self, path: Path, subject: str) -> None:
        saved = path.is_dir()
        try:
            self._table = _read_saved(path, subject) if saved else _read_parquet(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError.one(subject, f"{path} must be a {'saved dataset' if saved else 'Parquet file'}", str(error)) from error
        self.columns = tuple(self._table.column_names)
        unfit = [f"{field.name} ({field.type})" for field in self._table.schema if not _is_plain(field.type)]
        if unfit:
            need = f"columns of {path} must hold text, numbers, booleans, lists or structs"
            raise ConfigError.one(subject, need, ", ".join(unfit), "Convert these columns to text or take them out")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Row]:
        for chunk in self._table.to_batches(max_chunksize=4096):
            yield from chunk.to_pylist()

    def row(self, index: int) -> Row:
        return {name: self._table.column(name)[index].as_py() for name in self.columns}


def _read_parquet(path: Path) -> pa.Table:
    with pq.ParquetFile(path, memory_map=True) as file:
        return file.read()


def _data_files(folder: Path) -> tuple[list[Path], bool]:
    """(Arrow files of a saved dataset in the order of their rows, whether not all of these count). Raises for a broken `state.json`."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return [folder / entry["filename"] for entry in state["_data_files"]], bool(state.get("_indices_data_files"))


def _read_saved(folder: Path, subject: str) -> pa.Table:
    """All rows, mapped into memory. Raises ConfigError for a folder of another kind or a selection of rows that was not saved as data."""
    try:
        files, selected = _data_files(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        splits = sorted(state.parent.name for state in folder.glob(f"*/{STATE}"))
        remedy = f"Name one of its splits: {folder / splits[0]} ({', '.join(splits)})" if splits else ""
        found = f"{type(error).__name__}: {error}"
        raise ConfigError.one(subject, f"{folder} must be a saved dataset with a {STATE}", found, remedy) from error
    if selected:
        found = "rows selected by an index beside the data"
        raise ConfigError.one(subject, f"{folder} must hold its rows in order", found, "Call `flatten_indices()` before `save_to_disk`")
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ConfigError.one(subject, f"{folder} must hold the files that its {STATE} lists", f"no {', '.join(missing) or 'data files'}")
    return pa.concat_tables([_mapped(file) for file in files])


def _mapped(file: Path) -> pa.Table:
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        return stream.read_all()


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of each data file of a saved dataset."""
    parts = _data_files(path)[0] if path.is_dir() else [path]
    digests = []
    for part in parts:
        with part.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return " ".join(digests)


def _is_plain(kind: pa.DataType) -> bool:
    """True for Arrow types whose values JSON can hold."""
    types = pa.types
    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(kind.field(place).type) for place in range(kind.num_fields))
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    return any(test(kind) for test in tests)
