"""What the pool does about functions that loop, crash, take memory, or leave things behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import date
from pathlib import Path

import psutil
import pytest

from rolemesh.config.schema import RewardConfig
from rolemesh.errors import ConfigError
from rolemesh.rewards import RewardError, RewardScorer, ScoringPool, link
from rolemesh.rewards import pool as scoring_pool
from rolemesh.rewards.link import ScoringPoolError
from rolemesh.rewards.work import Work

MIB = 2**20
DEADLINE = 1.2


@pytest.fixture
def pool_of():
    """Make a pool of one function; all end with the test."""
    made = []

    def make(name="hostile_functions:act", *, processes=2, **settings):
        settings = {"deadline": DEADLINE, "memory_mb": 128} | settings
        made.append(ScoringPool([RewardConfig(name=name, **settings)], processes=processes))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture
def run(sample):
    def of(pool, responses):
        return pool.run([Work(part=0, sample=sample(text, draw=row)) for row, text in enumerate(responses)])

    return of


def honest(count):
    return [str(number) for number in range(count)]


def values(answers):
    return [answer.value for answer in answers]


def is_alive(pid):
    """A process whose main thread has ended while others still end has not ended: its files are still open."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def alive(pids):
    return [pid for pid in pids if is_alive(pid)]


def wait_for_end(pids, seconds=5.0):
    """The processes that are left after a while."""
    ends = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < ends:
        time.sleep(0.02)
    return left


def end(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_for_end(pids) == []


def nursery_of(pool):
    return psutil.Process(pool.pids[0]).ppid()


# deadlines


@pytest.mark.parametrize("deed", ["loop", "match", "power"])
def test_E02_an_endless_loop_costs_its_deadline_and_nothing_else(pool_of, run, deed):
    pool = pool_of()
    before = pool.pids
    began = time.monotonic()
    answers = run(pool, [*honest(20), deed, *honest(20)])
    assert time.monotonic() - began < DEADLINE + 5
    fault = answers.pop(20).fault
    assert (fault.timed_out, fault.message) == (True, "no score within deadline=1.2 s")
    assert values(answers) == [float(text) for text in honest(20)] * 2
    assert len(pool.pids) == 2
    (gone,) = set(before) - set(pool.pids)
    assert alive([gone]) == []
    assert pool.take_usage().replaced == 1


def test_a_sample_that_ends_before_its_deadline_is_not_touched(pool_of, run):
    pool = pool_of(processes=1, deadline=2.0)
    assert values(run(pool, ["sleep:0.6"] * 4)) == [1.0] * 4  # 2.4 s in all: the deadline is for each
    assert pool.take_usage().replaced == 0


def test_a_loop_does_not_hold_up_those_that_waited_behind_it(pool_of, run):
    pool = pool_of(processes=1)
    run(pool, honest(300))  # the function is known to be quick: samples are sent ahead
    answers = run(pool, [*honest(100), "loop", *honest(100), "loop", *honest(100)])
    assert [row for row, answer in enumerate(answers) if answer.fault] == [100, 201]


def test_E01_a_function_that_bounds_its_own_time_by_alarms_works_from_any_thread(pool_of, sample):
    configs = [RewardConfig(name="hostile_functions:act")]
    scorer = RewardScorer(configs, pool_of(deadline=10.0))
    rewards = []
    thread = threading.Thread(target=lambda: rewards.extend(outcome.reward for outcome in scorer.score([sample("alarm")] * 4)))
    thread.start()
    thread.join(timeout=30)
    assert rewards == [0.5] * 4


def test_a_forgotten_alarm_does_not_ring_in_the_next_sample(pool_of, run):
    assert values(run(pool_of(processes=1, deadline=5.0), ["forgotten_alarm", "sleep:0.6"])) == [1.0, 1.0]


def test_a_function_that_never_answers_stops_the_run(pool_of, sample):
    configs = [RewardConfig(name="hostile_functions:act", deadline=0.2)]
    with pytest.raises(RewardError, match=r"(?s)failed for all 4 samples of a call.*Timeout: no score within deadline=0\.2 s"):
        RewardScorer(configs, pool_of(deadline=0.2)).score([sample("loop", draw=draw) for draw in range(4)])


def test_E10_timeouts_and_crashes_are_states(pool_of, sample):
    texts = ["1", "loop", "segv", "0", "raise:odd", "1"]
    configs = [RewardConfig(name="hostile_functions:act")]
    outcomes = RewardScorer(configs, pool_of()).score([sample(text, draw=draw) for draw, text in enumerate(texts)])
    assert [outcome.status for outcome in outcomes] == ["ok", "timeout", "error", "ok", "error", "ok"]
    assert [outcome.reward for outcome in outcomes] == [1.0, None, None, 0.0, None, 1.0]
    assert outcomes[1].error == "hostile_functions:act: Timeout: no score within deadline=1.2 s"
    assert outcomes[2].error == "hostile_functions:act: ProcessEnded: the scoring process ended: SIGSEGV"


# crashes


@pytest.mark.parametrize(("deed", "how"), [("segv", "SIGSEGV"), ("exit:7", "exit code 7"), ("exit:0", "exit code 0"), ("kill", "SIGKILL")])
def test_a_crash_costs_its_sample_alone(pool_of, run, tmp_path, deed, how):
    pool = pool_of(options={"folder": str(tmp_path)}, deadline=10.0)
    run(pool, honest(200))
    texts = [str(row) for row in range(300)]
    for row in (0, 90, 91, 150, 299):
        texts[row] = deed
    for file in tmp_path.iterdir():
        file.unlink()
    answers = run(pool, texts)
    assert values(answers) == [None if text == deed else float(text) for text in texts]
    assert {answer.fault.message.partition(" (")[0] for answer in answers if answer.fault} == {f"the scoring process ended: {how}"}
    ran = Counter(int(line) for file in tmp_path.iterdir() for line in file.read_text().split())
    assert ran == {row: 1 for row, text in enumerate(texts) if text != deed}  # none was lost, none was run twice
    assert len(pool.pids) == 2


def test_a_process_that_closes_its_stream_is_replaced(pool_of, run):
    pool = pool_of(processes=1, deadline=10.0)
    answers = run(pool, ["1", "close_files", "2", "close_files_and_loop", "3"])
    assert values(answers) == [1.0, None, 2.0, None, 3.0]
    assert answers[1].fault.message == "the scoring process ended: exit code 1"
    assert answers[3].fault.message == "the scoring process ended: it closed its stream and went on"


def test_a_process_that_dies_between_calls_is_replaced(pool_of, run):
    pool = pool_of(deadline=10.0)
    end(pool.pids)
    assert values(run(pool, honest(20))) == [float(text) for text in honest(20)]


def test_the_end_of_the_nursery_is_survived(pool_of, run, tmp_path):
    pool = pool_of(deadline=20.0)
    answers = run(pool, [*honest(10), f"kill_parent_once:{tmp_path / 'done'}", *honest(10)])
    assert values(answers) == [*map(float, honest(10)), 1.0, *map(float, honest(10))]
    end([nursery_of(pool)])
    assert values(run(pool, honest(20))) == [float(text) for text in honest(20)]
    assert len(alive(pool.pids)) == 2


def test_a_function_that_ends_the_nursery_again_and_again_stops_the_call(pool_of, run):
    pool = pool_of(deadline=20.0)
    with pytest.raises(ScoringPoolError, match="the process that scoring processes come from has ended, 4 times"):
        run(pool, [*honest(5), "kill_parent"])
    pool.close()


# memory


def tree_bytes(pool):
    nursery = psutil.Process(nursery_of(pool))
    return sum(process.memory_info().rss for process in [nursery, *nursery.children(recursive=True)])


def test_E04_memory_is_back_at_once_and_the_pool_does_not_grow(pool_of, run):
    pool = pool_of(memory_mb=48, deadline=20.0)
    sizes = []
    for _ in range(50):
        answers = run(pool, ["1", "hog", "2"])
        assert values(answers) == [1.0, None, 2.0]
        assert answers[1].fault.message == "memory limit: more than memory_mb=48"
        sizes.append(tree_bytes(pool) + psutil.Process().memory_info().rss)
    assert pool.take_usage().replaced == 50
    assert max(sizes[5:]) - min(sizes[5:]) < 20 * MIB  # a hog that stayed would be 48


def test_memory_of_what_a_function_starts_counts(pool_of, run):
    pool = pool_of(memory_mb=128, deadline=20.0)
    answers = run(pool, ["1", "hog_outside", "2"])
    assert values(answers) == [1.0, None, 2.0]
    assert answers[1].fault.type == "MemoryLimit"


def test_a_slow_leak_is_not_laid_to_any_sample(pool_of, run):
    pool = pool_of(memory_mb=128, deadline=20.0)
    assert values(run(pool, ["leak:8"] * 60)) == [1.0] * 60  # 480 MB
    assert pool.take_usage().replaced > 3
    assert tree_bytes(pool) < 300 * MIB


def test_a_sample_that_waited_behind_a_leak_is_not_blamed_for_it(pool_of, run):
    """Samples are sent ahead: those behind the one that used up the memory are under way before the process can be replaced."""
    pool = pool_of(memory_mb=128, deadline=20.0, processes=1)
    run(pool, honest(300))  # quick: eight are sent ahead
    answers = run(pool, [*honest(30), "leak:100", *["hold:40"] * 4, "hog", *honest(30)])
    assert values(answers) == [*map(float, honest(30)), 1.0, *[1.0] * 4, None, *map(float, honest(30))]
    assert pool.take_usage().replaced == 2


def test_a_limit_below_what_imports_take_is_refused(pool_of):
    with pytest.raises(ConfigError, match=r"reward\.0\.memory_mb: must be well above the \d+ MB that a process holds"):
        pool_of(memory_mb=10)


# asynchronous functions


def test_an_asynchronous_function_that_waits_too_long_is_cancelled(pool_of, run):
    pool = pool_of("hostile_functions:act_async", processes=1)
    began = time.monotonic()
    answers = run(pool, [*honest(30), "wait:100", "wait:0.1", *honest(30)])
    assert values(answers) == [*map(float, honest(30)), None, 1.0, *map(float, honest(30))]
    assert answers[30].fault.timed_out
    assert time.monotonic() - began < DEADLINE + 5
    assert pool.take_usage().replaced == 1  # what it left running in threads goes with the process


@pytest.mark.parametrize(("deed", "kind"), [("loop", "Timeout"), ("stubborn", "Timeout"), ("segv", "ProcessEnded"), ("hog", "MemoryLimit")])
def test_the_guilty_one_among_many_is_found(pool_of, run, monkeypatch, deed, kind):
    monkeypatch.setattr(scoring_pool, "GRACE_SECONDS", 0.3)
    pool = pool_of("hostile_functions:act_async", processes=1, deadline=1.0 if kind == "Timeout" else 20.0)
    answers = run(pool, [*honest(10), deed, *honest(10)])
    assert answers[10].fault.type == kind
    assert [row for row, answer in enumerate(answers) if answer.fault] == [10]
    assert len(pool.pids) == 1


# what is left behind


@pytest.mark.parametrize("deed", ["family_and_loop", "family_and_crash"])
def test_everything_that_a_function_started_ends_with_it(pool_of, run, tmp_path, deed):
    file = tmp_path / "pids"
    pool = pool_of(deadline=2.0)
    run(pool, ["1", f"{deed}:{file}", "2"])
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 3
    assert wait_for_end(pids) == []


def test_close_ends_everything(pool_of, run, tmp_path):
    pool = pool_of(deadline=5.0)
    pids = [nursery_of(pool), *pool.pids]
    pool.close()
    assert alive(pids) == []
    pool.close()
    with pytest.raises(ScoringPoolError, match="closed"):
        run(pool, ["1"])


def test_a_pool_that_nobody_holds_any_more_ends():
    pool = ScoringPool([RewardConfig(name="exact")], processes=1)
    pids = [nursery_of(pool), *pool.pids]
    del pool
    gc.collect()
    assert wait_for_end(pids) == []


OWNER = """
import sys
from rolemesh.config.schema import RewardConfig
from rolemesh.protocols.reward import Sample
from rolemesh.rewards import ScoringPool
from rolemesh.rewards.work import Work
import psutil
pool = ScoringPool([RewardConfig(name=sys.argv[1], deadline=300.0)], processes=2)
print(psutil.Process(pool.pids[0]).ppid(), *pool.pids, flush=True)
sample = Sample(draw=0, sample=0, source="", prompt="", response=sys.argv[2], answer=None, task={}, finish_reason="stop")
pool.run([Work(part=0, sample=sample)] * 4)
"""


def owner_of(name, response, **variables):
    """A program that has a pool and lets it score `response` for ever."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", OWNER, name, response]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path} | variables, text=True)


@pytest.mark.parametrize("nursery_first", [False, True])
def test_processes_end_when_the_owner_is_killed(tmp_path, nursery_first):
    file = tmp_path / "pids"
    with owner_of("hostile_functions:act", f"family_and_loop:{file}") as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        ends = time.monotonic() + 10
        while not (file.exists() and file.read_text()) and time.monotonic() < ends:
            time.sleep(0.05)
        if nursery_first:
            os.kill(pids[0], signal.SIGKILL)
        owner.kill()
    started = [int(pid) for pid in file.read_text().split()]
    assert (len(pids), len(started)) == (3, 3)
    assert wait_for_end(pids if nursery_first else pids + started) == []
    if nursery_first:
        for pid in alive(started):  # nobody is left that could
            os.kill(pid, signal.SIGKILL)


def test_processes_end_when_the_owner_is_killed_during_the_import():
    with owner_of("broken_imports:locked", "1", BROKEN_IMPORTS="hang") as owner:
        ends = time.monotonic() + 20
        while not (children := psutil.Process(owner.pid).children()) and time.monotonic() < ends:
            time.sleep(0.05)
        time.sleep(1.0)
        owner.kill()
    assert len(children) == 1
    assert wait_for_end([child.pid for child in children], seconds=30) == []  # its interpreter may have to start first


def test_a_call_that_is_interrupted_leaves_no_answer_to_the_next(pool_of, run, monkeypatch):
    pool = pool_of(deadline=5.0)
    with monkeypatch.context() as patched:
        patched.setattr(ScoringPool, "_enforce", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(pool, ["sleep:0.3"] * 4)
    assert values(run(pool, honest(10))) == [float(text) for text in honest(10)]


# imports


def test_a_function_that_does_not_exist_is_a_config_error(pool_of):
    with pytest.raises(ConfigError, match=r"reward\.0\.name.*Did you mean 'exact'"):
        pool_of("exakt")


def test_options_that_cannot_travel_are_a_config_error(pool_of):
    with pytest.raises(ConfigError, match=r"reward\.0\.options: must be text.*Object of type date"):
        pool_of(options={"since": date(2026, 1, 1)})


def test_built_in_verifiers_are_bounded_as_well(pool_of, sample):
    pool = pool_of("math_verify", processes=1, deadline=30.0, memory_mb=1024)
    works = [Work(part=0, sample=sample(text, "5")) for text in ("it is 5", "$9^{9^{9^{9}}}$", r"\boxed{10/2}", "#### 9^9^9^9", "6")]
    assert values(pool.run(works)) == [1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raise", ConfigError, "importing 'broken_imports' must not fail; found RuntimeError: no licence file"),
        ("exit", ConfigError, "importing 'broken_imports' must not fail; found SystemExit: 3"),
        ("segv", ScoringPoolError, "importing broken_imports:locked ended the process: SIGSEGV"),
    ],
)
def test_imports_that_fail(pool_of, monkeypatch, how, error, text):
    monkeypatch.setenv("BROKEN_IMPORTS", how)
    with pytest.raises(error, match=text):
        pool_of("broken_imports:locked")


def test_an_import_that_hangs_has_a_deadline(pool_of, monkeypatch):
    monkeypatch.setenv("BROKEN_IMPORTS", "hang")
    monkeypatch.setattr(link, "START_SECONDS", 0.8)
    with pytest.raises(ScoringPoolError, match=r"importing broken_imports:locked took more than 0\.8 s"):
        pool_of("broken_imports:locked")


def test_an_import_that_leaves_threads_running_is_not_forked(pool_of, run):
    pool = pool_of("broken_imports:locked", deadline=20.0)
    assert values(run(pool, honest(20))) == [float(text) for text in honest(20)]
    end(pool.pids[:1])
    assert values(run(pool, honest(20))) == [float(text) for text in honest(20)]
    assert len(pool.pids) == 2


# many


def test_E14_eight_processes_take_less_than_a_fifth_of_the_time(pool_of, run):
    """128 samples of 200 ms; `benchmarks/reward_pool.py` has the 512 of 50 ms, which a busy machine disturbs more."""
    pool = pool_of(processes=8, deadline=20.0)
    for _ in range(3):  # again while others keep the machine busy
        pool.take_usage()
        began = time.monotonic()
        assert values(run(pool, ["sleep:0.2"] * 128)) == [1.0] * 128
        seconds = time.monotonic() - began
        if seconds < 128 * 0.2 / 5:
            break
    assert seconds < 128 * 0.2 / 5
    usage = pool.take_usage()
    assert sum(usage.samples) == 128
    assert max(usage.samples) <= 20  # 16 each


def test_many_answers_of_which_some_misbehave(pool_of, run):
    rng = random.Random(1)
    pool = pool_of(processes=4, deadline=2.0, memory_mb=64)
    texts = honest(200)
    faults = {"loop": "Timeout", "segv": "ProcessEnded", "exit:3": "ProcessEnded", "hog": "MemoryLimit", "raise:odd": "OddError"}
    for row, deed in zip(rng.sample(range(200), 10), [*faults, *faults], strict=True):
        texts[row] = deed
    answers = run(pool, texts)
    assert values(answers) == [None if text in faults else float(text) for text in texts]
    assert [answer.fault.type for answer in answers if answer.fault] == [faults[text] for text in texts if text in faults]
    assert len(alive(pool.pids)) == 4
    assert pool.take_usage().replaced == 8
