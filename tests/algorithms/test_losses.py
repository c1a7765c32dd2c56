import math

import pytest
import torch

from rolemesh.algorithms.losses import clipped_surrogate, clipped_value_loss


def surrogate(ratios: list[float], advantages: list[float], **options):
    logprobs = torch.tensor([math.log(r) - 1.0 for r in ratios], dtype=torch.float64, requires_grad=True)
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    advantages_T = torch.tensor(advantages, dtype=torch.float64)
    return logprobs, clipped_surrogate(logprobs, old, advantages_T, **{"clip_low": 0.2, "clip_high": 0.2, **options})


def test_loss_gradient_and_clipped_sides_by_hand():
    # -min(r A, clip(r, 0.8, 1.2) A). The gradient with respect to log pi is -r A where the unclipped branch is the smaller, else 0.
    #  r    A   r A   clip A   loss   gradient
    # 1.5   2   3.0   2.4     -2.4    0       clipped high
    # 0.5   2   1.0   1.6     -1.0   -1.0
    # 1.5  -2  -3.0  -2.4      3.0    3.0
    # 0.5  -2  -1.0  -1.6      1.6    0       clipped low
    # 1.1   2   2.2   2.2     -2.2   -2.2
    logprobs, found = surrogate([1.5, 0.5, 1.5, 0.5, 1.1], [2, 2, -2, -2, 2])
    found.loss.sum().backward()
    assert found.loss.tolist() == pytest.approx([-2.4, -1.0, 3.0, 1.6, -2.2])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, -1.0, 3.0, 0, -2.2])
    assert found.clipped_high.tolist() == [True, False, False, False, False]
    assert found.clipped_low.tolist() == [False, False, False, True, False]
    assert not found.clipped_dual.any()
    assert found.ratio.tolist() == pytest.approx([1.5, 0.5, 1.5, 0.5, 1.1])
    assert not found.ratio.requires_grad


def test_the_two_sides_of_the_clip_are_set_apart():
    # Upper clip 1.28: r 1.25 passes, 1.3 is cut to 1.28. Lower clip 0.8 unchanged: r 0.75 with A < 0 is cut to 0.8.
    _, found = surrogate([1.25, 1.3, 0.75], [1, 1, -1], clip_high=0.28)
    assert found.loss.tolist() == pytest.approx([-1.25, -1.28, 0.8])
    assert found.clipped_high.tolist() == [False, True, False]
    assert found.clipped_low.tolist() == [False, False, True]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    # c 3: r 5, A -2 gives 10 without, 3 * 2 = 6 with the bound and no gradient; r 2 stays 4; a positive advantage is untouched.
    logprobs, found = surrogate([5, 2, 5], [-2, -2, 2], dual_clip=3.0)
    found.loss.sum().backward()
    assert found.loss.tolist() == pytest.approx([6, 4, -2.4])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, 4, 0])
    assert found.clipped_dual.tolist() == [True, False, False]


def test_first_step_gradient_is_that_of_the_policy_gradient():
    # At ratio 1 the surrogate's gradient is -A, that of REINFORCE.
    logprobs, found = surrogate([1, 1, 1], [0.3, -0.7, 0])
    found.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.3, 0.7, 0])


def test_extreme_ratio_keeps_the_gradient_finite():
    # exp(1000) is inf; the clip drops it for A > 0, and inf * 0 would be nan in the gradient.
    logprobs = torch.tensor([1000.0], requires_grad=True)
    found = clipped_surrogate(logprobs, torch.tensor([0.0]), torch.tensor([1.0]), clip_low=0.2, clip_high=0.2)
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(-1.2)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0


def value_loss(values: list[float], old: list[float], returns: list[float], clip: float | None = 0.2):
    values_T = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    old_T, returns_T = torch.tensor(old, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)
    found = clipped_value_loss(values_T, old_T, returns_T, clip=clip)
    found.loss.sum().backward()
    assert values_T.grad is not None
    return found, values_T.grad.tolist()


def test_value_loss_and_its_gradient_by_hand():
    # V_old 1, clip 0.2. max((V - R)^2, (V_clip - R)^2) / 2; gradient V - R where the unclipped error is the larger, else 0.
    #  V    R   V_clip  (V-R)^2  (V_clip-R)^2  loss   gradient
    # 1.5   2   1.2      0.25     0.64         0.32    0        moved towards the return, beyond the clip: held
    # 1.5   1   1.2      0.25     0.04         0.125   0.5      moved away from it: pulled back
    # 1.1   2   1.1      0.81     0.81         0.405  -0.9      within the clip
    # 0.5   0   0.8      0.25     0.64         0.32    0
    found, gradient = value_loss([1.5, 1.5, 1.1, 0.5], [1.0] * 4, [2.0, 1.0, 2.0, 0.0])
    assert found.loss.tolist() == pytest.approx([0.32, 0.125, 0.405, 0.32])
    assert gradient == pytest.approx([0, 0.5, -0.9, 0])
    assert found.clipped.tolist() == [True, True, False, True]


def test_value_loss_without_a_clip_is_half_the_squared_error():
    found, gradient = value_loss([1.5, 0.0], [1.0, 1.0], [2.0, 3.0], clip=None)
    assert found.loss.tolist() == pytest.approx([0.125, 4.5])
    assert gradient == pytest.approx([-0.5, -3.0])
    assert not found.clipped.any()


@pytest.mark.parametrize("moved", [5.0, -5.0])
def test_D22_clip_share_looks_at_the_value_before_clipping(moved: float):
    found, _ = value_loss([1.0 + moved, moved], [1.0, 0.0], [0.0, 0.0])
    assert found.clipped.float().mean().item() == 1.0
