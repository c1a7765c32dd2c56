from __future__ import annotations

import asyncio
import pickle
import random
import threading
import time
import traceback

import pytest

from rolemesh.batch import Batch
from rolemesh.config.schema import DataConfig, RewardConfig
from rolemesh.data import open_source
from rolemesh.errors import ConfigError, RolemeshError
from rolemesh.protocols.task import dump_task
from rolemesh.rewards import InProcess, RewardError, RewardScorer, check_rewards, concat_scored, top_errors


def in_process(configs):
    return RewardScorer(configs, InProcess(configs))


def scorer_of(*names, **options):
    return in_process([RewardConfig(name=name if ":" in name else f"reward_functions:{name}", **options) for name in names])


def batch_of(responses):
    count = len(responses)
    return Batch.from_columns(
        {
            "draw": list(range(count)),
            "sample": [0] * count,
            "source": ["sums"] * count,
            "prompt": ["?"] * count,
            "response": responses,
            "answer": ["5"] * count,
            "task": ['{"level":1}'] * count,
            "finish_reason": ["stop"] * count,
        }
    )


def by_id(batch, name):
    return dict(zip(map(tuple, batch.ids.tolist()), batch.table.column(name).to_pylist(), strict=True))


# sums


def test_the_reward_is_the_weighted_sum(sample):
    configs = [
        RewardConfig(name="reward_functions:length", weight=2.0),
        RewardConfig(name="exact", weight=-0.5),
        RewardConfig(name="reward_functions:length_and_more", weight=1.0, options={"factor": 3.0}),
    ]
    outcome = in_process(configs).score([sample("four", "four")])[0]
    assert outcome.reward == 2.0 * 4 - 0.5 * 1 + 1.0 * 12
    assert (outcome.status, outcome.error) == ("ok", "")
    assert outcome.parts == {"reward_functions:length": 4.0, "exact": 1.0, "reward_functions:length_and_more": 12.0}
    assert outcome.extras == outcome.parts | {"reward_functions:length_and_more/words": 1.0}


def test_a_threshold_makes_partial_credit_right_or_wrong(sample):
    scores = [outcome.reward for outcome in scorer_of("by_response", threshold=1.0).score([sample(text) for text in ("0.99", "1", "3")])]
    assert scores == [0.0, 1.0, 1.0]
    weighted = scorer_of("by_response", threshold=0.5, weight=3.0).score([sample("0.5"), sample("0.4")])
    assert [outcome.reward for outcome in weighted] == [3.0, 0.0]


def test_one_function_twice_has_two_names(sample):
    configs = [RewardConfig(name="exact"), RewardConfig(name="exact", options={"ignore_case": True})]
    assert in_process(configs).score([sample("A", "a")])[0].parts == {"exact": 0.0, "exact#2": 1.0}


# failures


def test_E10_failure_is_a_state_and_not_zero(sample):
    responses = ["1", "raise", "0", "1", "nan", "none", "1", "text", "raise", "1"]
    outcomes = scorer_of("by_response").score([sample(text, draw=draw) for draw, text in enumerate(responses)])
    statuses = {"raise": "error", "text": "error", "nan": "not_finite", "none": "abstained", "0": "ok", "1": "ok"}
    assert [outcome.status for outcome in outcomes] == [statuses[text] for text in responses]
    assert [outcome.reward for outcome in outcomes] == [float(text) if text in "01" else None for text in responses]
    assert outcomes[1].error == "reward_functions:by_response: ConnectionError: sandbox is down"
    assert top_errors([outcome.error for outcome in outcomes])[0] == (outcomes[1].error, 2)
    assert "returned str, expected a number" in outcomes[7].error


def test_E10_failures_are_null_rows_of_the_batch():
    scored = scorer_of("by_response").score_batch(batch_of(["1", "raise", "none"]))
    assert scored.table.column("reward").to_pylist() == [1.0, None, None]
    assert scored.scalars("reward_status") == ["ok", "error", "abstained"]
    assert scored.scalars("extra/reward_error") == [None, "reward_functions:by_response: ConnectionError: sandbox is down", None]


@pytest.mark.parametrize(("response", "status"), [("raise", "error"), ("nan", "not_finite"), ("none", "abstained")])
def test_one_part_without_a_score_leaves_the_sample_without_a_reward(sample, response, status):
    scorer = scorer_of("length", "by_response")
    outcome = scorer.score([sample("1"), sample(response, draw=1)])[1]
    assert (outcome.reward, outcome.status) == (None, status)
    assert outcome.parts == {"reward_functions:length": float(len(response)), "reward_functions:by_response": None}


def test_E01_in_process_a_scorer_that_needs_the_main_thread_stops_the_first_batch(sample):
    caught = []

    def work():
        try:
            scorer_of("with_alarm").score([sample("a", draw=draw) for draw in range(4)])
        except RolemeshError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=30)
    (error,) = caught
    assert isinstance(error, RewardError)
    text = str(pickle.loads(pickle.dumps(error)))
    assert "reward_functions:with_alarm failed for all 4 samples" in text
    assert "ValueError: signal only works in main thread" in text
    assert "draw 0 sample 0 of 'sums'" in text


def test_E01_the_same_scorer_works_in_the_main_thread(sample):
    assert scorer_of("with_alarm").score([sample("a")])[0].reward == 1.0


def test_a_function_that_breaks_later_stops_the_run_once_two_prompts_have_failed(sample):
    scorer = scorer_of("by_response")
    assert scorer.score([sample("1")])[0].reward == 1.0
    one_prompt = [sample("raise", draw=7, number=number) for number in range(4)]
    assert {outcome.status for outcome in scorer.score(one_prompt)} == {"error"}  # that prompt may be at fault
    with pytest.raises(RewardError):
        scorer.score([sample("raise", draw=8)])


def test_a_success_between_failures_keeps_the_run_going(sample):
    scorer = scorer_of("by_response")
    for draw in range(5):
        scorer.score([sample("1", draw=10 * draw)])
        assert scorer.score([sample("raise", draw=draw)])[0].status == "error"


@pytest.mark.parametrize(("response", "status"), [("none", "abstained"), ("nan", "not_finite")])
def test_a_function_that_never_gives_a_score_but_does_not_raise_goes_on(sample, response, status):
    outcomes = scorer_of("by_response").score([sample(response, draw=draw) for draw in range(3)])
    assert [(outcome.reward, outcome.status) for outcome in outcomes] == [(None, status)] * 3


def test_no_samples_are_no_failure():
    assert scorer_of("with_alarm").score([]) == []
    assert scorer_of("by_response").score_batch(batch_of(["1"]).slice(0, 0)).num_rows == 0


# what functions may be and return


def test_E08_a_plain_number_is_enough(recwarn, caplog, capsys):
    scored = scorer_of("length").score_batch(batch_of(["a", "bb"]))
    assert scored.scalars("reward").tolist() == [1.0, 2.0]
    assert scored.names == ("draw", "sample", "reward", "reward_status", "extra/reward_error")
    assert scored.scalars("extra/reward_error") == [None, None]
    assert (list(recwarn), caplog.records, capsys.readouterr()) == ([], [], ("", ""))


def test_extras_may_come_in_a_pair_or_a_mapping(sample):
    assert scorer_of("length_and_more").score([sample("a b")])[0].extras == {"words": 2.0}
    outcome = scorer_of("as_mapping").score([sample("a")])[0]
    assert (outcome.reward, outcome.extras) == (1.5, {"note": "fine"})


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_E06_extras_are_columns_with_gaps_in_any_order(order):
    responses = ["ab", "a", "ac"]
    scored = scorer_of("extras_by_response").score_batch(batch_of(responses).take(order))
    assert scored.names[5:] == ("extra/a", "extra/b", "extra/c")
    assert by_id(scored, "extra/a") == {(0, 0): 97.0, (1, 0): 97.0, (2, 0): 97.0}
    assert by_id(scored, "extra/b") == {(0, 0): 98.0, (1, 0): None, (2, 0): None}
    assert by_id(scored, "extra/c") == {(0, 0): None, (1, 0): None, (2, 0): 99.0}


@pytest.mark.parametrize("responses", [["n", "s", "l", "b", "x"], ["n", "b", "x", "n", "n"], ["x"] * 5])
def test_E06_any_split_over_workers_gives_the_same_columns(responses):
    batch = batch_of(responses)
    whole = scorer_of("mixed_extras").score_batch(batch)
    for cut in range(1, 5):
        parts = [scorer_of("mixed_extras").score_batch(part) for part in (batch.slice(0, cut), batch.slice(cut, 5 - cut))]
        assert concat_scored(parts).equals(whole)
    expected = {"n": "1.0", "s": "text", "l": "[1, 2]", "b": "1.0", "x": None}
    if "s" in responses:
        assert whole.scalars("extra/value") == [expected[text] for text in responses]
    else:
        assert whole.kind("extra/value") == "float"


def test_E06_workers_with_other_keys_are_joined():
    batch = batch_of(["ab", "a", "", "c"])
    parts = [scorer_of("extras_by_response").score_batch(part) for part in batch.split_rows(4)]
    assert concat_scored(parts).equals(scorer_of("extras_by_response").score_batch(batch))


@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_asynchronous_functions_run_side_by_side_and_keep_their_order(sample, inside_a_loop):
    samples = [sample("a", number=number % 4, draw=number) for number in range(40)]
    samples[1] = sample("raise", draw=1)

    async def within():
        return scorer_of("slowly").score(samples)

    started = time.monotonic()
    outcomes = asyncio.run(within()) if inside_a_loop else scorer_of("slowly").score(samples)
    assert [outcome.reward for outcome in outcomes] == [None if row == 1 else float(row % 4) for row in range(40)]
    assert outcomes[1].status == "error"
    assert time.monotonic() - started < 0.01 * 1.5 * 40  # their sum


def test_F13_shuffling_rows_changes_nothing():
    batch = batch_of([str(number) for number in range(6)]).repeat(4)
    responses = [f"{draw}.{number}" for draw, number in batch.ids.tolist()]
    batch = batch.with_columns({"response": responses})
    order = list(range(24))
    random.Random(1).shuffle(order)
    straight, shuffled = (scorer_of("by_response").score_batch(rows) for rows in (batch, batch.take(order)))
    assert batch.join(straight).equals(batch.join(shuffled))
    assert by_id(shuffled, "reward") == {(draw, number): float(f"{draw}.{number}") for draw, number in batch.ids.tolist()}


def test_generated_problems_are_scored_from_their_columns():
    source = open_source("reasoning_gym:chain_sum", DataConfig(), subject="data.train", size=8, seed=2)
    problems = [source.problem(index) for index in range(8)]
    right = [index % 2 == 0 for index in range(8)]
    batch = batch_of([problem.answer if good else "none" for problem, good in zip(problems, right, strict=True)])
    batch = batch.with_columns({"task": [dump_task(problem.task) for problem in problems]})
    scored = in_process([RewardConfig(threshold=1.0)]).score_batch(batch)
    assert scored.scalars("reward").tolist() == [float(good) for good in right]


# E07: before the run starts


def problems_of(*configs, sources=None):
    with pytest.raises(ConfigError) as caught:
        check_rewards([RewardConfig(**config) for config in configs], sources)
    return caught.value.problems


def test_E07_functions_that_do_not_exist_or_fit_are_reported_together():
    problems = problems_of(
        {"name": "exakt"},
        {"name": "reward_functions:nothing"},
        {"name": "reward_functions:NOT_A_FUNCTION"},
        {"name": "exact", "options": {"ignorecase": True}},
        {"name": "exact", "options": {"ignore_case": True}},
    )
    assert [problem.subject for problem in problems] == ["reward.0.name", "reward.1.name", "reward.2.name", "reward.3.options"]
    assert "Did you mean 'exact'?" in problems[0].remedy
    assert "Did you mean ignore_case instead of ignorecase?" in problems[3].remedy


SOURCES = {"sums": {"rows": 9, "answer": 9, "task.level": 9}, "words": {"rows": 4, "answer": 4, "task.level": 4}}


def test_E07_unknown_sources_are_named_with_row_counts_and_how_to_register():
    choosy = {"name": "reward_functions:choosy"}
    check_rewards([RewardConfig(**choosy)], SOURCES)
    (problem,) = problems_of(choosy, sources=SOURCES | {"x": {"rows": 1, "answer": 1, "task.level": 1}})
    assert problem.need == "reward_functions:choosy knows the data sources sums, words"
    assert problem.free == "'x' (1 rows)"
    assert "@reward_function(sources=...)" in problem.remedy


def test_E07_sources_that_lack_what_a_function_needs_are_named():
    sources = SOURCES | {"words": {"rows": 4, "answer": 1}}
    answer, level = problems_of({"name": "reward_functions:choosy"}, sources=sources)
    assert answer.free == "none in 3 of 4 rows of source 'words'"
    assert level.free == "none in 4 of 4 rows of source 'words'"
    assert "the column 'level'" in level.need
    task, _entry = problems_of({"name": "reasoning_gym"}, sources=SOURCES)
    assert "data.train=reasoning_gym:TASK" in task.remedy


def test_E07_generated_problems_fit_their_verifier():
    source = open_source("reasoning_gym:chain_sum", DataConfig(), subject="data.train", size=8, seed=2)
    check_rewards([RewardConfig(name="reasoning_gym"), RewardConfig(name="exact")], source.summary())
    unanswered = open_source("reasoning_gym:graph_color", DataConfig(), subject="data.train", size=8, seed=2)
    check_rewards([RewardConfig(name="reasoning_gym")], unanswered.summary())
    with pytest.raises(ConfigError, match="8 of 8 rows of source 'graph_color'"):
        check_rewards([RewardConfig(name="exact")], unanswered.summary())


def test_a_scorer_refuses_what_it_cannot_find():
    with pytest.raises(ConfigError, match=r"reward\.0\.name"):
        scorer_of("nothing")


def test_scores_that_add_up_to_more_than_a_float_holds_are_no_reward(sample):
    outcome = scorer_of("by_response", weight=10.0).score([sample("1e308"), sample("1", draw=1)])
    assert [(found.reward, found.status) for found in outcome] == [(None, "not_finite"), (10.0, "ok")]


def test_the_message_of_a_broken_function_ends_on_cause_and_place_and_its_trace_is_kept_for_the_file(sample):
    with pytest.raises(RewardError) as caught:
        scorer_of("by_response").score([sample("raise")])
    text = str(caught.value)
    assert "Traceback" not in text
    last = text.splitlines()[-1]
    assert last.startswith("ConnectionError: sandbox is down (")
    assert "reward_functions.py, line " in last
    assert last.endswith(", in by_response)")
    copied = pickle.loads(pickle.dumps(caught.value))
    for error in (caught.value, copied):
        assert 'raise ConnectionError("sandbox is down")' in "".join(traceback.format_exception(error))
