"""Scoring functions that do what they should not. The response says what happens; a number is an honest score."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

LEAKED = []


class OddError(BaseException):
    """As libraries for timeouts raise it."""


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def act(sample, *, folder=None):
    """The word before a colon is the deed. With `folder`, every honest score leaves a line there."""
    deed, _, detail = sample.response.partition(":")
    if deed in DEEDS:
        return DEEDS[deed](detail)
    if folder is not None:
        with Path(folder, str(os.getpid())).open("a") as file:
            file.write(f"{sample.draw}\n")
    return float(sample.response)


def _loop(_):
    while True:
        pass


def _power(_):
    return float(9**9**9**9 % 7)


def _match(_):
    return float(re.match("(a+)+$", "a" * 60 + "b") is None)


def _segv(_):
    ctypes.string_at(0)


def _hog(_):
    held = []
    while True:
        held.append(bytearray(b"x") * (4 << 20))


def _hog_outside(_):
    subprocess.run([sys.executable, "-c", "held = []\nwhile True: held.append(bytearray(b'x') * (4 << 20))"], check=False)
    return 1.0


def _leak(megabytes):
    LEAKED.append(bytearray(b"x") * (int(megabytes) << 20))
    return 1.0


def _hold(megabytes):
    """Take memory for long enough to be seen, and give it back."""
    held = bytearray(b"x") * (int(megabytes) << 20)
    time.sleep(0.2)
    return float(len(held) > 0)


def _family(path):
    """A child in the same process group, one in a session of its own, and one whose parent is gone; their ids go to a file."""
    orphan = "import os, time\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\nos.close(1)\ntime.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", orphan], stdout=subprocess.PIPE, start_new_session=True) as parent:
        pids = [int(parent.stdout.read())]
    for own_session in (False, True):
        pids.append(subprocess.Popen(["sleep", "100"], start_new_session=own_session).pid)
    Path(path).write_text(" ".join(map(str, pids)))


def _family_and_loop(path):
    _family(path)
    _loop("")


def _family_and_crash(path):
    _family(path)
    os._exit(9)


def _close_files(_):
    os.closerange(3, 64)
    return 1.0


def _close_files_and_loop(_):
    os.closerange(3, 64)
    _loop("")


def _kill_parent_once(path):
    if not os.path.exists(path):
        Path(path).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(10)
    return 1.0


def _kill_parent(_):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(10)


def _alarm(_):
    """Interrupt an endless loop after 50 ms, as scorers do that bound their own time."""

    def ring(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        _loop("")
    except TimeoutError:
        return 0.5


def _forgotten_alarm(_):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0


def _raise(name):
    raise {"odd": OddError, "unspeakable": UnspeakableError, "long": ValueError}[name]("x" * 10_000)


def _sleep(seconds):
    time.sleep(float(seconds))
    return 1.0


DEEDS = {
    "loop": _loop,
    "power": _power,
    "match": _match,
    "segv": _segv,
    "exit": lambda code: os._exit(int(code)),
    "sysexit": sys.exit,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "hog": _hog,
    "hog_outside": _hog_outside,
    "leak": _leak,
    "hold": _hold,
    "family_and_loop": _family_and_loop,
    "family_and_crash": _family_and_crash,
    "close_files": _close_files,
    "close_files_and_loop": _close_files_and_loop,
    "kill_parent_once": _kill_parent_once,
    "kill_parent": _kill_parent,
    "alarm": _alarm,
    "forgotten_alarm": _forgotten_alarm,
    "raise": _raise,
    "sleep": _sleep,
}


async def act_async(sample):
    """The same among others of its kind: `wait` only waits, `stubborn` cannot be cancelled."""
    deed, _, detail = sample.response.partition(":")
    if deed == "wait":
        await asyncio.sleep(float(detail))
        return 1.0
    if deed == "stubborn":
        while True:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                continue
    await asyncio.sleep(0.05)  # so that all are under way
    return DEEDS[deed](detail) if deed in DEEDS else float(sample.response)


async def _later(value):
    await asyncio.sleep(0)
    return value


def awaitable(sample):
    """Not a coroutine function, but returns something to wait for."""
    return _later(float(len(sample.response)))


def echo(sample, *, extra="none"):
    """What arrived."""
    return 1.0, {"sample": repr(sample), "extra": repr(extra), "pid": os.getpid()}
