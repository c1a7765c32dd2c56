import math

import numpy as np
import pytest
import torch

from rolemesh.algorithms.kl import adapted_coefficient, kl_estimate, reference_columns
from rolemesh.batch import Batch
from rolemesh.errors import BatchError

KINDS = ("k1", "k2", "k3")


def test_estimates_and_their_gradients_by_hand():
    # d = log p - log q = 0.5, -0.5, 0. k1 = d, gradient 1. k2 = d^2 / 2 = 0.125, gradient d.
    # k3 = exp(-d) - 1 + d = 0.606531 - 0.5, 1.648721 - 1.5, 0; gradient 1 - exp(-d) = 0.393469, -0.648721, 0.
    expected = {
        "k1": ([0.5, -0.5, 0], [1, 1, 1]),
        "k2": ([0.125, 0.125, 0], [0.5, -0.5, 0]),
        "k3": ([0.106531, 0.148721, 0], [0.393469, -0.648721, 0]),
    }
    for kind, (estimates, gradients) in expected.items():
        logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
        found = kl_estimate(kind, logprobs, torch.tensor([-1.5, -1.5, -3.0], dtype=torch.float64))
        found.sum().backward()
        assert found.tolist() == pytest.approx(estimates, abs=1e-6)
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == pytest.approx(gradients, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divergence_from_oneself_is_exactly_zero(kind: str, dtype: torch.dtype):
    logprobs = -torch.rand(1000, dtype=dtype) * 30
    assert (kl_estimate(kind, logprobs, logprobs.clone()) == 0).all()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: str):
    # KL between p = (0.7, 0.3) and q = (0.5, 0.5) is 0.7 ln 1.4 + 0.3 ln 0.6 = 0.082282.
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    assert (p * kl_estimate(kind, p.log(), q.log())).sum().item() == pytest.approx(0.082282, abs=1e-6)


def gradient(loss: torch.Tensor, logits: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss, logits)[0].tolist()


def test_mean_gradient_of_each_estimate_over_samples():
    # Over tokens sampled from p (weights p, held fixed as samples are), the gradient of k1 is 0, that of k2 the gradient of KL(p || q).
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([-0.1, 0.4, 0.2], dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.exp()
    exact = gradient((p * (log_p - log_q)).sum(), logits)
    mean = {kind: gradient((p.detach() * kl_estimate(kind, logits.log_softmax(0), log_q)).sum(), logits) for kind in ("k1", "k2")}
    log_p = logits.log_softmax(0)
    assert gradient((log_p.exp() * (log_p - log_q)).sum(), logits) == pytest.approx(exact)
    assert mean["k1"] == pytest.approx([0, 0, 0], abs=1e-15)
    assert mean["k2"] == pytest.approx(exact, abs=1e-15)


def test_k3_of_rounding_noise_is_half_its_square_and_never_negative():
    # exp(x) - 1 - x = x^2 / 2 near 0, here 5e-9; in float32 it must not round below 0.
    noise = torch.tensor([1e-4, -1e-4, 1e-7, -1e-7])
    found = kl_estimate("k3", torch.zeros(4), noise)
    assert (found >= 0).all()
    assert found[:2].tolist() == pytest.approx([5e-9, 5e-9], rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_token_that_the_reference_forbids_keeps_everything_finite(kind: str):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    found = kl_estimate(kind, logprobs, torch.tensor([-math.inf]))
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_unknown_estimate_is_refused():
    with pytest.raises(ValueError, match="unknown estimate 'k4'"):
        kl_estimate("k4", torch.zeros(1), torch.zeros(1))


def scored_rows(**columns: list) -> Batch:
    ids = {"draw": [3, 3], "sample": [0, 1]}
    return Batch.from_columns(ids | {"rollout_logprobs": [[-1.0, -2.0, -4.0], [-0.5]]} | columns)


def test_reference_columns_by_hand():
    # k1: row 0: -1 + 1.5 = 0.5, -2 + 1 = -1, -4 + 5 = 1, mean 1 / 6; row 1: -0.5 + 0.25 = -0.25.
    found = reference_columns(scored_rows(), [np.float32([-1.5, -1.0, -5.0]), np.float32([-0.25])], "k1")
    assert found.names == ("draw", "sample", "ref_logprobs", "kl")
    assert found.rows("ref_logprobs") == [[-1.5, -1.0, -5.0], [-0.25]]
    assert found.scalars("kl") == pytest.approx([1 / 6, -0.25])


def test_D21_divergence_of_a_row_leaves_out_tool_tokens():
    # Token 1 is a tool's: mean of 0.5 and 1. The second row has tool tokens only: 0.
    masked = scored_rows(response_mask=[[1, 0, 1], [0]])
    found = reference_columns(masked, [np.float32([-1.5, math.nan, -5.0]), np.float32([-0.25])], "k1")
    assert found.scalars("kl").tolist() == [0.75, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_of_a_row_from_an_identical_reference_is_exactly_zero(kind: str):
    rows = scored_rows()
    own = [np.float32(row) for row in rows.rows("rollout_logprobs")]
    assert reference_columns(rows, own, kind).scalars("kl").tolist() == [0, 0]


def test_D03_logprob_that_is_no_number_is_refused_by_the_id_of_its_row():
    with pytest.raises(BatchError, match=r"ref_logprobs of row \(draw 3, sample 1\) holds nan"):
        reference_columns(scored_rows(), [np.float32([-1.5, -1.0, -5.0]), np.float32([math.nan])], "k3")


def test_logprobs_that_do_not_fit_the_tokens_are_refused():
    with pytest.raises(BatchError, match=r"row \(draw 3, sample 1\) has 1 rollout_logprobs for 2 ref_logprobs"):
        reference_columns(scored_rows(), [np.float32([-1.5, -1.0, -5.0]), np.float32([-1, -1])], "k3")


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * 1.01),  # 10 % above: a tenth of it
        (0.09, 0.5 * 0.99),
        (1.0, 0.5 * 1.02),  # errors beyond 20 % count as 20 %
        (0.0, 0.5 * 0.98),
        (-0.3, 0.5 * 0.98),
    ],
)
def test_adaptive_coefficient_by_hand(measured: float, expected: float):
    assert adapted_coefficient(0.5, measured, 0.1) == pytest.approx(expected, rel=1e-12)
