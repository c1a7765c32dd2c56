"""The environment `reasoning_gym`: several attempts at a problem of reasoning-gym, judged by the task's own scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rolemesh.environments.threads import in_thread
from rolemesh.protocols.environment import Message, Start, Step, Turn
from rolemesh.protocols.reward import Sample
from rolemesh.rewards.reasoning import reasoning_gym


@dataclass(kw_only=True)
class ReasoningGymEnvironment:
    """After a wrong attempt the model reads `feedback` and may try again, `attempts` times in all.

    The reward is the score of the last attempt times `discount` for each attempt before it. `threshold` is the score from which an
    attempt is right; `tag` is that of the reward of this name. Needs rows of `reasoning_gym:TASK`."""

    attempts: int = 2
    feedback: str = "That is not right. Try again."
    discount: float = 0.9
    threshold: float = 1.0
    tag: str | None = None
    _start: Start = field(init=False)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")

    async def reset(self, start: Start) -> Sequence[Message]:
        self._start = start
        return ()

    async def step(self, turn: Turn) -> Step:
        start = self._start
        sample = Sample(
            draw=start.draw, sample=start.sample, source=start.source, prompt=start.prompt, response=turn.text,
            answer=start.answer, task=start.task, finish_reason="stop",
        )  # fmt: skip
        score = await in_thread(lambda: reasoning_gym(sample, tag=self.tag))
        if score >= self.threshold or turn.number >= self.attempts:
            return Step(reward=score * self.discount ** (turn.number - 1), done=True, counts={"attempts": turn.number})
        return Step(messages=[Message(content=self.feedback, role="user")])

    async def close(self) -> None:
        """Nothing to give back."""
