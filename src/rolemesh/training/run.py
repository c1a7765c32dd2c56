"""`TrainingRun`: everything a phase needs in one place, and the few numbers that a run consists of between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rolemesh.algorithms import create_algorithm
from rolemesh.batch import Batch, BatchRef
from rolemesh.config.schema import Config
from rolemesh.data import EvalSet, PromptMixture
from rolemesh.names import CRITIC
from rolemesh.observe import RunDirectory
from rolemesh.protocols.algorithm import Algorithm, StepTerms
from rolemesh.training.recorder import Recorder
from rolemesh.training.session import Session


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands. Part of every checkpoint; with the data cursor and the actor's state it determines all that follows."""

    step: int = 0
    """Steps done."""
    warm_started: bool = False
    """The warm start by the `sft` section is behind."""
    weight_version: int = 0
    """Version of the actor's weights: 0 before the first update, then one more for each."""
    kl_coefficient: float | None = None
    """Coefficient of the divergence from the reference once it has been adapted; before that the algorithm's own holds."""
    first_accuracy: float | None = None
    """Held-out accuracy before the first step."""
    last_accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step that is ready for its updates."""

    batch: BatchRef
    """All columns that were written for it."""
    numbers: Batch
    """The columns of the algorithm that the controller has read and made itself: one number for each row."""
    terms: StepTerms


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """One run under way."""

    config: Config
    directory: RunDirectory
    session: Session
    recorder: Recorder
    algorithm: Algorithm
    prompts: PromptMixture
    sft_prompts: PromptMixture | None
    eval_set: EvalSet
    progress: Progress = field(default_factory=Progress)
    trains: bool = True
    """It goes through steps: neither fine-tunes only nor serves only."""
    wished: Config | None = None
    """What the config becomes with the next step; see `settings.py`."""
    interrupted: bool = False
    """Set by a signal; the loop then ends after the step under way."""
    nonfinite_steps: int = 0
    """Steps in a row, up to now, whose gradient was not finite."""
    unscored_steps: int = 0
    """Steps in a row, up to now, in which no answer has a reward."""
    serving: str = ""
    """Where it answers requests from outside."""
    warned: dict[str, int] = field(default_factory=dict)
    """Step of the last warning of each kind."""
    saving: asyncio.Future[None] | None = None
    """The save that goes on beside the steps; see `saving.py`."""
    save_failure: str | None = None
    """Why the last save has failed."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """Where the prompts stood before the step under way: what a step that is given up goes back to."""

    @property
    def kl_coefficient(self) -> float:
        """Coefficient of the step under way."""
        adapted = self.progress.kl_coefficient
        return self.algorithm.kl_coefficient if adapted is None else adapted

    @property
    def critic_warms_up(self) -> bool:
        """The step under way trains the critic alone."""
        return CRITIC in self.session.groups and self.progress.step < self.config.algorithm.critic_warmup

    def steps(self) -> Iterator[int]:
        """Numbers of the steps still to do, from 1; each is timed and counted as done when the loop comes back for the next."""
        while True:
            self._take_up_wishes()
            step = self.progress.step + 1
            if self.interrupted or step > self.config.trainer.steps:
                return
            self.cursor = self.prompts.state()
            self.recorder.begin_step(step)
            yield step

    def _take_up_wishes(self) -> None:
        if self.wished is None:
            return
        before, self.config, self.wished = self.config.algorithm, self.wished, None
        self.recorder.display.extend(self.config.trainer.steps)
        if self.config.algorithm != before:
            self.algorithm = create_algorithm(self.config)
            self.progress.kl_coefficient = None  # what was adapted belongs to the settings before

    def is_due(self, every: int, step: int) -> bool:
        """True every so many steps, and after the last one."""
        return step == self.config.trainer.steps or (every > 0 and step % every == 0)
