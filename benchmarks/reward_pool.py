"""The scoring pool on 2,000 answers of which 1 % loop for ever, crash or take all memory, and what it costs when all is well.

    python benchmarks/reward_pool.py [--quick]

hostile_over_ideal    wall time over ideal. An honest answer takes 1 to 39 ms (it waits for a sandbox, say; known beforehand), a loop its
                      whole deadline, and in the ideal nothing else takes any time: neither crashes, nor filling the memory up to the
                      limit, nor new processes. Ideal is when the last of 8 such processes is done that are given the answers in
                      this order, each the next one as soon as it is free. (The sum divided by 8 is `bound_s` in the last line.) Every
                      honest score must be right, every fault of its kind, and the pool complete afterwards, or the run fails.
clean_over_ideal      the same without the bad ones.
threads_over_ideal    the waits of the clean run alone, in as many threads of this process: what this machine makes of the ideal.
serial_over_pool      512 answers of 50 ms with 8 processes: serial time (25.6 s) over wall time, 8 at best.
quick_over_in_process answers that take a microsecond, where the way to another process costs most: time with the pool over time in this
                      process.

The honest answers wait and do not compute, so that the figures hold on a busy machine. Prints one JSON line last.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _harness import arguments, finish, interleaved, median_ratio

from rolemesh.config.schema import RewardConfig
from rolemesh.protocols.reward import Sample
from rolemesh.rewards import InProcess, ScoringPool
from rolemesh.rewards.work import Answer, Work

PROCESSES, DEADLINE, MEMORY_MB = 8, 2.0, 128
KINDS = {"loop": "Timeout", "crash": "ProcessEnded", "hog": "MemoryLimit"}


def score(sample: Sample) -> float:
    """The response is the number of milliseconds to wait, which is the score too, or a misdeed."""
    match sample.response:
        case "loop":
            while True:
                pass
        case "crash":
            os._exit(1)
        case "hog":
            held = []
            while True:
                held.append(bytearray(b"x") * (16 << 20))
    time.sleep(float(sample.response) / 1000)
    return float(sample.response)


def works_of(responses: Sequence[str]) -> list[Work]:
    return [
        Work(part=0, sample=Sample(draw=row, sample=0, source="", prompt="", response=text, answer="1", task={}, finish_reason="stop"))
        for row, text in enumerate(responses)
    ]


def answers_of(count: int, bad: int, seed: int) -> list[str]:
    """Honest ones in random lengths, and bad ones of all kinds at random places."""
    rng = random.Random(seed)
    responses = [f"{rng.uniform(1, 39):.3f}" for _ in range(count)]
    for row, kind in zip(rng.sample(range(count), bad), itertools.cycle(KINDS), strict=False):
        responses[row] = kind
    return responses


def is_right(response: str, answer: Answer) -> bool:
    if response in KINDS:
        return answer.fault is not None and answer.fault.type == KINDS[response]
    return answer.value == float(response)


def ideal_seconds(responses: Sequence[str]) -> tuple[float, float]:
    """(When the last process is done, when all would be if the work could be divided evenly.)"""
    free = [0.0] * PROCESSES
    for text in responses:
        seconds = {"loop": DEADLINE, "crash": 0.0, "hog": 0.0}[text] if text in KINDS else float(text) / 1000
        heapq.heapreplace(free, free[0] + seconds)
    return max(free), sum(free) / PROCESSES


def over_ideal(pool: ScoringPool, responses: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Wall time over ideal, and the figures behind it."""
    ideal, bound = ideal_seconds(responses)
    pool.take_usage()
    began = time.perf_counter()
    answers = pool.run(works_of(responses))
    wall = time.perf_counter() - began
    wrong = [(text, answer) for text, answer in zip(responses, answers, strict=True) if not is_right(text, answer)]
    if wrong or len(pool.pids) != PROCESSES:
        raise SystemExit(f"{len(wrong)} of {len(responses)} answers are wrong, {len(pool.pids)} of {PROCESSES} processes left: {wrong[:3]}")
    usage = pool.take_usage()
    bad = {kind: responses.count(kind) for kind in KINDS}
    figures = {
        "wall_s": wall,
        "ideal_s": ideal,
        "bound_s": bound,
        "replaced": usage.replaced,
        "busiest": max(usage.samples),
        "answers": len(responses),
        **bad,
    }
    return wall / ideal, figures


def threads_over_ideal(responses: Sequence[str]) -> float:
    waits = [float(text) / 1000 for text in responses]
    with ThreadPoolExecutor(PROCESSES) as threads:
        began = time.perf_counter()
        list(threads.map(time.sleep, waits))
        return (time.perf_counter() - began) / (sum(waits) / PROCESSES)


def serial_over_pool(count: int) -> float:
    pool = ScoringPool([RewardConfig(name="reward_pool:score")], processes=8)
    try:
        began = time.perf_counter()
        pool.run(works_of(["50"] * count))
        return count * 0.05 / (time.perf_counter() - began)
    finally:
        pool.close()


def quick_over_in_process(rounds: int) -> float:
    configs = [RewardConfig(name="exact")]
    pool, here, works = ScoringPool(configs, processes=2), InProcess(configs), works_of(["1"] * 1000)
    try:
        times = interleaved({"pool": lambda: pool.run(works), "here": lambda: here.run(works)}, rounds)
    finally:
        pool.close()
    return median_ratio(times["pool"], times["here"])


def main() -> None:
    quick = arguments(__doc__ or "").quick
    count = 200 if quick else 2000
    pool = ScoringPool([RewardConfig(name="reward_pool:score", deadline=DEADLINE, memory_mb=MEMORY_MB)], processes=PROCESSES)
    try:
        clean, clean_figures = over_ideal(pool, answers_of(count, 0, seed=1))
        hostile, hostile_figures = over_ideal(pool, answers_of(count, count // 100 if not quick else 3, seed=2))
    finally:
        pool.close()
    ratios = {
        "hostile_over_ideal": hostile,
        "clean_over_ideal": clean,
        "threads_over_ideal": threads_over_ideal(answers_of(count, 0, seed=1)),
        "serial_over_pool": serial_over_pool(128 if quick else 512),
        "quick_over_in_process": quick_over_in_process(2 if quick else 7),
    }
    finish("reward_pool", ratios, ["rolemesh"], hostile=hostile_figures, clean=clean_figures)


if __name__ == "__main__":
    main()
