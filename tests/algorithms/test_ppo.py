import math
import pickle

import numpy as np
import pytest
import torch

from rolemesh.algorithms import Grpo, Ppo, create_actor_critic, create_algorithm
from rolemesh.batch import Batch
from rolemesh.config.schema import AlgorithmConfig, Config
from rolemesh.errors import BatchError, ConfigError
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import StepTerms, TokenBatch, ValueBatch


def ppo(minibatches: int = 1, **options) -> Ppo:
    return Ppo(AlgorithmConfig(**{"name": "ppo", "group_size": 1, **options}), minibatches=minibatches)


def valued(rewards: list[float], values: list[list[float]], draws: list[int] | None = None, **columns) -> Batch:
    """What `estimate` reads; nan is a missing reward."""
    ids = {"draw": draws or list(range(len(rewards))), "sample": [0] * len(rewards)}
    lengths = [sum(mask) for mask in columns["response_mask"]] if "response_mask" in columns else [len(row) for row in values]
    return Batch.from_columns(ids | {"reward": np.array(rewards), "response_length": lengths, "values": values} | columns)


def random_step(rows: int = 12, *, missing: int = 3) -> Batch:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 9, rows)
    rewards = random.normal(size=rows)
    rewards[missing] = math.nan
    flat = [[random.normal(size=n).tolist() for n in lengths] for _ in range(3)]
    return valued(rewards.tolist(), flat[0], rollout_logprobs=flat[1], ref_logprobs=flat[2])


def prepare(algorithm: Ppo, batch: Batch, coefficient: float = 0.0) -> tuple[Batch, StepTerms, dict[str, float]]:
    """The whole way on the controller: (prepared rows with everything, terms, metrics)."""
    metrics = Metrics()
    scored = batch.join(algorithm.estimate(batch, kl_coefficient=coefficient))
    prepared = algorithm.prepare(scored, metrics)
    terms = algorithm.terms(prepared, metrics, kl_coefficient=coefficient)
    return prepared, terms, metrics.reduce()


# -- estimate ---------------------------------------------------------------------------------------------------------------


def test_estimate_by_hand():
    # gamma = lam = 1: A_t = score - V_t. Row 0: 1 - (0.5, 0.25) = 0.5, 0.75; mean 0.625, squares 2 * 0.125^2 = 0.03125; returns 1, 1.
    # Row 1, without tokens, and row 2, without reward: 0.
    found = ppo().estimate(valued([1.0, 9.0, math.nan], [[0.5, 0.25], [], [4.0]]), kl_coefficient=0.0)
    assert found.names == ("draw", "sample", "advantages", "returns", "advantage", "advantage_spread", "return_mean", "return_spread")
    assert found.rows("advantages") == [[0.5, 0.75], [], [0]]
    assert found.rows("returns") == [[1, 1], [], [0]]
    assert found.scalars("advantage").tolist() == [0.625, 0, 0]
    assert found.scalars("advantage_spread").tolist() == [0.03125, 0, 0]
    assert found.scalars("return_mean").tolist() == [1, 0, 0]
    assert found.scalars("return_spread").tolist() == [0, 0, 0]


def test_D21_estimate_skips_tool_tokens():
    # The example of the GAE tests: sampled V 0.5, 1, 1.5, 1, score 2, lam 0.5 -> A 0.75, 0.5, 0, 1; mean 0.5625.
    batch = valued([2.0], [[0.5, 1.0, 9.0, 9.0, 1.5, 1.0]], response_mask=[[1, 1, 0, 0, 1, 1]])
    found = ppo(lam=0.5).estimate(batch, kl_coefficient=0.0)
    assert found.rows("advantages") == [[0.75, 0.5, 0, 0, 0, 1]]
    assert found.rows("returns") == [[1.25, 1.5, 0, 0, 1.5, 2]]
    assert found.scalars("advantage").tolist() == [0.5625]


@pytest.mark.parametrize(("kind", "kl"), [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5])])
def test_kl_in_the_reward_by_hand(kind: str, kl: list[float]):
    # V = 0, gamma = lam = 1: A_1 = 2 - 0.1 kl_1, A_0 = A_1 - 0.1 kl_0.
    batch = valued([2.0], [[0.0, 0.0]], rollout_logprobs=[[-1.0, -2.0]], ref_logprobs=[[-1.5, -1.0]])
    found = ppo(kl_coefficient=0.3, kl_in="reward", kl_kind=kind).estimate(batch, kl_coefficient=0.1)
    last = 2 - 0.1 * kl[1]
    assert found.rows("advantages")[0] == pytest.approx([last - 0.1 * kl[0], last], rel=1e-6)


def test_kl_in_the_loss_leaves_the_reward_alone():
    batch = valued([2.0], [[0.0, 0.0]], rollout_logprobs=[[-1.0, -2.0]], ref_logprobs=[[-1.5, -1.0]])
    assert ppo(kl_coefficient=0.3).estimate(batch, kl_coefficient=0.3).rows("advantages") == [[2, 2]]


def test_identical_reference_costs_exactly_nothing():
    batch = random_step()
    batch = batch.with_columns({"ref_logprobs": batch.rows("rollout_logprobs")})
    with_reference = ppo(kl_coefficient=10.0, kl_in="reward").estimate(batch, kl_coefficient=10.0)
    assert with_reference.equals(ppo().estimate(batch, kl_coefficient=0.0))


@pytest.mark.parametrize("cut", [[12], [1] * 12, [5, 0, 7], [3, 4, 5]])
def test_estimate_and_terms_do_not_depend_on_the_cut_to_the_last_bit(cut: list[int]):
    algorithm, batch = ppo(kl_coefficient=0.1, kl_in="reward", lam=0.9, gamma=0.98), random_step()
    batch = batch.with_columns({"kl": np.linspace(0, 1, 12)})
    shards = np.split(np.random.default_rng(1).permutation(12), np.cumsum(cut)[:-1])
    parts = [algorithm.estimate(batch.take(rows), kl_coefficient=0.1) for rows in shards]
    joined = batch.take(np.concatenate(shards)).join(Batch.concat(parts))
    whole, terms, metrics = prepare(algorithm, batch, 0.1)
    found = Metrics()
    prepared = algorithm.prepare(joined, found)
    assert prepared.sort_by_id().equals(whole)
    assert algorithm.terms(prepared, found, kl_coefficient=0.1) == terms
    assert found.reduce() == pytest.approx(metrics, rel=1e-12)


def test_D03_missing_reward_masks_its_row_and_no_other():
    algorithm, batch = ppo(lam=0.9), random_step(missing=3)
    others = [row for row in range(12) if row != 3]
    whole, terms, _ = prepare(algorithm, batch)
    without, terms_without, _ = prepare(algorithm, batch.take(others))
    assert whole.scalars("token_weight")[3] == 0
    assert terms == terms_without
    assert (
        whole.take(others)
        .select(["advantages", "returns", "token_weight"])
        .equals(without.select(["advantages", "returns", "token_weight"]))
    )


def test_D03_value_that_is_no_number_is_refused_by_the_id_of_its_row_unless_it_is_masked():
    broken = [[0.0], [math.nan, 0.0]]
    with pytest.raises(BatchError, match=r"values of row \(draw 1, sample 0\) holds nan"):
        ppo().estimate(valued([1.0, 1.0], broken), kl_coefficient=0.0)
    masked = ppo().estimate(valued([1.0, math.nan], broken), kl_coefficient=0.0)
    assert masked.rows("advantages") == [[1], [0, 0]]


def test_length_that_is_not_that_of_the_sampled_tokens_is_refused():
    batch = valued([1.0], [[0.0, 0.0, 0.0]], response_mask=[[1, 0, 1]]).with_columns({"response_length": [3]})
    with pytest.raises(BatchError, match=r"row \(draw 0, sample 0\) has response_length 3 and 2 sampled tokens"):
        ppo().estimate(batch, kl_coefficient=0.0)


# -- controller -------------------------------------------------------------------------------------------------------------


def test_prepare_by_hand():
    # Draws 5, 2, 7 into two mini-batches: {2, 5} and {7}. token_mean: draw 2 has 1 token and draw 5 two: 1 / 3; draw 7 has no reward.
    batch = valued([1.0, 2.0, math.nan], [[0.0, 0.0], [1.0], [0.0]], draws=[5, 2, 7])
    prepared, _, _ = prepare(ppo(minibatches=2), batch)
    assert prepared.ids[:, 0].tolist() == [5, 2, 7]
    assert prepared.scalars("token_weight") == pytest.approx([1 / 3, 1 / 3, 0])
    assert prepared.scalars("minibatch").tolist() == [0, 0, 1]


def test_D21_tool_tokens_count_in_no_normaliser():
    # 4 sampled tokens of 6 and 2 of 2: token_mean gives 1 / 6 each.
    batch = valued([2.0, 1.0], [[0.0] * 6, [0.0] * 2], response_mask=[[1, 1, 0, 0, 1, 1], [1, 1]])
    prepared, _, _ = prepare(ppo(), batch)
    assert prepared.scalars("token_weight") == pytest.approx([1 / 6, 1 / 6])


def test_advantages_are_whitened_over_the_trained_tokens_of_the_step():
    prepared, terms, metrics = prepare(ppo(lam=0.9), random_step(missing=3))
    trained = np.concatenate([row for index, row in enumerate(prepared.rows("advantages")) if index != 3])
    whitened = (trained - terms.advantage_shift) * terms.advantage_scale
    assert whitened.mean() == pytest.approx(0, abs=1e-12)
    assert whitened.std(ddof=1) == pytest.approx(1, abs=1e-5)  # 1e-6 is added to the spread
    assert metrics["advantage/mean"] == pytest.approx(trained.mean())
    assert metrics["advantage/std"] == pytest.approx(trained.std(ddof=1))
    assert pickle.loads(pickle.dumps(terms)) == terms


def test_whitening_can_be_switched_off():
    _, terms, _ = prepare(ppo(whiten_advantages=False), random_step())
    assert terms == StepTerms(kl_coefficient=0.0, advantage_shift=0.0, advantage_scale=1.0)


@pytest.mark.parametrize(
    ("values", "explained"),
    [
        ([[1.0, 1.0], [3.0]], 1.0),  # the returns themselves
        ([[0.5, 0.5], [0.5]], 0.0),  # a constant foresees nothing
        ([[3.0, 3.0], [1.0]], -3.0),  # errors of twice the distance: 1 - 4
    ],
)
def test_explained_variance_by_hand(values: list[list[float]], explained: float):
    _, _, metrics = prepare(ppo(), valued([1.0, 3.0], values))
    assert metrics["critic/explained_variance"] == pytest.approx(explained)
    assert metrics["critic/return_mean"] == pytest.approx(5 / 3)


def test_mean_kl_is_over_trained_tokens_and_steers_the_coefficient():
    # Rows of 2 and 1 tokens with kl 0.1 and 0.4, and a row without reward: (2 * 0.1 + 0.4) / 3 = 0.2. Target 0.25: error -0.2, times 0.98.
    batch = valued([1.0, 1.0, math.nan], [[0.0, 0.0], [0.0], [0.0] * 9]).with_columns({"kl": [0.1, 0.4, 50.0]})
    adaptive = ppo(kl_coefficient=0.5, kl_target=0.25)
    prepared, terms, metrics = prepare(adaptive, batch, 0.4)
    assert metrics["policy/kl_ref"] == pytest.approx(0.2)
    assert metrics["policy/kl_coefficient"] == terms.kl_coefficient == 0.4
    assert adaptive.next_kl_coefficient(prepared, 0.4) == pytest.approx(0.4 * 0.98)
    assert ppo(kl_coefficient=0.5).next_kl_coefficient(prepared, 0.4) == 0.4


def test_step_without_any_reward():
    algorithm = ppo(kl_coefficient=0.5, kl_target=0.25)
    prepared, terms, metrics = prepare(algorithm, valued([math.nan], [[1.0, 2.0]]).with_columns({"kl": [0.3]}), 0.5)
    assert not algorithm.has_signal(prepared)
    assert algorithm.next_kl_coefficient(prepared, 0.5) == 0.5
    assert math.isfinite(terms.advantage_scale)
    assert metrics == {"policy/kl_coefficient": 0.5}


def test_equal_rewards_are_a_signal_for_the_critic():
    assert ppo().has_signal(prepare(ppo(), valued([1.0, 1.0], [[0.0], [0.0]]))[0])


def test_C22_more_answers_than_the_group_size_are_refused():
    batch = valued([1.0, 1.0], [[0.0], [0.0]])
    with pytest.raises(BatchError, match=r"prompt 4 has 2 answers, expected at most algorithm.group_size = 1"):
        prepare(
            ppo(),
            Batch.from_columns(
                {
                    **{name: batch.scalars(name) for name in ("reward", "response_length")},
                    "values": batch.rows("values"),
                    "draw": [4, 4],
                    "sample": [0, 1],
                }
            ),
        )


def test_order_of_the_rows_changes_no_bit():
    algorithm, batch = ppo(lam=0.9, minibatches=3), random_step(rows=100)
    order = np.random.default_rng(2).permutation(100)
    straight, terms, _ = prepare(algorithm, batch)
    turned, turned_terms, _ = prepare(algorithm, batch.take(order))
    assert turned.equals(straight.take(order))
    assert turned_terms == terms
    # Sums of numbers of very different size show the order in which they were added.
    wild = straight.with_columns({"advantage": np.random.default_rng(3).normal(size=100) * 10.0 ** np.arange(-50, 50)})
    found = [algorithm.terms(rows, Metrics(), kl_coefficient=0.0) for rows in (wild, wild.take(order))]
    assert found[0] == found[1]


# -- losses -----------------------------------------------------------------------------------------------------------------


def tokens(logprobs: list[float], old: list[float], advantages: list[float], weights: list[float], **options) -> TokenBatch:
    made = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    given = {"entropy": torch.full((len(logprobs),), 2.0, dtype=torch.float64)} | options
    return TokenBatch(
        logprobs=made,
        old_logprobs=torch.tensor(old, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights, dtype=torch.float64),
        row=torch.arange(len(logprobs)),
        **given,
    )


def gradient_of(batch: TokenBatch, loss: torch.Tensor) -> list[float]:
    loss.backward()
    assert batch.logprobs.grad is not None
    return batch.logprobs.grad.tolist()


def test_whitened_loss_and_its_gradient_by_hand():
    # Shift 1, scale 2: advantages 2, -1 become 2, -4. Ratio 1: loss -(0.5 * 2) + 0.25 * 4 = 0, gradient -weight * A = -1, 1.
    batch = tokens([-1.0, -2.0, 7.0], [-1.0, -2.0, 0.0], [2.0, -1.0, math.nan], [0.5, 0.25, 0.0])
    loss = ppo().loss(batch, Metrics(), StepTerms(advantage_shift=1.0, advantage_scale=2.0))
    assert loss.item() == pytest.approx(0)
    assert gradient_of(batch, loss) == pytest.approx([-1, 1, 0])


@pytest.mark.parametrize("make", [ppo, lambda **options: Grpo(AlgorithmConfig(**options), minibatches=1)])
@pytest.mark.parametrize(
    ("kind", "estimates", "slopes"),
    [("k1", [0.5, -0.5], [1, 1]), ("k2", [0.125, 0.125], [0.5, -0.5]), ("k3", [0.106531, 0.148721], [0.393469, -0.648721])],
)
def test_kl_in_the_loss_and_its_gradient_by_hand(make, kind: str, estimates: list[float], slopes: list[float]):
    # d = 0.5 and -0.5; ratio 1, advantages 1 and 0, weights 0.5: loss 0.5 (-1 + 0.2 kl_0) + 0.5 * 0.2 kl_1. The third token is masked.
    reference = torch.tensor([-1.5, -1.5, math.nan], dtype=torch.float64)
    batch = tokens([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], [1.0, 0.0, 1.0], [0.5, 0.5, 0.0], ref_logprobs=reference)
    metrics = Metrics()
    loss = make(kl_coefficient=9.0, kl_kind=kind).loss(batch, metrics, StepTerms(kl_coefficient=0.2))
    assert loss.item() == pytest.approx(-0.5 + 0.1 * sum(estimates), abs=1e-6)
    assert gradient_of(batch, loss) == pytest.approx([-0.5 + 0.1 * slopes[0], 0.1 * slopes[1], 0], abs=1e-6)
    assert metrics.reduce()["policy/kl_loss"] == pytest.approx(sum(estimates) / 2, abs=1e-6)


def test_without_terms_the_configured_coefficient_counts():
    reference = torch.tensor([-1.5], dtype=torch.float64)
    batch = tokens([-1.0], [-1.0], [0.0], [1.0], ref_logprobs=reference)
    assert ppo(kl_coefficient=0.2, kl_kind="k1").loss(batch, Metrics()).item() == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_identical_reference_has_loss_and_gradient_exactly_zero(kind: str):
    batch = tokens([-1.0, -2.5], [-1.0, -2.5], [0.0, 0.0], [0.5, 0.5])
    batch.ref_logprobs = batch.logprobs.detach().clone()
    loss = ppo(kl_coefficient=1.0, kl_kind=kind).loss(batch, Metrics())
    assert loss.item() == 0
    assert gradient_of(batch, loss) == [0, 0]


def test_kl_in_the_reward_is_not_in_the_loss_as_well():
    batch = tokens([-1.0], [-1.0], [0.0], [1.0], ref_logprobs=torch.tensor([-1.5], dtype=torch.float64))
    assert ppo(kl_coefficient=0.2, kl_in="reward").loss(batch, Metrics()).item() == 0


def test_missing_reference_is_refused():
    with pytest.raises(BatchError, match="there are no ref_logprobs; the ref role must write them"):
        ppo(kl_coefficient=0.2).loss(tokens([-1.0], [-1.0], [0.0], [1.0]), Metrics())


def test_entropy_bonus_and_its_gradient_by_hand():
    # weights 0.5 and 0.25, entropies 1 and 3, coefficient 0.1: -0.1 (0.5 + 0.75) = -0.125, gradient -0.05 and -0.025; masked: 0.
    entropy = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64, requires_grad=True)
    batch = tokens([-1.0] * 3, [-1.0] * 3, [0.0] * 3, [0.5, 0.25, 0.0], entropy=entropy)
    metrics = Metrics()
    loss = ppo(entropy_coefficient=0.1).loss(batch, metrics)
    loss.backward()
    assert loss.item() == pytest.approx(-0.125)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.025, 0])
    assert metrics.reduce()["policy/entropy"] == pytest.approx(2)


def test_entropy_bonus_without_a_gradient_is_refused():
    with pytest.raises(ValueError, match="entropy_gradient=True"):
        ppo(entropy_coefficient=0.1).loss(tokens([-1.0], [-1.0], [0.0], [1.0]), Metrics())


def test_value_loss_is_the_weighted_sum_and_its_metrics_leave_out_masked_tokens():
    # Losses 0.32 (held by the clip), 0.125, 0.405 (see the tests of the losses); weights 0.5, 0.25, 0.25: 0.16 + 0.03125 + 0.10125.
    values = torch.tensor([1.5, 1.5, 1.1, 99.0], requires_grad=True)
    batch = ValueBatch(
        values=values,
        old_values=torch.tensor([1.0, 1.0, 1.0, math.nan]),
        returns=torch.tensor([2.0, 1.0, 2.0, math.nan]),
        weights=torch.tensor([0.5, 0.25, 0.25, 0.0]),
        row=torch.arange(4),
    )
    metrics = Metrics()
    loss = ppo().value_loss(batch, metrics)
    loss.backward()
    assert loss.item() == pytest.approx(0.2925)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0, 0.125, -0.225, 0])
    found = metrics.reduce()
    assert found["critic/loss"] == pytest.approx(0.2925)
    assert found["critic/value_clip_share"] == pytest.approx(2 / 3)
    assert found["critic/value_mean"] == pytest.approx(4.1 / 3)


def test_D22_values_moved_by_5_are_all_counted_as_clipped():
    batch = ValueBatch(
        values=torch.tensor([5.0, -4.0]),
        old_values=torch.tensor([0.0, 1.0]),
        returns=torch.zeros(2),
        weights=torch.ones(2),
        row=torch.arange(2),
    )
    metrics = Metrics()
    ppo(value_clip=0.2).value_loss(batch, metrics)
    assert metrics.reduce()["critic/value_clip_share"] == 1.0


# -- what it asks for ---------------------------------------------------------------------------------------------------------


def test_roles_and_columns_that_it_needs():
    plain, rewarded, penalised = ppo(), ppo(kl_coefficient=0.1, kl_in="reward"), ppo(kl_coefficient=0.1)
    assert (plain.needs, rewarded.needs) == (("critic",), ("critic", "ref"))
    assert "kl" not in plain.reads
    assert "kl" in rewarded.reads
    assert "ref_logprobs" in rewarded.estimate_reads
    assert "ref_logprobs" not in rewarded.actor_reads
    assert "ref_logprobs" in penalised.actor_reads
    assert "ref_logprobs" not in penalised.estimate_reads
    assert Grpo(AlgorithmConfig(), minibatches=1).needs == ()
    assert Grpo(AlgorithmConfig(kl_coefficient=0.1), minibatches=1).needs == ("ref",)


def test_whatever_estimate_and_prepare_declare_is_what_they_use():
    algorithm = ppo(kl_coefficient=0.1, kl_in="reward")
    batch = random_step().with_columns({"kl": np.zeros(12)})
    made = algorithm.estimate(batch.select([name for name in algorithm.estimate_reads if name != "response_mask"]), kl_coefficient=0.1)
    assert made.names[2:] == algorithm.estimate_writes
    numbers = batch.join(made).select(algorithm.reads)
    prepared = algorithm.prepare(numbers, Metrics())
    assert set(prepared.names) - set(numbers.names) == set(algorithm.writes)


def test_create_actor_critic():
    assert isinstance(create_algorithm(Config(algorithm=AlgorithmConfig(name="ppo"))), Ppo)
    assert isinstance(create_actor_critic(Config(algorithm=AlgorithmConfig(name="ppo"))), Ppo)
    with pytest.raises(ConfigError, match=r"algorithm.name=grpo"):
        create_actor_critic(Config())
