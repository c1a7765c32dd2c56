"""The beginning of GGUF files, written here byte by byte."""

from __future__ import annotations

import struct

import pytest

from rolemesh.config import model_files
from rolemesh.config.gguf_header import read_gguf_header
from rolemesh.config.model_files import check_model_files
from rolemesh.errors import ConfigError


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, *shape: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)


def gguf(entries: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join([*entries, *tensors])


ARCHITECTURE = entry("general.architecture", 8, text("fünf"))
ENTRIES = [
    ARCHITECTURE,
    entry("fünf.block_count", 4, struct.pack("<I", 7)),
    entry("fünf.attention.head_count_kv", 9, struct.pack("<IQ3i", 5, 3, 2, 8, 0)),
    entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bcd")),
    entry("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQB", 0, 1, 9)),
    entry("tokenizer.ggml.add_bos_token", 7, b"\x01"),
    entry("scale", 12, struct.pack("<d", 0.5)),
]
TENSORS = [tensor("token_embd.weight", 3, 5), tensor("output_norm.weight", 3)]


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read_or_stepped_over(tmp_path, version):
    file = tmp_path / "some.gguf"
    file.write_bytes(gguf(ENTRIES, TENSORS, version) + bytes(50))
    header = read_gguf_header(file)
    assert header.family == "fünf"
    assert header.size("block_count") == 7
    assert header.size("attention.head_count_kv") == 8  # one number a layer: the largest
    assert header.size("no_such") is None
    assert header.values["tokenizer.ggml.tokens"] == 2
    assert (header.values["tokenizer.ggml.add_bos_token"], header.values["scale"]) == (True, 0.5)
    assert header.tensors == {"token_embd.weight": 15, "output_norm.weight": 3}


@pytest.mark.parametrize("length", [0, 3, 10, 30, 100, 200, 300])
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path, length):
    whole = gguf(ENTRIES, TENSORS)
    assert length < len(whole)
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[:length])
    with pytest.raises(ConfigError, match=r"model\.path: .*cut\.gguf must be a GGUF file.*(does not begin with|ends before)"):
        check_model_files(str(file))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"PK\x03\x04" + bytes(40), "does not begin with GGUF"),
        (gguf([ARCHITECTURE], [], version=1), "version is 1, and 2 and 3 are known"),
        (gguf([], []), "does not name its general.architecture"),
        (gguf([ARCHITECTURE, entry("odd", 77, b"")], []), "unknown type 77"),
    ],
)
def test_other_files_are_refused(tmp_path, data, found):
    file = tmp_path / "other.gguf"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=found):
        check_model_files(str(file))


def test_positions_that_are_scaled_by_a_tensor_are_refused(tmp_path):
    file = tmp_path / "long.gguf"
    file.write_bytes(gguf(ENTRIES, [*TENSORS, tensor("rope_freqs.weight", 32)]))
    with pytest.raises(ConfigError, match=r"must have plain rotary positions.*found rope_freqs\.weight"):
        check_model_files(str(file))


def test_a_folder_with_a_gguf_file_alone_says_what_to_write(tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"Name the file: model\.path={tmp_path}/some\.gguf"):
        model_files(str(tmp_path))


def test_a_misspelt_file_is_told_its_neighbour(tmp_path):
    (tmp_path / "small-Q4.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"found no file .*Did you mean '.*small-Q4\.gguf'"):
        model_files(str(tmp_path / "small-Q5.gguf"))
