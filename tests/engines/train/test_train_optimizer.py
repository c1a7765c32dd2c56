import math

import pytest

from rolemesh.config.schema import SftConfig, TrainerConfig
from rolemesh.engines.train import OptimizerSettings


def test_constant_after_linear_warm_up():
    # Peak 1, warm-up 4: 1/4, 2/4, 3/4, 4/4, then 1.
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=4)
    assert [settings.learning_rate_at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_zero_at_schedule_steps():
    # Peak 2, warm-up 2, end 6: 1, 2, then 2 * (1 - (s - 2) / 4) for s = 2..6: 2, 1.5, 1, 0.5, 0, and 0 for good.
    settings = OptimizerSettings(learning_rate=2.0, warmup_steps=2, schedule="linear", schedule_steps=6)
    assert [settings.learning_rate_at(step) for step in range(8)] == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]


def test_cosine_by_hand():
    # No warm-up, end 4: 0.5 (1 + cos(pi s / 4)) = 1, 0.853553, 0.5, 0.146447, 0.
    settings = OptimizerSettings(learning_rate=1.0, schedule="cosine", schedule_steps=4)
    expected = [1, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2, 0, 0]
    assert [settings.learning_rate_at(step) for step in range(6)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("steps", [None, 2, 3])
def test_schedule_without_an_end_after_the_warm_up_is_refused(steps):
    with pytest.raises(ValueError, match=f"above warmup_steps = 3, found {steps}"):
        OptimizerSettings(learning_rate=1.0, warmup_steps=3, schedule="linear", schedule_steps=steps)


def test_settings_come_from_the_config():
    trainer = TrainerConfig(learning_rate=2e-5, warmup_steps=3, schedule="cosine", schedule_steps=9, weight_decay=0.1, betas=(0.8, 0.9))
    assert OptimizerSettings.of_trainer(trainer) == OptimizerSettings(
        learning_rate=2e-5, warmup_steps=3, schedule="cosine", schedule_steps=9, weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=1.0
    )
    assert OptimizerSettings.of_sft(SftConfig(learning_rate=1e-3, warmup_steps=5), trainer) == OptimizerSettings(
        learning_rate=1e-3, warmup_steps=5, schedule="linear", schedule_steps=100, weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=1.0
    )
