import math

import pytest
import torch

from rolemesh.algorithms.losses import clipped_surrogate, kl_k1, kl_k3


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


def test_kl_estimates_by_hand():
    # r = 2: k1 = -ln 2, k3 = 2 - 1 - ln 2 = 0.306853. r = 1/2: k1 = ln 2, k3 = -0.5 + ln 2 = 0.193147. r = 1: both 0.
    new, old = torch.tensor([2.0, 0.5, 1.0]).log(), torch.zeros(3)
    assert kl_k1(new, old).tolist() == pytest.approx([-0.693147, 0.693147, 0], abs=1e-6)
    assert kl_k3(new, old).tolist() == pytest.approx([0.306853, 0.193147, 0], abs=1e-6)


def test_k3_of_rounding_noise_is_half_its_square_and_never_negative():
    # exp(x) - 1 - x = x^2 / 2 near 0, here 5e-9; in float32 it must not round below 0.
    noise = torch.tensor([1e-4, -1e-4, 1e-7, -1e-7])
    found = kl_k3(noise, torch.zeros(4))
    assert (found >= 0).all()
    assert found[:2].tolist() == pytest.approx([5e-9, 5e-9], rel=0.01)


def test_k3_of_samples_estimates_the_divergence():
    # KL between p = (0.7, 0.3) and q = (0.5, 0.5) is 0.7 ln 1.4 + 0.3 ln 0.6 = 0.082282; the mean of k3 under p is exactly that.
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    assert (p * kl_k3(q.log(), p.log())).sum().item() == pytest.approx(0.082282, abs=1e-6)
