"""Datasets that `save_to_disk` left.

`fixtures/saved_datasets` was written by Hugging Face `datasets` 5.2.0 from the rows below: `sums` is a `DatasetDict` with the splits test
(rows 0 and 1) and train (the other 10), `sharded` is that split train in three files, `shuffled` has all 12 rows in another order.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from rolemesh.config import check_config, load_config
from rolemesh.config.schema import Config, DataConfig, SourceConfig
from rolemesh.data import open_prompts, open_source
from rolemesh.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "fixtures" / "saved_datasets"
ROWS = [
    {"question": f"{n} + 1 =", "answer": str(n + 1), "messages": [{"role": "user", "content": f"{n} + 1 ="}], "level": n % 3}
    for n in range(12)
]


def opened(path, **data):
    return open_source(str(path), DataConfig(prompt_key="question", **data), subject="data.train", size=1, seed=0)


def rows_of(source):
    problems = [source.problem(index) for index in range(len(source))]
    return [{"question": problem.prompt, "answer": problem.answer, **problem.task} for problem in problems]


def test_a_split_of_a_saved_dataset_has_the_rows_that_were_saved():
    source = opened(FOLDER / "sums" / "train")
    assert rows_of(source) == ROWS[2:]
    assert (source.name, source.problem(0).source) == ("sums", "sums")
    assert source.summary() == {"sums": {"rows": 10, "answer": 10, "task.messages": 10, "task.level": 10}}


def test_files_of_a_saved_dataset_are_read_in_order():
    assert rows_of(opened(FOLDER / "sharded")) == ROWS[2:]
    assert opened(FOLDER / "sharded").name == "sharded"


def test_rows_that_were_shuffled_come_as_they_were_saved():
    found = rows_of(opened(FOLDER / "shuffled"))
    assert found != ROWS
    assert sorted(found, key=lambda row: int(row["answer"])) == ROWS


def test_chat_messages_of_a_saved_dataset_are_prompts():
    source = open_source(str(FOLDER / "sharded"), DataConfig(prompt_key="messages"), subject="data.train", size=1, seed=0)
    assert source.problem(3).prompt == ROWS[5]["messages"]


def test_a_saved_dataset_stays_on_disk():
    before = pa.total_allocated_bytes()
    source = opened(FOLDER / "sums" / "train")
    assert len(source) == 10
    assert pa.total_allocated_bytes() == before


def test_splits_train_and_evaluate(tokenizer):
    splits = {"train": FOLDER / "sums" / "train", "eval": FOLDER / "sums" / "test"}
    data = {"prompt_key": "question", **{option: [SourceConfig(path=str(path))] for option, path in splits.items()}}
    stream, held_out = open_prompts(Config(data=DataConfig(**data)), tokenizer)
    assert sorted(held_out.batch().scalars("prompt")) == ["0 + 1 =", "1 + 1 ="]
    assert len({stream.draw(1).scalars("prompt")[0] for _ in range(10)}) == 10


def test_fingerprints_follow_the_data_files(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(FOLDER / "sharded", copy)
    assert opened(copy).fingerprint() == opened(FOLDER / "sharded").fingerprint() != opened(FOLDER / "shuffled").fingerprint()
    state = json.loads((copy / "state.json").read_text())
    state["_data_files"].reverse()
    (copy / "state.json").write_text(json.dumps(state))
    assert opened(copy).fingerprint() != opened(FOLDER / "sharded").fingerprint()
    assert [row["answer"] for row in rows_of(opened(copy))] == ["10", "11", "12", "7", "8", "9", "3", "4", "5", "6"]


def spoil(folder, kind):
    if kind == "file":
        (folder / "data-00001-of-00003.arrow").unlink()
    elif kind == "bytes":
        (folder / "data-00001-of-00003.arrow").write_bytes(b"not Arrow")
    elif kind == "state":
        (folder / "state.json").write_text("{")
    else:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("file", "found no data-00001-of-00003.arrow"),
        ("bytes", "must be a saved dataset"),
        ("state", "must be a saved dataset with a state.json"),
        ("indices", "must hold its rows in order.*flatten_indices"),
    ],
)
def test_broken_saved_datasets_are_refused(tmp_path, kind, found):
    shutil.copytree(FOLDER / "sharded", tmp_path / "broken")
    spoil(tmp_path / "broken", kind)
    with pytest.raises(ConfigError, match=rf"data\.train: .*{found}"):
        opened(tmp_path / "broken")


def test_a_dataset_of_splits_says_which_there_are():
    (problem,) = check_config(load_config(None, [f"data.train={FOLDER / 'sums'}"]))
    assert (problem.subject, problem.free) == ("data.train", "the splits test, train")
    assert problem.remedy == f"Name one of them: data.train={FOLDER / 'sums' / 'test'}"
    with pytest.raises(ConfigError, match=r"Name one of its splits: .*sums/test \(test, train\)"):
        opened(FOLDER / "sums")
    assert check_config(load_config(None, [f"data.train={FOLDER / 'sums' / 'train'}"])) == []


def test_another_folder_is_refused(tmp_path):
    (problem,) = check_config(load_config(None, [f"data.train={tmp_path}"]))
    assert "save_to_disk" in problem.remedy
