"""Settings of the optimizer and the learning rate as a pure function of the optimizer step. Used by the train engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

import torch

from rolemesh.config.schema import AlgorithmConfig, SftConfig, TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule; the fields mean what the options of the same names in the `trainer` section mean."""

    learning_rate: float
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_steps: int | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.schedule != "constant" and (self.schedule_steps is None or self.schedule_steps <= self.warmup_steps):
            raise ValueError(
                f"schedule {self.schedule!r} needs schedule_steps above warmup_steps = {self.warmup_steps}, found {self.schedule_steps}"
            )

    @classmethod
    def of_trainer(cls, config: TrainerConfig) -> Self:
        """Settings of reinforcement learning."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @classmethod
    def of_critic(cls, algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Self:
        """Settings of the critic: its own learning rate, the rest as in `trainer`."""
        return replace(cls.of_trainer(trainer), learning_rate=algorithm.critic_learning_rate)

    @classmethod
    def of_sft(cls, sft: SftConfig, trainer: TrainerConfig) -> Self:
        """Settings of supervised fine-tuning: its own learning rate, warm-up and schedule; the rest as in `trainer`."""
        return replace(
            cls.of_trainer(trainer),
            learning_rate=sft.learning_rate,
            warmup_steps=sft.warmup_steps,
            schedule=sft.schedule,
            schedule_steps=sft.steps if sft.schedule == "linear" else None,
        )

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0.

        The warm-up rises linearly and reaches the peak in its last step: (step + 1) / warmup_steps. Then `linear` and `cosine` fall
        from the peak at step `warmup_steps` to 0 at step `schedule_steps`, and stay there. Cosine: Loshchilov & Hutter 2017,
        arXiv:1608.03983, eq. 5.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule_steps is None or self.schedule == "constant":
            return self.learning_rate
        progress = min(1.0, (step - self.warmup_steps) / (self.schedule_steps - self.warmup_steps))
        return self.learning_rate * (1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
        """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over `parameters`."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay, fused=True)
