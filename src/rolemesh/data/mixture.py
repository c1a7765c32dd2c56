"""Several streams of prompts as one, in exact proportions. Called by sessions and loops; a single source is a mixture of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rolemesh.batch import Batch
from rolemesh.data.filters import PromptReport, prompt_batch
from rolemesh.data.prompts import PromptStream
from rolemesh.errors import ConfigError
from rolemesh.observe import metric_part

MOST_TOLD_APART: Final = 32
"""Sources up to which metrics are kept by source."""


def next_source(weights: Sequence[float], counts: Sequence[int]) -> int:
    """Whose turn it is after `counts` draws of each source, for weights that sum to 1.

    After t draws, source i has had between w_i t - b and w_i t + b of them, with b = 1 - 1 / (2k - 2) for k sources: no rule can promise
    less. R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
    """
    if len(weights) == 1:
        return 0
    turn, slack = sum(counts) + 1, 1 / (2 * len(weights) - 2)
    owed = [weight * turn - count for weight, count in zip(weights, counts, strict=True)]
    ready = [number for number, part in enumerate(owed) if part >= slack - 1e-9]
    return min(ready, key=lambda number: (1 - slack - owed[number]) / weights[number])


class PromptMixture:
    """Prompts without end, drawn from streams in proportion to their weights.

    Every source goes through its own epochs in its own order. Which source is next follows from the numbers drawn so far, so a resumed
    mixture goes on as if it had never stopped. Weights may change then: the new proportions hold from there on.
    """

    def __init__(self, streams: Sequence[PromptStream], weights: Sequence[float]) -> None:
        self.streams = tuple(streams)
        self._weights = [weight / sum(weights) for weight in weights]
        self._mixed = [0] * len(self.streams)
        """Prompts drawn of each source since these weights hold."""
        self._draws = 0
        self._left_out = 0

    def draw(self, n: int) -> Batch:
        """The next n prompts: columns draw, sample (0), source, prompt, prompt_ids, answer, task."""
        looks = []
        for _ in range(n):
            number = next_source(self._weights, self._mixed)
            looks.append(self.streams[number].take())
            self._mixed[number] += 1
        draws = list(range(self._draws, self._draws + n))
        self._draws += n
        return prompt_batch(looks, draws)

    # -- counts ---------------------------------------------------------------------------------------------------------------

    @property
    def reports(self) -> list[PromptReport]:
        """What became of the problems of each source."""
        return [stream.report for stream in self.streams]

    @property
    def report(self) -> PromptReport:
        """The reports of all sources in one."""
        merged = PromptReport.merged(self.reports)
        merged.answers_too_long += self._left_out
        return merged

    def removed(self) -> dict[str, int]:
        """Removed problems by reason, and with several sources by `reason/source` too."""
        counts: Counter[str] = Counter()
        for stream in self.streams:
            for reason, count in stream.report.removed.items():
                counts[reason] += count
                if len(self.streams) > 1:
                    counts[f"{reason}/{metric_part(stream.source.name)}"] += count
        return dict(counts)

    def leave_out(self, count: int) -> None:
        """Count draws that supervised batches leave out because of long answers."""
        self._left_out += count

    def summary(self) -> dict[str, dict[str, int]]:
        """As of `ProblemSource`, over all sources."""
        return merged_summary([stream.source.summary() for stream in self.streams])

    @property
    def told_apart(self) -> bool:
        """Whether metrics are kept by source: there are several, and not so many that nobody could read them."""
        return 1 < len(self.summary()) <= MOST_TOLD_APART

    def describe(self) -> str:
        """Where the streams stand, for people."""
        return "; ".join(stream.describe() for stream in self.streams)

    # -- state ----------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Where the mixture stands, for JSON."""
        return {
            "draws": self._draws,
            "left_out": self._left_out,
            "weights": list(self._weights),
            "mixed": list(self._mixed),
            "names": [stream.source.name for stream in self.streams],
            "streams": [stream.state() for stream in self.streams],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises ConfigError when the sources, the seed or shuffling are not the same."""
        names = [stream.source.name for stream in self.streams]
        if state["names"] != names:
            raise ConfigError.one(
                "data.train",
                "must name the same sources as before, in the same order, so that each goes on where it was",
                f"{', '.join(names)}; saved {', '.join(state['names'])}",
                "Only their weights may change in a resumed run; start a new run for other sources",
            )
        for stream, saved in zip(self.streams, state["streams"], strict=True):
            stream.load_state(saved)
        self._draws, self._left_out = int(state["draws"]), int(state["left_out"])
        same = state["weights"] == self._weights
        self._mixed = [int(count) for count in state["mixed"]] if same else [0] * len(self.streams)


def merged_summary(summaries: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Several `ProblemSource.summary` in one."""
    merged: dict[str, Counter[str]] = {}
    for summary in summaries:
        for source, counts in summary.items():
            merged.setdefault(source, Counter()).update(counts)
    return {source: dict(counts) for source, counts in merged.items()}


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` cut in proportion to the weights, each part at least 1; the largest remainders are rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    for number in sorted(range(len(parts)), key=lambda number: parts[number] - exact[number])[: total - sum(parts)]:
        parts[number] += 1
    return [max(1, part) for part in parts]
