import math
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from train_support import (
    AGGREGATIONS,
    OPTIMIZER,
    VOCABULARY,
    WEIGHTS,
    algorithm,
    batch,
    engine,
    largest_gap,
    load_state,
    naive_logprobs,
    save,
    saved,
    state_of,
    tiny_model,
)

from rolemesh.batch import Batch
from rolemesh.engines.train import OptimizerSettings, TrainEngine, tensor_file
from rolemesh.errors import DeadlineExceeded
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import TokenBatch


def gradients(data: Batch, mode: str = "token_mean", **options) -> dict[str, torch.Tensor]:
    return engine(**options).compute_gradients(data, algorithm(mode).loss, temperature=1.0, metrics=Metrics())


def weights_of(trainer: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def update(trainer: TrainEngine, data: Batch) -> dict[str, float]:
    metrics = Metrics()
    trainer.update(data, algorithm().loss, temperature=1.0, metrics=metrics)
    return metrics.reduce()


# -- gradients --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradient_is_that_of_the_formula_over_the_whole_mini_batch(mode: str):
    # Row by row through the whole model, no padding, no weights from aggregation.py: the definition of each mode in one expression.
    data, model = batch(mode=mode), tiny_model()
    rows = []
    for row in range(7):  # the last row is masked
        logprobs = naive_logprobs(model, data.rows("prompt_ids")[row], data.rows("response_ids")[row])
        ratio = (logprobs - torch.tensor(data.rows("rollout_logprobs")[row])).exp()
        advantage = float(data.scalars("advantage")[row])
        rows.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    loss = {
        "token_mean": torch.cat(rows).mean(),
        "seq_mean_token_mean": torch.stack([row.mean() for row in rows]).mean(),
        "seq_mean_token_sum": torch.stack([row.sum() for row in rows]).mean(),
        "token_sum": torch.cat(rows).sum(),
    }[mode]
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert largest_gap(expected, gradients(data, mode)) < 1e-5


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_D09_gradient_is_the_same_for_every_micro_batch_size(mode: str):
    data = batch(mode=mode)
    whole = gradients(data, mode, rows=8)
    for rows in (1, 2, 4):
        assert largest_gap(whole, gradients(data, mode, rows=rows)) < 1e-6


def test_D12_micro_batch_larger_than_the_mini_batch_is_one_pass():
    data = batch()
    small = data.take([0, 1])
    assert equal(gradients(small, rows=4), gradients(small, rows=400))
    assert all(torch.isfinite(gradient).all() for gradient in gradients(small, rows=4).values())


def test_row_longer_than_the_budget_is_a_pass_of_its_own():
    data = batch()
    trainer = TrainEngine(tiny_model(), optimizer=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=5)
    found = trainer.compute_gradients(data, algorithm().loss, temperature=1.0, metrics=Metrics())
    assert largest_gap(gradients(data), found) < 1e-6


def test_order_of_the_rows_changes_no_bit():
    data = batch()
    for rows in (2, 8):
        assert equal(gradients(data, rows=rows), gradients(data.take([6, 3, 0, 7, 2, 5, 1, 4]), rows=rows))


def test_D04_masked_row_does_not_touch_the_gradient():
    data = batch()
    assert data.scalars("token_weight")[7] == 0
    assert equal(gradients(data), gradients(data.take(range(7))))


def test_compute_gradients_changes_neither_weights_nor_the_next_update():
    data, untouched, asked = batch(), engine(), engine()
    before = weights_of(asked)
    asked.compute_gradients(data, algorithm().loss, temperature=1.0, metrics=Metrics())
    assert equal(before, weights_of(asked))
    update(untouched, data)
    update(asked, data)
    assert equal(weights_of(untouched), weights_of(asked))


# -- optimizer steps --------------------------------------------------------------------------------------------------------


def test_first_step_of_adamw_by_hand():
    # Step 1: m = (1 - b1) g, v = (1 - b2) g^2, both corrected to g and g^2, so w <- w (1 - lr wd) - lr g / (|g| + 1e-8).
    data = batch()
    trainer = engine(optimizer=OptimizerSettings(learning_rate=0.01, weight_decay=0.1, max_grad_norm=None))
    before = weights_of(trainer)
    update(trainer, data)
    for name, gradient in gradients(data).items():
        expected = before[name] * (1 - 0.01 * 0.1) - 0.01 * gradient / (gradient.abs() + 1e-8)
        assert torch.allclose(dict(trainer.named_weights())[name], expected, rtol=1e-5, atol=1e-6), name


def test_gradient_above_the_limit_is_scaled_to_it():
    # AdamW's first step hides the scale of a gradient, its first moment (1 - 0.9) g does not.
    data, limit = batch(), 1e-3
    trainer = engine(optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=limit))
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients(data).values()))
    assert norm > limit
    assert update(trainer, data)["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    moments = [moment for name, moment in state_of(trainer).items() if name.startswith("exp_avg.")]
    assert math.sqrt(sum(float(moment.double().square().sum()) for moment in moments)) == pytest.approx(0.1 * limit, rel=1e-5)


def test_gradient_below_the_limit_is_left_alone():
    data = batch()
    loose = engine(optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=1e6))
    free = engine(optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=None))
    update(loose, data)
    update(free, data)
    assert equal(weights_of(loose), weights_of(free))


def test_learning_rate_follows_the_optimizer_step():
    trainer = engine(optimizer=OptimizerSettings(learning_rate=0.4, warmup_steps=2, schedule="linear", schedule_steps=4))
    found = [update(trainer, batch())["actor/learning_rate"] for _ in range(4)]
    assert found == pytest.approx([0.2, 0.4, 0.4, 0.2])


def test_metrics_of_an_update():
    data = batch()
    found = update(engine(), data)
    assert found["actor/tokens_trained"] == 8 + 3 + 1 + 5 + 2 + 7 + 4
    assert found["actor/steps_skipped_nonfinite"] == found["actor/steps_skipped_empty"] == 0


def test_metrics_do_not_depend_on_the_micro_batch():
    # H07: sums weighted by tokens, not means of micro-batches.
    whole, cut = update(engine(rows=8), batch()), update(engine(rows=1), batch())
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert cut[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_D03_gradient_that_is_not_finite_is_never_applied_and_is_counted():
    data = batch()
    logprobs = data.rows("rollout_logprobs")
    logprobs[0][0] = math.nan
    broken = data.with_columns({"rollout_logprobs": logprobs})
    trainer, untouched = engine(), engine()
    before = weights_of(trainer)
    found = update(trainer, broken)
    assert found["actor/steps_skipped_nonfinite"] == 1
    assert "actor/grad_norm" not in found
    assert trainer.step == 0
    assert equal(before, weights_of(trainer))
    update(trainer, data)
    update(untouched, data)
    assert equal(weights_of(trainer), weights_of(untouched))


@pytest.mark.parametrize("rows", [0, 8])
def test_mini_batch_without_a_weight_is_left_out_and_counted(rows: int):
    trainer = engine()
    update(trainer, batch())  # momentum and weight decay would move the weights even with gradient 0
    before = weights_of(trainer)
    empty = batch().with_columns({"token_weight": np.zeros(8)}).take(range(rows))
    found = update(trainer, empty)
    assert found["actor/steps_skipped_empty"] == 1
    assert trainer.step == 1
    assert equal(before, weights_of(trainer))


def test_update_that_raised_leaves_nothing_behind_in_the_next():
    def failing(tokens: TokenBatch, metrics: Metrics) -> torch.Tensor:
        if len(calls) == 1:
            raise RuntimeError("second micro-batch")
        calls.append(tokens)
        return algorithm().loss(tokens, metrics)

    calls: list[TokenBatch] = []
    trainer, untouched = engine(rows=2), engine(rows=2)
    with pytest.raises(RuntimeError, match="second micro-batch"):
        trainer.update(batch(), failing, temperature=1.0, metrics=Metrics())
    update(trainer, batch())
    update(untouched, batch())
    assert equal(weights_of(trainer), weights_of(untouched))


def test_updates_lower_the_loss():
    data, trainer = batch(noise=0.0), engine(learning_rate=3e-3)
    losses = [update(trainer, data)["policy/loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05


def test_frozen_parameters_stay():
    model = tiny_model()
    model.model.embed_tokens.requires_grad_(False)
    trainer = engine(model)
    before = weights_of(trainer)
    update(trainer, batch())
    after = weights_of(trainer)
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


# -- supervised -------------------------------------------------------------------------------------------------------------


def sft_batch() -> Batch:
    data = batch().select(["prompt_ids", "response_ids"])
    return data.with_columns({"token_weight": np.full(8, 1 / 36)})  # 8 + 3 + 1 + 5 + 2 + 7 + 4 + 6 = 36 response tokens


def test_sft_loss_and_gradient_are_those_of_cross_entropy():
    data, model = sft_batch(), tiny_model()
    rows = zip(data.rows("prompt_ids"), data.rows("response_ids"), strict=True)
    loss = -torch.cat([naive_logprobs(model, prompt, response) for prompt, response in rows]).mean()
    norm = math.sqrt(sum(float(part.double().square().sum()) for part in torch.autograd.grad(loss, list(model.parameters()))))
    metrics = Metrics()
    engine(rows=2).sft_update(data, metrics)
    found = metrics.reduce()
    assert found["sft/loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert found["sft/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert found["sft/tokens_trained"] == 36


def test_sft_learns_its_examples():
    data, trainer, losses = sft_batch(), engine(learning_rate=1e-2), []
    for _ in range(15):
        metrics = Metrics()
        trainer.sft_update(data, metrics)
        losses.append(metrics.reduce()["sft/loss"])
    assert losses[-1] < losses[0] / 2


def test_reset_optimizer_starts_anew_with_the_weights_as_they_are():
    settings = OptimizerSettings(learning_rate=5e-4, warmup_steps=3)
    trainer = engine(learning_rate=1e-2)
    trainer.sft_update(sft_batch(), Metrics())
    fresh = tiny_model()
    fresh.load_state_dict(trainer.model.state_dict())
    other = engine(fresh, optimizer=settings)
    trainer.reset_optimizer(settings)
    update(trainer, batch())
    update(other, batch())
    assert trainer.step == 1
    assert equal(weights_of(trainer), weights_of(other))


# -- state ------------------------------------------------------------------------------------------------------------------


def test_G10_two_steps_and_two_more_after_resuming_equal_four(tmp_path):
    settings = OptimizerSettings(learning_rate=1e-2, warmup_steps=3, weight_decay=0.01)
    straight, first, second = engine(optimizer=settings), engine(optimizer=settings), engine(tiny_model(seed=5), optimizer=settings)
    rates = [update(straight, batch(seed))["actor/learning_rate"] for seed in range(4)]
    for seed in (0, 1):
        update(first, batch(seed))
    save(first, tmp_path)
    load_state(second, tmp_path, first.step)
    resumed = [update(second, batch(seed))["actor/learning_rate"] for seed in (2, 3)]
    assert resumed == rates[2:]
    assert second.step == straight.step == 4
    assert equal(state_of(straight), state_of(second))
    assert len(state_of(straight)) == 4 * len(weights_of(straight)), "weights, two moments and a step of each"


def test_G11_the_learning_rate_after_a_resume_is_that_of_the_step(tmp_path):
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=10)
    first, second = engine(optimizer=settings), engine(optimizer=settings)
    for _ in range(7):
        update(first, batch())
    save(first, tmp_path)
    load_state(second, tmp_path, first.step)
    assert update(second, batch())["actor/learning_rate"] == update(first, batch())["actor/learning_rate"] == 0.8


def test_a_snapshot_is_not_changed_by_later_steps(tmp_path):
    trainer = engine()
    update(trainer, batch(0))
    before = state_of(trainer)
    snapshots = [file.snapshot() for file in trainer.files()]
    update(trainer, batch(1))
    for snapshot, name in zip(snapshots, (WEIGHTS, OPTIMIZER), strict=True):
        snapshot.write(tmp_path / name)
    assert equal(before, saved(tmp_path))
    load_state(trainer, tmp_path, 1)
    update(trainer, batch(2))  # must not train the files through memory shared with them
    assert equal(before, saved(tmp_path))


def test_a_step_waits_until_a_copy_of_the_weights_is_made():
    trainer, moved = engine(), threading.Event()
    before = weights_of(trainer)
    trainer.copying.begin()
    step = threading.Thread(target=lambda: (update(trainer, batch()), moved.set()))
    step.start()
    assert not moved.wait(1)
    assert equal(weights_of(trainer), before)
    trainer.copying.end()
    assert moved.wait(60)
    step.join(60)
    assert not equal(weights_of(trainer), before)
    trainer.copying.begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "COPY_SECONDS", 0.1)
        with pytest.raises(DeadlineExceeded, match=r"a change of weights waited 0\.1 s for the copy of them for a checkpoint"):
            trainer.load_weights(before)


def test_state_from_before_the_first_step_can_be_loaded(tmp_path):
    trainer, other = engine(), engine(tiny_model(seed=1))
    save(trainer, tmp_path)
    update(other, batch(3))
    load_state(other, tmp_path, 0)
    update(other, batch(0))
    update(trainer, batch(0))
    assert equal(weights_of(trainer), weights_of(other))


def test_state_of_another_model_is_refused_and_changes_nothing(tmp_path):
    save(engine(), tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    weights["model.norm.weight"] = torch.ones(7)
    weights["extra"] = torch.ones(1)
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / WEIGHTS)
    trainer = engine(tiny_model(seed=1))
    before = weights_of(trainer)
    with pytest.raises(
        ValueError, match=r"extra is unknown; lm_head.weight is missing; model.norm.weight has shape \(7,\), expected \(16,\)"
    ):
        load_state(trainer, tmp_path, 3)
    assert equal(before, weights_of(trainer))
    assert trainer.step == 0


def test_tied_weights_are_named_once():
    untied = [name for name, _ in engine(tiny_model()).named_weights()]
    tied = [name for name, _ in engine(tiny_model(tied=True)).named_weights()]
    assert sorted([*tied, "lm_head.weight"]) == sorted(untied)


def test_tied_weights_train_and_resume(tmp_path):
    straight, resumed = engine(tiny_model(tied=True)), engine(tiny_model(seed=3, tied=True))
    update(straight, batch(0))
    save(straight, tmp_path)
    load_state(resumed, tmp_path, straight.step)
    update(straight, batch(1))
    update(resumed, batch(1))
    assert equal(weights_of(straight), weights_of(resumed))
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight


def test_G13_weights_that_separated_although_the_config_says_tied_are_all_kept(tmp_path):
    model = tiny_model(tied=True)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 16))
    trainer = engine(model)
    save(trainer, tmp_path)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(saved(tmp_path))
    with pytest.raises(ValueError, match=r"lm_head.weight is unknown"):
        load_state(engine(tiny_model(tied=True)), tmp_path, 0)
