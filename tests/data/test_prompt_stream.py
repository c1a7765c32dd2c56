from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from number_tokenizer import Numbers

from rolemesh.config.schema import Config, DataConfig, ModelConfig
from rolemesh.data import PromptStream, open_prompts, open_sft_prompts, open_source, sft_batch
from rolemesh.data.sources import Problem
from rolemesh.errors import ConfigError
from rolemesh.models import load_tokenizer

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


class Listed:
    """A source of given texts."""

    name = "listed"

    def __init__(self, texts, *, generated=False, answers=None):
        self.texts, self.generated, self.answers = texts, generated, answers

    def __len__(self):
        return len(self.texts)

    def problem(self, index):
        answer = "5" if self.answers is None else self.answers[index]
        return Problem(prompt=self.texts[index], answer=answer, task={"index": index}, source=self.name)

    def fingerprint(self):
        return json.dumps(self.texts)

    def summary(self):
        return {self.name: {"rows": len(self.texts), "answer": len(self.texts)}}


def numbered(count, generated=False):
    return Listed([f"{index + 100}" for index in range(count)], generated=generated)


def stream_of(source, tokenizer, *, seed=0, exclude=frozenset(), **data):
    return PromptStream(DataConfig(**data), source, tokenizer, seed, exclude)


def drawn(stream, *sizes):
    batches = [stream.draw(size) for size in sizes]
    return [(int(draw), text) for batch in batches for (draw, _), text in zip(batch.ids, batch.scalars("prompt"), strict=True)]


def test_columns_of_a_draw(tokenizer):
    batch = stream_of(Listed(["11 12"]), tokenizer, prompt_template="{prompt} {{x}} 13").draw(2)
    assert batch.names == ("draw", "sample", "source", "prompt", "prompt_ids", "answer", "task")
    assert batch.ids.tolist() == [[0, 0], [1, 0]]
    assert batch.rows("prompt_ids") == [[1, 11, 12, 9, 13]] * 2
    assert batch.scalars("prompt") == ["11 12 {{x}} 13"] * 2
    assert batch.scalars("source") == ["listed"] * 2
    assert [json.loads(task) for task in batch.scalars("task")] == [{"index": 0}] * 2


def test_an_epoch_holds_every_problem_once_in_an_order_of_its_own(tokenizer):
    stream = stream_of(numbered(30), tokenizer)
    first, second = ([text for _, text in drawn(stream, 30)] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(numbered(30).texts)
    assert first != second
    assert first != [text for _, text in drawn(stream_of(numbered(30), tokenizer, seed=1), 30)]


def test_without_shuffling_the_order_is_that_of_the_file(tokenizer):
    assert [text for _, text in drawn(stream_of(numbered(3), tokenizer, shuffle=False), 7)] == ["100", "101", "102"] * 2 + ["100"]


def test_C15_draw_numbers_never_repeat_and_stay_with_their_prompt_when_rows_are_filtered(tokenizer):
    stream = stream_of(numbered(10), tokenizer)
    rows = dict(drawn(stream, 7, 7, 7))
    assert sorted(rows) == list(range(21))
    batch = stream_of(numbered(10), tokenizer).draw(21)
    kept = batch.take([20, 3, 7])
    assert {draw: text for (draw, _), text in zip(kept.ids.tolist(), kept.scalars("prompt"), strict=True)} == {
        draw: rows[draw] for draw in (20, 3, 7)
    }


# C12: prompts that are too long


TOO_LONG = [f"{index + 100}" for index in range(18)] + ["11 12 13 14 15", "21 22 23 24 25 26"]  # 10 % above 4 tokens, BOS included


def test_C12_error_refuses_to_start_with_counts(tokenizer):
    with pytest.raises(ConfigError, match=r"2 of 20 that do, the longest of 7 tokens") as caught:
        stream_of(Listed(TOO_LONG), tokenizer, max_prompt_tokens=4)
    assert "data.max_prompt_tokens=4" in str(caught.value)


def test_C12_drop_counts_what_it_removes(tokenizer):
    stream = stream_of(Listed(TOO_LONG), tokenizer, max_prompt_tokens=4, overlong="drop")
    assert dict(stream.report) == {"kept": 18, "overlong": 2}
    assert str(stream.report) == "data.train listed: 20 problems checked, 18 kept, 2 removed (overlong 2)"
    assert sorted(text for _, text in drawn(stream, 18)) == sorted(TOO_LONG[:18])
    assert dict(stream.report) == {"kept": 18, "overlong": 2}


@pytest.mark.parametrize(("policy", "ids"), [("left", [[1, 13, 14, 15], [1, 24, 25, 26]]), ("right", [[1, 11, 12, 13], [1, 21, 22, 23]])])
def test_C12_left_and_right_say_which_end_goes(tokenizer, policy, ids):
    stream = stream_of(Listed(TOO_LONG), tokenizer, max_prompt_tokens=4, overlong=policy, shuffle=False)
    assert stream.draw(20).rows("prompt_ids")[18:] == ids
    assert (stream.report.kept, stream.report.cut, stream.report.removed.total()) == (20, 2, 0)
    assert "2 cut to the length limit" in str(stream.report)


def test_cutting_on_the_left_without_a_bos_keeps_the_end(tokenizer):
    tokenizer.bos_token_id = None
    stream = stream_of(Listed(["11 12 13 14"]), tokenizer, max_prompt_tokens=2, overlong="left")
    assert stream.draw(1).rows("prompt_ids") == [[13, 14]]


def test_a_prompt_of_exactly_the_limit_is_not_too_long(tokenizer):
    stream = stream_of(Listed(["11 12 13"]), tokenizer, max_prompt_tokens=4)
    assert stream.draw(1).rows("prompt_ids") == [[1, 11, 12, 13]]
    assert stream.report.cut == 0


def test_nothing_left_is_refused_with_counts_by_reason(tokenizer):
    with pytest.raises(ConfigError, match=r"0 kept, 3 removed \(overlong 2, in_eval 1\)"):
        stream_of(Listed(["11 12", "21 22", "31"]), tokenizer, exclude={"31"}, max_prompt_tokens=2, overlong="drop")


def test_held_out_prompts_are_removed_and_counted(tokenizer):
    stream = stream_of(numbered(10), tokenizer, exclude={"103", "107"})
    assert dict(stream.report) == {"kept": 8, "in_eval": 2}
    assert {"103", "107"}.isdisjoint(text for _, text in drawn(stream, 40))


def test_generated_problems_are_counted_once_as_they_are_drawn(tokenizer):
    stream = stream_of(numbered(300, generated=True), tokenizer, exclude={"100", "101"})
    assert stream.report.checked == 128
    drawn(stream, 298)
    assert dict(stream.report) == {"kept": 298, "in_eval": 2}
    drawn(stream, 400)
    assert dict(stream.report) == {"kept": 298, "in_eval": 2}


def test_a_generated_problem_that_is_too_long_is_refused_when_it_comes(tokenizer):
    texts = [f"{index + 100}" for index in range(200)]
    texts[150] = "1 2 3 4 5 6"
    stream = stream_of(Listed(texts, generated=True), tokenizer, max_prompt_tokens=4, shuffle=False)
    drawn(stream, 150)
    with pytest.raises(ConfigError, match="1 of 151"):
        stream.draw(1)


def test_a_limit_that_is_lowered_for_a_resumed_run_is_still_refused(tokenizer):
    texts = [f"{index + 100}" for index in range(200)]
    texts[150] = "1 2 3 4 5 6"
    before, after = (stream_of(Listed(texts, generated=True), tokenizer, max_prompt_tokens=limit, shuffle=False) for limit in (8, 4))
    drawn(before, 200)
    after.load_state(before.state())
    with pytest.raises(ConfigError, match="1 of 200"):
        drawn(after, 200)


def test_generated_problems_that_run_out_end_with_an_error(tokenizer):
    texts = [f"{index + 100}" for index in range(130)]
    exclude = set(texts[:127]) | set(texts[128:])
    stream = stream_of(Listed(texts, generated=True), tokenizer, exclude=exclude, shuffle=False)
    assert [text for _, text in drawn(stream, 3)] == [texts[127]] * 3


# prompts of several kinds


def test_chat_prompts_go_through_the_template(tokenizer):
    tokenizer.chat_template = "given"
    messages = [{"role": "system", "content": "11"}, {"role": "user", "content": "12"}]
    batch = stream_of(Listed([messages, "13"]), tokenizer, chat=True, shuffle=False).draw(2)
    assert batch.rows("prompt_ids") == [[1, 11, 12, 7], [1, 13, 7]]
    assert batch.scalars("prompt") == ["11 12 7", "13 7"]
    assert [json.loads(text) for text in batch.scalars("messages")] == [messages, [{"role": "user", "content": "13"}]]
    assert "messages" not in stream_of(Listed(["13"]), tokenizer).draw(1).names


def test_messages_need_chat_and_refuse_a_text_template(tokenizer):
    messages = [{"role": "user", "content": "12"}]
    with pytest.raises(ConfigError, match=r"data\.chat"):
        stream_of(Listed([messages]), tokenizer)
    tokenizer.chat_template = "given"
    with pytest.raises(ConfigError, match=r"data\.prompt_template"):
        stream_of(Listed([messages]), tokenizer, chat=True, prompt_template="Q: {prompt}")


def test_a_template_without_the_prompt_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"must contain \{prompt\}"):
        stream_of(numbered(2), tokenizer, prompt_template="Q:")


# G05: going on after a stop


@given(
    size=st.integers(1, 150),
    generated=st.booleans(),
    before=st.lists(st.integers(1, 40), max_size=5),
    after=st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_G05_a_resumed_stream_goes_on_with_the_same_ids_and_prompts(size, generated, before, after):
    def new():
        return stream_of(numbered(size, generated), Numbers(), seed=5, exclude={"100"} if size > 1 else set())

    whole, stopped, resumed = new(), new(), new()
    drawn(whole, *before)
    drawn(stopped, *before)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert resumed.describe() == stopped.describe()
    assert drawn(resumed, *after) == drawn(whole, *after)
    assert resumed.state() == whole.state()
    assert dict(resumed.report) == dict(whole.report)


@pytest.mark.parametrize("taken", [4, 8, 10, 14])
def test_G05_four_steps_equal_two_and_two_in_any_epoch(tokenizer, taken):
    whole = drawn(stream_of(numbered(8), tokenizer), taken, 4)
    first = stream_of(numbered(8), tokenizer)
    head = drawn(first, taken)
    second = stream_of(numbered(8), tokenizer)
    second.load_state(first.state())
    assert head + drawn(second, 4) == whole


def test_G05_other_problems_seed_or_shuffling_are_refused(tokenizer):
    state = stream_of(numbered(8), tokenizer).state()
    for stream, subject in (
        (stream_of(numbered(9), tokenizer), "data.train"),
        (stream_of(numbered(8), tokenizer, seed=1), "seed"),
        (stream_of(numbered(8), tokenizer, shuffle=False), r"data\.shuffle"),
    ):
        with pytest.raises(ConfigError, match=subject):
            stream.load_state(state)


# training and held-out prompts together


def config_of(train, **data):
    return Config(data=DataConfig(train=str(train), **data))


def test_training_never_sees_a_held_out_prompt(jsonl, tokenizer):
    train = jsonl([{"prompt": f"{n}", "answer": "1"} for n in range(100, 130)])
    held_out = jsonl([{"prompt": f"{n}", "answer": "1"} for n in range(125, 145)], "eval.jsonl")
    stream, evaluation = open_prompts(config_of(train, eval=str(held_out), eval_size=4), tokenizer)
    assert dict(stream.report) == {"kept": 25, "in_eval": 5}  # all of eval.jsonl, also the 16 that are not used
    assert (len(evaluation), evaluation.report.unused) == (4, 16)
    assert evaluation.batch().ids.tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert {int(text) for text in evaluation.batch().scalars("prompt")} <= set(range(125, 145))
    again = open_prompts(config_of(train, eval=str(held_out), eval_size=4), tokenizer)[1]
    assert again.batch().equals(evaluation.batch())


def test_a_training_file_alone_sets_rows_aside(jsonl, tokenizer):
    train = jsonl([{"prompt": f"{n}", "answer": "1"} for n in range(100, 130)])
    stream, evaluation = open_prompts(config_of(train), tokenizer)
    assert (len(evaluation), dict(stream.report)) == (6, {"kept": 24, "in_eval": 6})  # a fifth
    assert set(evaluation.batch().scalars("prompt")).isdisjoint(text for _, text in drawn(stream, 24))
    assert len(open_prompts(config_of(train, eval_size=2), tokenizer)[1]) == 2


def test_a_task_with_few_problems_keeps_most_for_training():
    tokenizer = load_tokenizer(ModelConfig())
    stream, evaluation = open_prompts(config_of("reasoning_gym:chain_sum", options=SUMS), tokenizer)
    held_out = evaluation.batch().scalars("prompt")
    seen = Counter(stream.draw(3000).scalars("prompt"))
    assert len(set(held_out)) == len(held_out)
    assert set(held_out).isdisjoint(seen)
    assert len(set(held_out) | set(seen)) == 200  # 10 * 10 operands, + or -
    assert 20 <= len(held_out) <= 60
    assert evaluation.report.removed["duplicate"] + evaluation.report.kept + evaluation.report.unused == 256


def test_a_task_with_many_problems_fills_the_held_out_set():
    tokenizer = load_tokenizer(ModelConfig())
    options = {"min_terms": 4, "max_terms": 4, "min_digits": 3, "max_digits": 3}
    stream, evaluation = open_prompts(config_of("reasoning_gym:chain_sum", options=options, eval_size=50), tokenizer)
    assert len(evaluation) == 50
    assert dict(stream.report) == {"kept": 128}


def test_overlong_held_out_prompts_are_refused_under_their_own_name(jsonl, tokenizer):
    train, held_out = jsonl([{"prompt": "100", "answer": "1"}]), jsonl([{"prompt": "1 2 3 4", "answer": "1"}], "eval.jsonl")
    with pytest.raises(ConfigError, match=r"data\.eval: .*1 of 1 that do"):
        open_prompts(config_of(train, eval=str(held_out), max_prompt_tokens=3), tokenizer)


# supervised batches


def test_supervised_batches_answer_and_end_with_one_weight_for_all_tokens(tokenizer):
    stream = stream_of(Listed(["11", "12"], answers=["5", "6 7 8"]), tokenizer, shuffle=False)
    batch = sft_batch(stream, 2, tokenizer, 4)
    assert batch.rows("response_ids") == [[5, 2], [6, 7, 8, 2]]
    assert batch.rows("prompt_ids") == [[1, 11], [1, 12]]
    assert batch.scalars("token_weight").tolist() == [1 / 6, 1 / 6]
    assert (batch.scalars("token_weight") * batch.lengths("response_ids")).sum() == pytest.approx(1.0)


def test_answers_too_long_are_replaced_and_counted(tokenizer):
    stream = stream_of(Listed(["11", "12", "13"], answers=["5", "6 7 8", "9"]), tokenizer, shuffle=False)
    batch = sft_batch(stream, 4, tokenizer, 3)
    assert batch.rows("response_ids") == [[5, 2], [9, 2], [5, 2], [9, 2]]
    assert batch.ids[:, 0].tolist() == [0, 2, 3, 5]
    assert stream.report.answers_too_long == 2
    assert "2 answers too long for supervised batches" in str(stream.report)


def test_answers_that_never_fit_and_problems_without_answers_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.max_response_tokens"):
        sft_batch(stream_of(Listed(["11"] * 3, answers=["5 6 7"] * 3), tokenizer), 2, tokenizer, 3)
    with pytest.raises(ConfigError, match="draw 0 of source 'listed' has none"):
        sft_batch(stream_of(Listed(["11"], answers=[None]), tokenizer), 1, tokenizer, 3)


def test_supervised_prompts_are_checked_for_answers_and_drawn_in_another_order(jsonl, tokenizer):
    rows = [{"prompt": f"{n}", "answer": "1"} for n in range(100, 140)]
    config = config_of(jsonl(rows))
    plain, supervised = open_prompts(config, tokenizer)[0], open_sft_prompts(config, tokenizer)
    texts = [[text for _, text in drawn(stream, 32)] for stream in (plain, supervised)]
    assert texts[0] != texts[1]
    assert sorted(texts[0]) == sorted(texts[1])
    rows[3]["answer"] = None
    with pytest.raises(ConfigError, match="1 of 40 in source 'rows'"):
        open_sft_prompts(config_of(jsonl(rows)), tokenizer)


def test_a_real_task_with_the_real_tokenizer_has_one_bos():
    tokenizer = load_tokenizer(ModelConfig())
    source = open_source("reasoning_gym:chain_sum", DataConfig(options=SUMS), subject="data.train", size=1000, seed=1)
    ids = stream_of(source, tokenizer).draw(20).rows("prompt_ids")
    assert all(row[0] == tokenizer.bos_token_id and row.count(tokenizer.bos_token_id) == 1 for row in ids)
    assert np.unique([len(row) for row in ids]).max() < 48
