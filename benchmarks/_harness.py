"""Shared by the benchmarks: what is compared runs interleaved in one process, and the last line printed is one JSON object.

Compare ratios, not absolute times: machines differ, and so does one machine from hour to hour. Interleaving lets a slow minute fall on
all rivals alike; medians keep one disturbed round from deciding.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import select
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def arguments(description: str, **more: str) -> argparse.Namespace:
    """The options that all benchmarks share: `--quick` for a run of seconds whose figures say little. `more`: others, with their help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run to see that it works")
    for name, text in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=text)
    return parser.parse_args()


def interleaved(cases: Mapping[str, Callable[[], Any]], rounds: int, warmups: int = 1) -> dict[str, list[float]]:
    """Seconds of each round of each case. All cases run in each round, in turn from another one on."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for name, counts in _turns(list(cases), rounds, warmups):
        start = time.perf_counter()
        cases[name]()
        if counts:
            times[name].append(time.perf_counter() - start)
    return times


async def interleaved_async(
    cases: Mapping[str, Callable[[], Awaitable[float | None]]], rounds: int, warmups: int = 1
) -> dict[str, list[float]]:
    """The same for coroutines. One that returns a number has measured itself."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for name, counts in _turns(list(cases), rounds, warmups):
        start = time.perf_counter()
        measured = await cases[name]()
        if counts:
            times[name].append(time.perf_counter() - start if measured is None else measured)
    return times


def _turns(names: list[str], rounds: int, warmups: int) -> Iterator[tuple[str, bool]]:
    """(Case, whether it counts), round after round."""
    for round_ in range(-warmups, rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            yield name, round_ >= 0


def median_ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round: how many times as long the first takes as the second."""
    return statistics.median(one / other for one, other in zip(slower, faster, strict=True))


class Side:
    """A program, perhaps of another environment, that runs beside this one: a JSON list [what, arguments...] a line to it, a JSON value a
    line back. Its first line, which `greet` waits for, is {"version": ...}, or {"missing": why it cannot run}."""

    version = missing = ""

    def __init__(self, name: str, command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> None:
        """Starts it. `seconds` is the longest that any answer may take."""
        self._name, self._seconds = name, seconds
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env={**os.environ, **(environment or {})}
        )

    def greet(self) -> Side:
        hello = self.answer()
        self.version, self.missing = hello.get("version", ""), hello.get("missing", "")
        return self

    def tell(self, what: str, *parameters: Any) -> None:
        """Ask without waiting."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps([what, *parameters]).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answer."""
        assert self._process.stdout
        readable, _, _ = select.select([self._process.stdout], [], [], self._seconds)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            self._process.kill()
            raise SystemExit(f"{self._name} ended or did not answer in {self._seconds:g} s; run {self._process.args} by hand to see why")
        return json.loads(line)

    def ask(self, what: str, *parameters: Any) -> Any:
        self.tell(what, *parameters)
        return self.answer()

    def close(self) -> None:
        self._process.communicate(timeout=self._seconds)


def finish(name: str, ratios: Mapping[str, float], packages: Sequence[str], **more: Any) -> None:
    """Print the final JSON line."""
    result = {
        "name": name,
        "ratios": {what: round(ratio, 3) for what, ratio in ratios.items()},
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "machine": _machine(),
        **more,
    }
    print(json.dumps(result), flush=True)


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
