"""Files that ranks write together: every number lies where safetensors looks for it, however the tensors are cut."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolemesh.engines.train.layout import Part
from rolemesh.engines.train.tensor_file import Block, TensorFile, stored_tensors

TENSORS = {
    "matrix": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "half": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
    "vector": torch.arange(3, dtype=torch.float64),
    "number": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
}


def write(path: Path, cuts: dict[str, list[Part]]) -> None:
    """Each entry is a rank, in the order in which they come to write."""
    ranks = max(map(len, cuts.values()))
    for rank in range(ranks):
        parts = {name: parts[rank % len(parts)] for name, parts in cuts.items()}
        TensorFile({name: Block.of(part, TENSORS[name][part.index]) for name, part in parts.items()}, leads=rank == 1 % ranks).write(path)


def whole(name: str) -> Part:
    return Part.all_of(tuple(TENSORS[name].shape))


def along(name: str, dim: int, sizes: list[int]) -> list[Part]:
    """Blocks of a tensor one behind the other in a dimension."""
    shape, found, begin = tuple(TENSORS[name].shape), [], 0
    for size in sizes:
        start = tuple(begin if at == dim else 0 for at in range(len(shape)))
        found.append(Part(shape, start, tuple(size if at == dim else whole for at, whole in enumerate(shape))))
        begin += size
    return found


def quarters(name: str) -> list[Part]:
    rows, columns = along(name, 0, [2, 3]), along(name, 1, [4, 3])
    return [
        Part(row.whole, (row.start[0], column.start[1]), (row.shape[0], column.shape[1]))
        for row, column in itertools.product(rows, columns)
    ]


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"matrix": along("matrix", 0, [2, 3, 0]), "half": along("half", 2, [1, 3]), "vector": along("vector", 0, [1, 1, 1])},
        {"matrix": along("matrix", 1, [3, 4]), "half": along("half", 1, [2, 1])},
        {"matrix": quarters("matrix"), "half": along("half", 0, [1, 1])},
    ],
    ids=["whole", "rows", "columns", "both"],
)
def test_blocks_of_any_cut_make_the_file_that_safetensors_would_write(tmp_path: Path, cuts: dict[str, list[Part]]) -> None:
    write(tmp_path / "ours", {name: [whole(name)] for name in TENSORS} | cuts)
    save_file(TENSORS, tmp_path / "theirs", metadata={"format": "pt"})
    found = load_file(tmp_path / "ours")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert (tmp_path / "ours").read_bytes()[-175:] == (tmp_path / "theirs").read_bytes()[-175:], "and all numbers lie at the same places"


def test_parts_are_read_alone(tmp_path: Path) -> None:
    TensorFile.of_whole(TENSORS).write(tmp_path / "file")
    stored = stored_tensors(tmp_path / "file")
    for part in quarters("matrix"):
        assert torch.equal(part.read(stored["matrix"], whole("matrix")), TENSORS["matrix"][part.index])
    assert stored["number"].shape == ()
    assert stored["number"][()] == 7
    assert whole("empty").read(stored["empty"], whole("empty")).shape == (0, 4)
    assert whole("vector").cut(3, 4).read(stored["vector"], whole("vector")).shape == (0,)


def test_pieces_of_a_part_are_those_of_chunk() -> None:
    for rows, count in itertools.product(range(1, 9), range(1, 6)):
        pieces = [Part.all_of((rows, 2)).cut(index, count) for index in range(count)]
        expected = [len(chunk) for chunk in torch.arange(rows).chunk(count)]
        assert [piece.shape[0] for piece in pieces] == expected + [0] * (count - len(expected))
        assert [piece.start[0] for piece in pieces][: len(expected)] == [sum(expected[:at]) for at in range(len(expected))]


def test_a_format_that_no_file_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.complex64 cannot be saved"):
        TensorFile.of_whole({"it": torch.zeros(2, dtype=torch.complex64)})
