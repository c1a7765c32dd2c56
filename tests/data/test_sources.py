from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolemesh.config.schema import DataConfig
from rolemesh.data import derive_seed, open_source
from rolemesh.errors import ConfigError
from rolemesh.protocols.task import dump_task, load_task

GSM8K = Path(__file__).parents[1] / "fixtures" / "gsm8k" / "test.jsonl"
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def opened(text, **options):
    size, seed = options.pop("size", 50), options.pop("seed", 3)
    return open_source(str(text), DataConfig(**options), subject="data.train", size=size, seed=seed)


def problems_of(text, **options):
    with pytest.raises(ConfigError) as caught:
        opened(text, **options)
    return caught.value.problems


def content(source):
    return [source.problem(index) for index in range(len(source))]


ROWS = [
    {"prompt": "1 + 1 =", "answer": "2", "source": "sums", "level": 1, "tags": ["a", "b"]},
    {"prompt": "name a colour", "answer": None, "source": "words", "level": None, "tags": []},
    {"prompt": "7 * 6 =", "answer": "42", "source": "sums", "level": 3, "tags": ["c"]},
]


def test_jsonl_and_parquet_with_equal_rows_give_equal_problems(jsonl, tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=2)
    lines, table = opened(jsonl(ROWS)), opened(tmp_path / "rows.parquet")
    assert content(lines) == content(table)
    first, second, _ = content(lines)
    assert (first.prompt, first.answer, first.source) == ("1 + 1 =", "2", "sums")
    assert first.task == {"level": 1, "tags": ["a", "b"]}
    assert second.answer is None
    assert (
        lines.summary()
        == table.summary()
        == {
            "sums": {"rows": 2, "answer": 2, "task.level": 2, "task.tags": 2},
            "words": {"rows": 1, "answer": 0, "task.tags": 1},
        }
    )


def test_numbers_are_answers_and_a_joined_nan_is_none(jsonl):
    path = jsonl([{"prompt": "a", "answer": 72}, {"prompt": "b", "answer": float("nan")}, {"prompt": "c"}, {"prompt": "d", "answer": 0.5}])
    assert [problem.answer for problem in content(opened(path))] == ["72", None, None, "0.5"]


def test_the_file_names_the_source_when_no_column_does(jsonl):
    assert {problem.source for problem in content(opened(jsonl([{"prompt": "a", "answer": "b"}], "colours.jsonl")))} == {"colours"}


def test_keys_name_other_columns():
    source = opened(GSM8K, prompt_key="question")
    assert len(source) == 40
    assert source.problem(0).prompt.startswith("Janet")
    assert source.problem(0).answer.endswith("#### 18")
    assert source.problem(0).source == "test"


def test_missing_columns_are_reported_together_with_those_there_are():
    prompt, answer = problems_of(GSM8K, prompt_key="questoin", answer_key="solution")
    assert (prompt.subject, answer.subject) == ("data.prompt_key", "data.answer_key")
    assert prompt.free == "columns question, answer"
    assert "Did you mean question?" in prompt.remedy


def test_rows_without_a_usable_prompt_are_counted_by_reason(jsonl):
    bad = [{"prompt": "ok", "answer": "1"}, {"prompt": None}, {"prompt": 5}, {"prompt": " "}, {"prompt": None}, {"prompt": []}]
    (problem,) = problems_of(jsonl(bad))
    assert problem.free == (
        "6 rows, of these 2 with a null prompt (first: row 1), "
        "2 with a prompt that is neither text nor chat messages (first: row 2), 1 with an empty prompt (first: row 3)"
    )


def test_rows_with_unusable_answer_or_source_are_counted(jsonl):
    (problem,) = problems_of(jsonl([{"prompt": "a", "answer": ["x"], "source": "s"}, {"prompt": "a", "answer": "x", "source": ""}]))
    assert "1 with an answer that is neither text nor a number (first: row 0)" in problem.free
    assert "1 with an empty source (first: row 1)" in problem.free


def test_chat_messages_are_prompts(jsonl):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    problem = opened(jsonl([{"prompt": messages, "answer": "x"}])).problem(0)
    assert problem.prompt == messages
    assert json.loads(problem.key) == messages


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("none.jsonl", None, "no file"),
        ("empty.jsonl", b"\n\n", "no rows"),
        ("broken.jsonl", b'{"prompt": "a", "answer": "b"}\n\n{"prompt": \n[1]\n', "2 that are not, first line 3"),
        ("text.txt", b"hi", "text.txt"),
        ("wrong.parquet", b"no table" * 9, "magic bytes"),
    ],
)
def test_unusable_files_are_refused(tmp_path, name, text, found):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    (problem,) = problems_of(tmp_path / name)
    assert problem.subject == "data.train"
    assert found in problem.free


def test_columns_that_json_cannot_hold_are_refused(tmp_path):
    table = pa.table({"prompt": ["a"], "answer": ["b"], "picture": pa.array([b"\0"]), "when": pa.array([0], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "rows.parquet")
    (problem,) = problems_of(tmp_path / "rows.parquet")
    assert "picture (binary), when (timestamp[" in problem.free


def test_generated_problems_depend_on_seed_and_index_alone():
    first, again, other = (opened("reasoning_gym:chain_sum", seed=seed) for seed in (3, 3, 4))
    assert content(first) == content(again)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert first.problem(17) == again.problem(17)


def test_generated_problems_carry_what_their_scorer_needs():
    problem = opened("reasoning_gym:chain_sum", options=SUMS).problem(5)
    left, operator, right = problem.prompt.removesuffix(" =").split()[-3:]
    assert int(problem.answer) == (int(left) + int(right) if operator == "+" else int(left) - int(right))
    assert problem.source == problem.task["task"] == "chain_sum"
    assert problem.task["options"] == SUMS
    assert problem.task["entry"]["question"] == problem.prompt


def test_an_unknown_task_is_refused_with_the_nearest():
    (problem,) = problems_of("reasoning_gym:chainsum")
    assert "reasoning_gym:chain_sum?" in problem.remedy


def test_wrong_options_are_all_named():
    subjects = {
        problem.subject: problem for problem in problems_of("reasoning_gym:chain_sum", options={"max_term": 2, "seed": 1, "size": 9})
    }
    assert set(subjects) == {"data.options.max_term", "data.options.seed", "data.options.size"}
    assert "Did you mean max_terms?" in subjects["data.options.max_term"].remedy
    assert "data.size" in subjects["data.options.size"].need


def test_option_values_that_do_not_fit_are_refused():
    (problem,) = problems_of("reasoning_gym:chain_sum", options={"min_terms": 5, "max_terms": 2})
    assert problem.subject == "data.options"
    assert "max_terms must be >= min_terms" in problem.free


@pytest.mark.skipif(not sys.flags.hash_randomization, reason="this process hashes without a random seed")
def test_tasks_that_depend_on_the_hash_seed_need_it_fixed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (problem,) = problems_of("reasoning_gym:ransom_note")
    assert problem.remedy == "Set the environment variable PYTHONHASHSEED=0"
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert len(opened("reasoning_gym:ransom_note", size=9)) == 9


def test_fingerprints_of_files_follow_content_and_keys(jsonl):
    one, same, other = jsonl(ROWS), jsonl(ROWS, "copy.jsonl"), jsonl(ROWS[:2], "other.jsonl")
    assert opened(one).fingerprint() == opened(same).fingerprint() != opened(other).fingerprint()
    assert opened(one).fingerprint() != opened(one, answer_key="source").fingerprint()


def test_derived_seeds_share_no_neighbourhood():
    seeds = {derive_seed(seed, purpose) for seed in range(100) for purpose in ("train", "eval")}
    assert len(seeds) == 200
    ordered = sorted(seeds)
    assert min(after - before for before, after in pairwise(ordered)) > 10
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_task_survives_its_json():
    task = {"pair": (1, (2, "x")), "table": {3: [4, (5,)], (1, 2): None}, "odd": {"$tuple": [1]}, "text": "ä", "flag": True, "x": 0.1}
    assert load_task(dump_task(task)) == task
    assert dump_task({}) is None
    assert load_task(None) == {}
