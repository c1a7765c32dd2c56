"""Several sources as one stream: exact proportions, exact resume, held-out prompts and counts for each."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.config import check_config, load_config
from rolemesh.config.schema import Config, DataConfig
from rolemesh.data import open_prompts, open_sft_prompts, sft_batch
from rolemesh.data.mixture import next_source, shares
from rolemesh.errors import ConfigError

# proportions


@given(st.lists(st.integers(1, 50), min_size=2, max_size=7), st.integers(1, 400))
def test_no_source_is_ever_further_from_its_share_than_the_best_rule_allows(weights, draws):
    total, counts = sum(weights), [0] * len(weights)
    bound = 1 - 1 / (2 * len(weights) - 2)  # Tijdeman 1980
    for turn in range(1, draws + 1):
        counts[next_source([weight / total for weight in weights], counts)] += 1
        assert max(abs(count - weight * turn / total) for count, weight in zip(counts, weights, strict=True)) <= bound + 1e-6


def test_two_sources_take_turns_by_their_weights():
    # 3/4 and 1/4, bound 1/2. Owed (whole, quarter) before each draw, and the slack 1/2 that is needed to be ready:
    # (.75, .25) -> 0; (.5, .5) both ready, deadlines 0/.75 = 0 and 0/.25 = 0, the first -> 0; (.25, .75) -> 1; (1, 0) -> 0.
    counts, order = [0, 0], []
    for _ in range(8):
        order.append(next_source([0.75, 0.25], counts))
        counts[order[-1]] += 1
    assert order == [0, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [(10, [1, 1], [5, 5]), (10, [1, 2, 4], [1, 3, 6]), (5, [1], [5]), (2, [1, 98, 1], [1, 2, 1]), (3, [1, 1, 1, 1], [1, 1, 1, 1])],
)
def test_shares_are_rounded_by_largest_remainder_and_never_none(total, weights, parts):
    # 10 by 1:2:4 is 1.43, 2.86, 5.71: whole parts 1, 2, 5, and the two left over go to .86 and .71
    assert shares(total, weights) == parts


# streams


def numbers(first, count):
    return [{"prompt": f"{first + index}", "answer": "1"} for index in range(count)]


@pytest.fixture
def sources(jsonl):
    return [
        {"path": str(jsonl(numbers(100, 40), "low.jsonl")), "weight": 3},
        {"path": str(jsonl(numbers(200, 10), "high.jsonl")), "name": "upper"},
    ]


def config_of(train, **data):
    return Config.model_validate_json(json.dumps({"data": {"train": train, "eval_size": 4, **data}}), strict=True)


def drawn(stream, count):
    batch = stream.draw(count)
    return list(zip(batch.ids[:, 0].tolist(), batch.scalars("source"), batch.scalars("prompt"), strict=True))


def test_rows_say_where_they_come_from_in_exact_proportions(sources, tokenizer):
    stream, _ = open_prompts(config_of(sources), tokenizer)
    rows = drawn(stream, 120)
    assert [draw for draw, _, _ in rows] == list(range(120))
    assert all(source == ("low" if prompt < "200" else "upper") for _, source, prompt in rows)
    assert Counter(source for _, source, _ in rows) == {"low": 90, "upper": 30}
    assert Counter(source for _, source, _ in rows[:20]) == {"low": 15, "upper": 5}
    low = Counter(prompt for _, source, prompt in rows if source == "low")
    assert (len(low), set(low.values())) == (37, {2, 3})  # 40 less the 3 held out, in epochs: 90 = 2 * 37 + 16


def test_held_out_prompts_come_from_every_source_by_weight_and_never_in_training(sources, tokenizer):
    stream, held_out = open_prompts(config_of(sources), tokenizer)
    assert Counter(held_out.batch().scalars("source")) == {"low": 3, "upper": 1}
    assert held_out.batch().ids.tolist() == [[number, 0] for number in range(4)]
    assert set(held_out.batch().scalars("prompt")).isdisjoint(prompt for _, _, prompt in drawn(stream, 200))
    assert [str(report) for report in held_out.reports] == [
        "data.eval low: 40 problems checked, 3 kept, 0 removed, 37 not used",
        "data.eval upper: 10 problems checked, 1 kept, 0 removed, 9 not used",
    ]


def test_a_prompt_held_out_of_one_source_is_not_trained_on_through_another(jsonl, tokenizer):
    same = [{"path": str(jsonl(numbers(100, 20), name))} for name in ("one.jsonl", "two.jsonl")]
    stream, held_out = open_prompts(config_of(same, eval_size=8), tokenizer)
    assert set(held_out.batch().scalars("prompt")).isdisjoint(prompt for _, _, prompt in drawn(stream, 100))


def test_C12_removed_prompts_are_counted_by_source_and_reason(jsonl, tokenizer):
    long = [{"prompt": "1 2 3 4 5", "answer": "1"}] * 2
    files = {"low.jsonl": [*numbers(100, 20), *long], "high.jsonl": [*numbers(200, 20), long[0]]}
    train = [{"path": str(jsonl(rows, name))} for name, rows in files.items()]
    stream, _ = open_prompts(config_of(train, overlong="drop", max_prompt_tokens=4), tokenizer)
    assert stream.removed() == {
        "overlong": 3, "overlong/low": 2, "overlong/high": 1, "in_eval": 4, "in_eval/low": 2, "in_eval/high": 2,
    }  # fmt: skip
    assert (stream.report.problems, stream.report.kept) == (43, 36)
    single, _ = open_prompts(config_of(train[0]["path"], overlong="drop", max_prompt_tokens=4), tokenizer)
    assert single.removed() == {"overlong": 2, "in_eval": 4}


def test_every_source_has_keys_template_and_task_options_of_its_own(jsonl):
    from rolemesh.config.schema import ModelConfig
    from rolemesh.models import load_tokenizer

    rows = [{"question": f"{n}?", "solution": f"{n}"} for n in range(100, 120)]
    train = [
        {"path": str(jsonl(rows)), "prompt_key": "question", "answer_key": "solution", "prompt_template": "Q: {prompt}"},
        {"path": "reasoning_gym:chain_sum", "options": {"min_terms": 2, "max_terms": 2}, "size": 900},
        {"path": "reasoning_gym:chain_sum", "name": "long sums", "options": {"min_terms": 5, "max_terms": 5}},
    ]
    stream, held_out = open_prompts(config_of(train, size=300, eval_size=9), load_tokenizer(ModelConfig()))
    assert [report.problems for report in stream.reports] == [20, 900, 300]
    batch = stream.draw(30)
    texts = dict(zip(batch.scalars("source"), batch.scalars("prompt"), strict=True))
    terms = {source: text.count(" + ") + text.count(" - ") + 1 for source, text in texts.items()}
    assert texts["rows"].startswith("Q: ")
    assert (terms["chain_sum"], terms["long sums"]) == (2, 5)
    assert json.loads(batch.scalars("task")[batch.scalars("source").index("long sums")])["task"] == "chain_sum"
    assert Counter(held_out.batch().scalars("source")) == {"rows": 3, "chain_sum": 3, "long sums": 3}


@given(before=st.integers(0, 60), after=st.integers(1, 60))
def test_G05_a_resumed_mixture_goes_on_with_the_same_prompts(tmp_path_factory, before, after):
    from number_tokenizer import Numbers

    folder = tmp_path_factory.mktemp("mixture")
    for name, rows in (("low", numbers(100, 15)), ("high", numbers(200, 7))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of([{"path": str(folder / "low.jsonl"), "weight": 2.5}, {"path": str(folder / "high.jsonl")}])
    whole, stopped, resumed = (open_prompts(config, Numbers())[0] for _ in range(3))
    drawn(whole, before)
    drawn(stopped, before)
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert drawn(resumed, after) == drawn(whole, after)
    assert resumed.state() == whole.state()


def test_weights_may_change_in_a_resumed_run_and_hold_from_there_on(sources, tokenizer):
    before = open_prompts(config_of(sources), tokenizer)[0]
    drawn(before, 40)
    sources[0]["weight"] = 1
    after = open_prompts(config_of(sources, eval_size=2), tokenizer)[0]
    after.load_state(before.state())
    rows = drawn(after, 20)
    assert rows[0][0] == 40
    assert Counter(source for _, source, _ in rows) == {"low": 10, "upper": 10}  # no catching up on the past


def test_other_sources_in_a_resumed_run_are_refused_by_name(sources, tokenizer):
    state = open_prompts(config_of(sources), tokenizer)[0].state()
    with pytest.raises(ConfigError, match=r"data\.train: must name the same sources.*found upper, low; saved low, upper"):
        open_prompts(config_of(sources[::-1]), tokenizer)[0].load_state(state)


def test_supervised_batches_of_a_mixture_count_what_they_leave_out(jsonl, tokenizer):
    train = [
        {"path": str(jsonl(numbers(100, 20), "low.jsonl"))},
        {"path": str(jsonl([{**row, "answer": "1 2 3"} for row in numbers(200, 20)], "high.jsonl"))},
    ]
    stream = open_sft_prompts(config_of(train), tokenizer)
    batch = sft_batch(stream, 6, tokenizer, 2)
    assert set(batch.scalars("source")) == {"low"}
    assert stream.report.answers_too_long >= 5
    resumed = open_sft_prompts(config_of(train), tokenizer)
    resumed.load_state(stream.state())
    assert resumed.report.answers_too_long == stream.report.answers_too_long


def test_problems_of_one_source_name_its_options(jsonl, tokenizer):
    train = [{"path": str(jsonl(numbers(100, 20)))}, {"path": str(jsonl(numbers(200, 20), "high.jsonl")), "prompt_key": "question"}]
    with pytest.raises(ConfigError, match=r"data\.train\.1\.prompt_key: data\.train\.1 .*high\.jsonl\) must have the column 'question'"):
        open_prompts(config_of(train), tokenizer)


# the option


@pytest.mark.parametrize(
    ("given", "subject", "need"),
    [
        ("[]", "data.train", "at least one source"),
        ("[reasoning_gym:chain_sum, reasoning_gym:chain_sum]", "data.train", "different names"),
        ("[reasoning_gym:chain_sum, nothing.jsonl]", "data.train.1", "the file must exist"),
        ("[{path: reasoning_gym:chain_sum, prompt_template: no}]", "data.train.0.prompt_template", "must contain {prompt}"),
    ],
)
def test_mixtures_that_cannot_work_are_refused_by_option(given, subject, need):
    (problem,) = check_config(load_config(None, [f"data.train={given}"]))
    assert (problem.subject, need in problem.need) == (subject, True), problem


def test_a_text_is_one_source_and_dotted_keys_reach_into_it():
    config = load_config(None, ["data.train=a.jsonl", "data.train.0.weight=2", "data.train.1.path=b.parquet", "data.eval=[c.jsonl]"])
    assert [(source.path, source.weight, source.label) for source in config.data.train] == [("a.jsonl", 2.0, "a"), ("b.parquet", 1.0, "b")]
    assert [source.path for source in config.data.eval] == ["c.jsonl"]
    assert DataConfig(train="a.jsonl") == DataConfig(train=["a.jsonl"])
