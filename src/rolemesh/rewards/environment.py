"""The reward `environment`: what the environment gave for the episode."""

from __future__ import annotations

from rolemesh.protocols.reward import Sample


def environment(sample: Sample) -> float | None:
    """The sum of the rewards of the episode's turns; abstains where the environment gave none."""
    return sample.environment_reward
