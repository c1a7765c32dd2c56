from __future__ import annotations

import json

import pytest
from number_tokenizer import Numbers


@pytest.fixture
def tokenizer():
    return Numbers()


@pytest.fixture
def jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
