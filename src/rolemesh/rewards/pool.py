"""`ScoringPool` scores samples in a few processes, each sample with a deadline that really ends its work. Called by the reward role.

    ScoringPool (in the reward worker)
      |  starts, commands               works and answers, a stream for each
      +-- nursery  --forks-->  scoring processes  <------------------------+

A sample that exceeds its deadline or memory costs its process: the whole process group is killed, a new one is forked, and the sample
gets a fault. So does a sample whose process crashes. What else the process held is given out again: nothing is lost, nothing is answered
twice. A synchronous function gets samples one after another, so the one under way is known. Of an asynchronous one many are under way;
when their process has to go and the guilty one is not known, each of them is tried again alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rolemesh.config.schema import RewardConfig
from rolemesh.errors import ConfigError, Problem
from rolemesh.rewards.child import Child
from rolemesh.rewards.crew import Crew, Ended
from rolemesh.rewards.functions import function_specs, timeout_fault
from rolemesh.rewards.system import resident_bytes
from rolemesh.rewards.work import Answer, Fault, Usage, Work, dump_sample, load_answer

ASYNC_LIMIT: Final = 64
"""Samples of an asynchronous function that one process has under way."""
GRACE_SECONDS: Final = 1.0
"""An asynchronous function is cancelled at its deadline; its process is killed this much later if that does not help."""
QUEUE_SECONDS: Final = 0.04
QUEUE_LIMIT: Final = 8
"""A process is given quick samples ahead, for so long and so many, to spare it waiting for the next one. More would save little, and a
sample that loops may have to wait behind another one."""
LOOK_SECONDS: Final = 0.02
"""How often memory is looked at."""
PATIENCE_SECONDS: Final = 1.0
NEW_SHARE: Final = 0.2
"""Weight of the newest sample in the running mean of seconds."""
MIB: Final = 2**20


class _Call:
    """The works of one call: those to be given out, and the answers so far."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        self.answers: list[Answer | None] = [None] * len(works)
        self.open = len(works)
        self.pending = deque(sorted(range(len(works)), key=lambda number: works[number].part))
        self.suspects: deque[int] = deque()
        """To be tried again alone."""

    def answer(self, number: int, answer: Answer) -> None:
        self.answers[number] = answer
        self.open -= 1


class ScoringPool:
    """An `Executor` of `processes` scoring processes. Serves one call at a time; others wait their turn.

    Raises ConfigError when a function cannot be found or `memory_mb` is hardly more than importing them takes, ScoringPoolError when
    importing fails otherwise.
    """

    def __init__(self, configs: Sequence[RewardConfig], *, processes: int) -> None:
        self._lock = threading.Lock()
        self._deadlines = [config.deadline for config in configs]
        self._memory_mb = [config.memory_mb for config in configs]
        self._usual: dict[int, float] = {}
        """Running mean of the seconds that a sample takes, by part."""
        self._next_look = 0.0
        self._usage = Usage(samples=[0] * processes)
        self._crew = Crew(function_specs(configs), processes)
        try:
            self._check_memory()
            self._restore(_Call(()))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the scoring processes that are ready."""
        return [child.pid for child in self._crew.children if child.ready]

    def run(self, works: Sequence[Work]) -> list[Answer]:
        """One answer for each work, in their order. Afterwards the pool is complete again.

        Raises ScoringPoolError when processes cannot be started any more, or the pool was closed.
        """
        call = _Call(works)
        with self._lock:
            self._crew.forgive()
            try:
                self._hear(call, 0.0)  # of those that ended since the last call, before they are given anything
                while call.open:
                    self._give_out(call)
                    self._turn(call)
                self._restore(call)
            except BaseException:
                self._abandon()
                raise
        return [answer for answer in call.answers if answer is not None]

    def take_usage(self) -> Usage:
        usage, self._usage = self._usage, Usage(samples=[0] * self._crew.size)
        return usage

    def close(self) -> None:
        """End the nursery, every scoring process and what they started. Idempotent."""
        self._crew.close()

    def _restore(self, call: _Call) -> None:
        while not self._crew.is_complete:
            self._turn(call)

    def _abandon(self) -> None:
        """A call ended early: what is under way must not answer the next call."""
        for child in self._crew.children:
            if child.held:
                child.held.clear()
                self._crew.kill(child)

    def _check_memory(self) -> None:
        imported = self._crew.link.held / MIB
        problems = [
            Problem(
                subject=f"reward.{part}.memory_mb",
                need=f"must be well above the {imported:.0f} MB that a process holds once it has imported the functions",
                free=f"{limit} MB",
                remedy=f"Set reward.{part}.memory_mb={2 * imported:.0f} or more",
            )
            for part, limit in enumerate(self._memory_mb)
            if limit is not None and limit < 1.2 * imported
        ]
        if problems:
            raise ConfigError(problems=problems)

    # -- giving out -----------------------------------------------------------------------------------------------------------

    def _give_out(self, call: _Call) -> None:
        """Give every process what it may have, one sample each in turn, so that all get their share."""
        now = time.monotonic()
        takers = {child.number: child for child in self._crew.children if child.ready and not child.alone}
        given = dict(takers)
        while takers and (call.suspects or call.pending):
            takers = {number: child for number, child in takers.items() if self._give(child, call, now)}
        for child in given.values():
            if child.held:
                self._crew.flush(child)

    def _give(self, child: Child, call: _Call, now: float) -> bool:
        if call.suspects:
            if child.held:
                return False  # it may try one alone when it is done
            child.alone = True
            self._send(child, call, call.suspects.popleft(), now)
            return False
        if not call.pending:
            return False
        part = call.works[call.pending[0]].part
        if child.held and (child.part != part or len(child.held) >= self._room(child, call)):
            return False
        self._send(child, call, call.pending.popleft(), now)
        return True

    def _room(self, child: Child, call: _Call) -> int:
        """How many samples a process may hold. Towards the end few, so that none waits behind a slow one while others are idle."""
        if child.several:
            return ASYNC_LIMIT
        fair = len(call.pending) // (2 * self._crew.size)
        usual = self._usual.get(child.part, QUEUE_SECONDS)
        return max(1, min(fair, QUEUE_LIMIT, 1 + int(QUEUE_SECONDS / max(usual, 1e-6))))

    def _send(self, child: Child, call: _Call, number: int, now: float) -> None:
        work = call.works[number]
        child.part, child.several = work.part, self._crew.link.asynchronous[work.part]
        child.send(number, {"id": number, "part": work.part, "sample": dump_sample(work.sample)}, now)

    # -- taking in ------------------------------------------------------------------------------------------------------------

    def _turn(self, call: _Call) -> None:
        """Wait for something to happen, take note of it, and enforce what has come due."""
        began = time.monotonic()
        self._hear(call, self._patience(began))
        self._enforce(began)  # what was answered before `began` has been read

    def _hear(self, call: _Call, seconds: float) -> None:
        for child, news in self._crew.wait(seconds):
            if isinstance(news, Ended):
                self._settle(child, news, call)
            else:
                self._take(child, news, call)

    def _patience(self, now: float) -> float:
        due = [PATIENCE_SECONDS]
        for child in self._crew.children:
            if child.held and not child.killed:
                due.append(child.oldest()[1] + self._limit(child) - now)
                if self._memory_mb[child.part] is not None:
                    due.append(self._next_look - now)
        return max(0.0, min(due))

    def _take(self, child: Child, message: Mapping[str, Any], call: _Call) -> None:
        number = message["id"]
        if not child.done(number, time.monotonic()):
            return  # of a call that ended early
        answer = load_answer(message)
        self._usual[child.part] = (1 - NEW_SHARE) * self._usual.get(child.part, answer.seconds) + NEW_SHARE * answer.seconds
        self._answer(child, number, answer, call)
        timed_out = answer.fault is not None and answer.fault.timed_out
        child.retiring = child.retiring or timed_out or self._has_grown(child, message["held"])
        if child.retiring and not child.held:
            self._crew.kill(child)

    def _answer(self, child: Child, number: int, answer: Answer, call: _Call) -> None:
        self._usage.count(child.place, answer.seconds)
        call.answer(number, answer)

    def _has_grown(self, child: Child, held_bytes: int) -> bool:
        """Since its first answer it has used up half of the memory that was left: a slow leak must not be laid to a later sample."""
        child.first_bytes = child.first_bytes or held_bytes
        limit = self._memory_mb[child.part]
        return limit is not None and held_bytes - child.first_bytes > (limit * MIB - child.first_bytes) / 2

    def _settle(self, child: Child, end: Ended, call: _Call) -> None:
        """A process is gone: who is to blame among the works that it held, and what becomes of the others?"""
        self._usage.replaced += 1
        rest, verdict = list(child.held), child.verdict
        if verdict is None and rest and end.by_itself:
            verdict = rest[0], Fault(type="ProcessEnded", message=f"the scoring process ended: {end.how}")
        if verdict is not None and child.several and len(rest) > 1:
            call.suspects.extend(rest)
            return
        if verdict is not None and verdict[0] in child.held:  # else it was answered in the last moment
            number, fault = verdict
            self._answer(child, number, Answer(fault=fault, seconds=time.monotonic() - child.held[number]), call)
            rest.remove(number)
        call.pending.extendleft(reversed(rest))  # these come next

    # -- limits ---------------------------------------------------------------------------------------------------------------

    def _limit(self, child: Child) -> float:
        return self._deadlines[child.part] + (GRACE_SECONDS if child.several else 0.0)

    def _enforce(self, now: float) -> None:
        look = now >= self._next_look
        if look:
            self._next_look = now + LOOK_SECONDS
        for child in self._crew.children:
            if not child.held or child.killed:
                continue
            if now > child.oldest()[1] + self._limit(child):
                self._condemn(child, timeout_fault(self._deadlines[child.part]))
            elif look and self._holds_too_much(child):
                if child.retiring:  # what leaked before is to blame as well: the sample under way gets a fresh process
                    self._crew.kill(child)
                    continue
                self._condemn(child, Fault(type="MemoryLimit", message=f"memory limit: more than memory_mb={self._memory_mb[child.part]}"))

    def _holds_too_much(self, child: Child) -> bool:
        limit = self._memory_mb[child.part]
        return limit is not None and resident_bytes(child.pid) > limit * MIB

    def _condemn(self, child: Child, fault: Fault) -> None:
        """The sample under way has broken a limit; of several it is not known which."""
        child.verdict = child.oldest()[0], fault
        self._crew.kill(child)
