"""The stream of training prompts: filtered, shuffled, resumable, every draw numbered. Called by `data.mixture`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rolemesh.batch import Batch
from rolemesh.config.schema import DataConfig
from rolemesh.data.filters import OVERLONG, Look, PromptFilter, PromptReport, Tokenizer, Tools, prompt_batch
from rolemesh.data.sources import ProblemSource
from rolemesh.errors import ConfigError

CHECKED_UP_FRONT: Final = 128
"""Problems of a generated task that are made and checked before the run starts."""


class PromptStream:
    """Prompts of one source without end, in epochs.

    Files are checked and filtered as a whole when the stream is made, and `report` is final. Of generated tasks the first
    `CHECKED_UP_FRONT` problems are checked; the others as they are drawn, and `report` grows. Each problem is counted once, in the
    first epoch. Whoever makes a stream prints its report.

    An epoch's order depends on (seed, epoch) alone; `draw` numbers count the prompts handed out and never repeat. `state` and
    `load_state` continue with the same numbers and prompts, also over the end of an epoch. Settings that filter (length limit,
    template, held-out prompts) may differ after a resume: the stream goes on from its place in the order.

    Raises ConfigError when no problem is left (with counts by reason), and for overlong prompts under `overlong: error`.
    """

    def __init__(
        self,
        config: DataConfig,
        source: ProblemSource,
        tokenizer: Tokenizer,
        seed: int,
        exclude: Collection[str] = frozenset(),
        *,
        subject: str = "data.train",
        tools: Tools = (),
    ) -> None:
        self.source = source
        self.report = PromptReport(source=f"{subject} {source.name}", problems=len(source))
        self._config, self._seed, self._subject = config, seed, subject
        self._filter = PromptFilter(config, tokenizer, exclude=exclude, tools=tools)
        self._epoch, self._position, self._draws = 0, 0, 0
        self._order = self._epoch_order()
        self._usable: NDArray[np.bool_] | None = None
        self._counted = min(CHECKED_UP_FRONT, len(source)) if source.generated else len(source)
        self._check_up_front()

    def draw(self, n: int) -> Batch:
        """The next n prompts: columns draw, sample (0), source, prompt, prompt_ids, answer, task."""
        draws = list(range(self._draws, self._draws + n))
        return prompt_batch([self.take() for _ in range(n)], draws)

    def take(self) -> Look:
        """The next prompt alone, for a mixture, which numbers its draws itself."""
        look = self._next()
        self._draws += 1
        return look

    def leave_out(self, count: int) -> None:
        """Count draws that supervised batches leave out because of long answers."""
        self.report.answers_too_long += count

    def describe(self) -> str:
        """Where the stream stands, for people."""
        return f"{self.source.name}: {self._draws} prompts drawn, epoch {self._epoch + 1}, problem {self._position} of {len(self.source)}"

    def state(self) -> dict[str, Any]:
        """Where the stream stands, for JSON."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "draws": self._draws,
            "seed": self._seed,
            "shuffle": self._config.shuffle,
            "fingerprint": self.source.fingerprint(),
            "counted": self._counted,
            "kept": self.report.kept,
            "cut": self.report.cut,
            "removed": dict(self.report.removed),
            "answers_too_long": self.report.answers_too_long,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises ConfigError when the source, the seed or shuffling is not the same."""
        self._refuse_other(state)
        self._epoch, self._position, self._draws = int(state["epoch"]), int(state["position"]), int(state["draws"])
        self._order = self._epoch_order()
        self.report.answers_too_long = int(state["answers_too_long"])
        if self.source.generated:
            self._counted = int(state["counted"])
            self.report.kept, self.report.cut = int(state["kept"]), int(state["cut"])
            self.report.removed = Counter(state["removed"])

    def _refuse_other(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] != self.source.fingerprint():
            raise ConfigError.one(
                self._subject,
                "must give the same problems as before, so that the run goes on in the same order",
                f"another content of {self.source.name} (fingerprint {self.source.fingerprint()[:12]}, saved {state['fingerprint'][:12]})",
                "Use the file, task options, data.size and seed that the run was started with, or start a new run",
            )
        for name, saved, now in (
            ("seed", state["seed"], self._seed),
            ("data.shuffle", state["shuffle"], self._config.shuffle),
        ):
            if saved != now:
                raise ConfigError.one(name, "cannot change in a resumed run, it decides the order of prompts", f"{now}, saved {saved}")

    def _epoch_order(self) -> NDArray[np.int64]:
        """Indices of the source in the order of this epoch, [N]."""
        size = len(self.source)
        if not self._config.shuffle:
            return np.arange(size)
        return np.random.default_rng((self._seed, self._epoch)).permutation(size)

    def _next(self) -> Look:
        for _ in range(2 * len(self.source)):
            look = self._look_at_next()
            if look is not None and look.reason is None:
                return look
        raise self._nothing_left()

    def _look_at_next(self) -> Look | None:
        """Advance by one problem; None for one that the check up front removed."""
        if self._position == len(self.source):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        place, index = self._position, int(self._order[self._position])
        self._position += 1
        if self._usable is not None and not self._usable[index]:
            return None
        look = self._filter.look(self.source.problem(index))
        if place >= self._counted:  # so in the first epoch only
            self._counted = place + 1
            look.count(self.report)
        self._refuse_overlong(look.length if look.reason == OVERLONG else 0)
        return look

    def _check_up_front(self) -> None:
        usable = np.zeros(len(self.source), dtype=np.bool_)
        longest = 0
        for index in self._order[: self._counted]:
            look = self._filter.look(self.source.problem(int(index)))
            look.count(self.report)
            usable[index] = look.reason is None
            longest = max(longest, look.length if look.reason == OVERLONG else 0)
        self._refuse_overlong(longest)
        if not self.report.kept:
            raise self._nothing_left()
        if not self.source.generated:
            self._usable = usable

    def _refuse_overlong(self, longest: int) -> None:
        """Raise when prompts too long were found (`longest` > 0) and none may be."""
        if longest and self._config.overlong == "error":
            count = max(1, self.report.removed[OVERLONG])  # a resumed run may have a lower limit
            raise self._filter.overlong_error(self._subject, count=count, checked=self.report.checked, longest=longest)

    def _nothing_left(self) -> ConfigError:
        return ConfigError.one(
            self._subject,
            "at least one prompt must be left",
            str(self.report),
            "Change the limits of the data section, or the held-out set",
        )
