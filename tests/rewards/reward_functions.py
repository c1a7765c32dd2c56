"""Scoring functions of users, as tests name them by import path."""

from __future__ import annotations

import asyncio
import signal

import numpy as np

from rolemesh.rewards import reward_function


def length(sample):
    return float(len(sample.response))


def length_and_more(sample, *, factor=1.0):
    return len(sample.response) * factor, {"words": len(sample.response.split())}


def as_mapping(sample):
    return {"score": np.float32(1.5), "note": "fine"}


def by_response(sample):
    """The response says what happens."""
    match sample.response:
        case "raise":
            raise ConnectionError("sandbox is down")
        case "nan":
            return float("nan")
        case "none":
            return None
        case "text":
            return "1.0"
        case other:
            return float(other)


def extras_by_response(sample):
    """Extras whose keys are the letters of the response."""
    return 1.0, {letter: ord(letter) for letter in sample.response}


def mixed_extras(sample):
    values = {"n": 1, "s": "text", "l": [1, 2], "b": True, "x": float("nan")}
    return 1.0, {"value": values[sample.response]}


async def slowly(sample):
    await asyncio.sleep(0.01 * (3 - sample.sample))
    if sample.response == "raise":
        raise ConnectionError("sandbox is down")
    return float(sample.sample)


def with_alarm(sample):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    return 1.0


@reward_function(needs=("answer", "task.level"), sources=("sums", "words"))
def choosy(sample, *, strictness=1):
    return 1.0


NOT_A_FUNCTION = 3
