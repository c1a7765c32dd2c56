import numpy as np
import pytest
import torch
from train_support import (
    AGGREGATIONS,
    VOCABULARY,
    batch,
    critic,
    critic_batch,
    engine,
    largest_gap,
    load_state,
    ppo,
    save,
    tiny_model,
    value_model,
)
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from rolemesh.batch import Batch
from rolemesh.config.schema import AlgorithmConfig, ModelConfig, TrainerConfig
from rolemesh.engines.train import Groups, OptimizerSettings, ValueEngine, ValueModel, load_value_model, open_value_model
from rolemesh.engines.train.weights import named_weights
from rolemesh.errors import BatchError, ConfigError
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import TokenBatch, ValueBatch


def naive_values(model: ValueModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """One prefix at a time, no padding: the state before token t is the prompt and the t tokens before it."""
    states = [prompt + response[:t] for t in range(len(response))]
    return torch.stack([model(torch.tensor([len(state) - 1]), input_ids=torch.tensor([state]))[0] for state in states])


def rows_of(data: Batch) -> list[tuple[list[int], list[int]]]:
    return list(zip(data.rows("prompt_ids"), data.rows("response_ids"), strict=True))


def gradients(data: Batch, mode: str = "token_mean", **options) -> dict[str, torch.Tensor]:
    return critic(**options).compute_gradients(data, ppo(mode).value_loss, metrics=Metrics())


def update(trainer: ValueEngine, data: Batch) -> dict[str, float]:
    metrics = Metrics()
    trainer.update(data, ppo().value_loss, metrics=metrics)
    return metrics.reduce()


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- values -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_values_are_those_of_the_states_before_each_token_for_any_micro_batch(rows: int):
    data, model = batch(), value_model()
    for mine, (prompt, response) in zip(critic(model, rows=rows).values(data), rows_of(data), strict=True):
        assert mine.dtype == np.float32
        assert mine == pytest.approx(naive_values(model, prompt, response).detach().numpy(), abs=1e-5)


def test_value_before_a_token_does_not_know_it():
    first = Batch.from_columns({"draw": [0], "sample": [0], "prompt_ids": [[1, 2]], "response_ids": [[3, 4, 5]]})
    second = first.with_columns({"response_ids": [[3, 9, 5]]})
    one, other = critic().values(first)[0], critic().values(second)[0]
    assert one[:2].tolist() == other[:2].tolist()
    assert one[2] != other[2]


def test_values_keep_the_order_of_the_rows():
    data, trainer = batch(), critic(rows=2)
    order = [5, 0, 7, 3, 1, 6, 2, 4]
    found, turned = trainer.values(data), trainer.values(data.take(order))
    for place, row in enumerate(order):
        assert turned[place] == pytest.approx(found[row], abs=1e-5)


def test_row_without_response_and_batch_without_rows():
    data = Batch.from_columns({"draw": [0, 1], "sample": [0, 0], "prompt_ids": [[1, 2], [3]], "response_ids": [[], [4, 5]]})
    assert [len(row) for row in critic().values(data)] == [0, 2]
    assert critic().values(data.take([])) == []


# -- gradients --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradient_is_that_of_the_formula_over_the_whole_mini_batch(mode: str):
    # Row by row through the whole model, no padding: the clipped value loss and each aggregation in one expression.
    data, model = critic_batch(mode), value_model()
    rows = []
    for row in range(7):  # the last row has no reward
        values = naive_values(model, *rows_of(data)[row])
        old, returns = (torch.tensor(data.rows(name)[row]) for name in ("values", "returns"))
        clipped = old + (values - old).clamp(-0.2, 0.2)
        rows.append(torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2)
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
    data = critic_batch(mode)
    whole = gradients(data, mode)
    for rows in (1, 2, 4):
        assert largest_gap(whole, gradients(data, mode, rows=rows)) < 1e-6


def test_order_of_the_rows_changes_no_bit_of_the_gradient():
    data = critic_batch()
    for rows in (2, 8):
        assert equal(gradients(data, rows=rows), gradients(data.take([6, 3, 0, 7, 2, 5, 1, 4]), rows=rows))


def test_D04_masked_row_does_not_touch_the_gradient():
    data = critic_batch()
    assert data.scalars("token_weight")[7] == 0
    assert equal(gradients(data), gradients(data.take(range(7))))


# -- masks ------------------------------------------------------------------------------------------------------------------


def masked_batch() -> tuple[Batch, list[list[int]]]:
    """`critic_batch` in which a tool wrote tokens in the middle of two answers, and the whole of another."""
    mask = [[1] * len(row) for row in batch().rows("response_ids")]
    mask[0][2:5], mask[5][0], mask[2] = [0, 0, 0], 0, [0]
    return critic_batch(response_mask=mask, response_length=[sum(row) for row in mask]), mask


def test_D21_all_masks_agree():
    data, mask = masked_batch()
    mask[7] = [0] * len(mask[7])  # the row without reward
    expected = {tuple(identity): row for identity, row in zip(data.ids.tolist(), mask, strict=True)}
    seen: dict[str, list[list[int]]] = {}

    def policy_loss(tokens: TokenBatch, metrics: Metrics) -> torch.Tensor:
        seen["policy"] = (tokens.weights != 0).int().tolist()
        return (tokens.logprobs * tokens.weights).sum()

    def value_loss(tokens: ValueBatch, metrics: Metrics) -> torch.Tensor:
        seen["critic"] = (tokens.weights != 0).int().tolist()
        return (tokens.values * tokens.weights).sum()

    engine().compute_gradients(data, policy_loss, temperature=1.0, metrics=Metrics())
    critic().compute_gradients(data, value_loss, metrics=Metrics())
    trained = data.sort_by_id()
    trained = trained.take(np.flatnonzero(trained.scalars("token_weight")))
    flat = [place for identity in trained.ids.tolist() for place in expected[tuple(identity)]]
    assert seen["policy"] == seen["critic"] == flat
    for name in ("advantages", "returns"):
        assert [[int(value != 0) for value in row] for row in data.rows(name)] == list(expected.values())
    # token_mean: the weights of all sampled tokens add up to 1
    assert sum(weight * sum(row) for weight, row in zip(data.scalars("token_weight"), mask, strict=True)) == pytest.approx(1)


def test_D21_what_stands_at_a_tool_token_does_not_matter():
    data, mask = masked_batch()
    junk = {
        name: [
            [value if kept else -9.0 for value, kept in zip(row, places, strict=True)]
            for row, places in zip(data.rows(name), mask, strict=True)
        ]
        for name in ("values", "returns", "advantages", "rollout_logprobs")
    }
    other = data.with_columns(junk)
    assert equal(gradients(data), gradients(other))
    policy = [engine().compute_gradients(rows, ppo().loss, temperature=1.0, metrics=Metrics()) for rows in (data, other)]
    assert equal(*policy)


def test_mask_that_does_not_fit_the_tokens_is_refused_by_id():
    data, mask = masked_batch()
    mask[3] = [*mask[3], 1]
    with pytest.raises(BatchError, match=r"\(draw 41, sample 1\) has 6 response_mask for 5 response_ids"):
        critic().update(data.with_columns({"response_mask": mask}), ppo().value_loss, metrics=Metrics())


# -- optimizer steps and state ------------------------------------------------------------------------------------------------


def test_metrics_of_an_update():
    found = update(critic(), critic_batch())
    assert found["critic/tokens_trained"] == 8 + 3 + 1 + 5 + 2 + 7 + 4
    assert found["critic/steps_skipped_nonfinite"] == found["critic/steps_skipped_empty"] == 0
    assert found["critic/learning_rate"] == 1e-3
    assert not any(name.startswith("actor/") for name in found)


def test_metrics_do_not_depend_on_the_micro_batch():
    whole, cut = update(critic(rows=8), critic_batch()), update(critic(rows=1), critic_batch())
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert cut[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_updates_bring_the_values_to_the_returns():
    data, trainer = critic_batch(), critic(learning_rate=1e-2)
    algorithm = ppo(value_clip=None)
    losses = []
    for _ in range(30):
        metrics = Metrics()
        trainer.update(data, algorithm.value_loss, metrics=metrics)
        losses.append(metrics.reduce()["critic/loss"])
    assert losses[-1] < losses[0] / 10


def test_D03_loss_that_is_not_finite_is_never_applied_and_is_counted():
    data = critic_batch()
    returns = data.rows("returns")
    returns[0][0] = float("nan")
    trainer = critic()
    before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    assert update(trainer, data.with_columns({"returns": returns}))["critic/steps_skipped_nonfinite"] == 1
    assert equal(before, dict(trainer.named_weights()))
    assert trainer.step == 0


def test_G10_resumed_critic_goes_on_as_if_nothing_had_been(tmp_path):
    data, straight, first, second = critic_batch(), critic(), critic(), critic(value_model(seed=5))
    for _ in range(3):
        update(straight, data)
    update(first, data)
    save(first, tmp_path)
    load_state(second, tmp_path, first.step)
    for _ in range(2):
        update(second, data)
    assert second.step == straight.step == 3
    assert equal(dict(straight.named_weights()), dict(second.named_weights()))


def test_settings_of_the_critic():
    trainer = TrainerConfig(learning_rate=1e-6, warmup_steps=3, weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=None)
    found = OptimizerSettings.of_critic(AlgorithmConfig(critic_learning_rate=2e-5), trainer)
    assert found == OptimizerSettings(learning_rate=2e-5, warmup_steps=3, weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=None)


# -- where the model comes from -----------------------------------------------------------------------------------------------


def load(path: str = "tiny", seed: int = 0, critic_path: str | None = None) -> ValueModel:
    return load_value_model(ModelConfig(path=path), path=critic_path, seed=seed)


def test_fresh_critic_depends_on_the_seed_alone_and_leaves_the_random_state():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again, other = load(seed=3), load(seed=4)
    assert equal(first.state_dict(), again.state_dict())
    assert not torch.equal(first.head.weight, other.head.weight)


def test_fresh_critic_starts_near_zero_with_a_gradient_into_the_body():
    data = batch()
    trainer = ValueEngine(load(), optimizer=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=1000)
    data = data.with_columns({"values": trainer.values(data), "returns": [[1.0] * len(row) for row in data.rows("response_ids")]})
    assert max(float(np.abs(row).max()) for row in trainer.values(data)) < 0.1
    found = trainer.compute_gradients(data, ppo().value_loss, metrics=Metrics())
    assert all(gradient.abs().max() > 0 for name, gradient in found.items() if "embed" not in name)


def test_folder_of_a_language_model_gives_its_body(tmp_path):
    model = tiny_model(seed=6)
    model.save_pretrained(tmp_path)
    found = load(str(tmp_path))
    assert equal(dict(model.model.named_parameters()), dict(found.backbone.named_parameters()))
    assert equal(found.state_dict(), load("tiny", critic_path=str(tmp_path)).state_dict())


def classifier(labels: int = 1) -> LlamaForSequenceClassification:
    config = tiny_model().config
    config.num_labels = labels
    config.pad_token_id = 0
    torch.manual_seed(8)
    return LlamaForSequenceClassification(config)


def test_classifier_gives_body_and_head_so_that_its_score_of_a_prefix_is_the_value(tmp_path):
    model = classifier().eval()
    model.save_pretrained(tmp_path)
    data = Batch.from_columns({"draw": [0], "sample": [0], "prompt_ids": [[1, 2]], "response_ids": [[3, 4, 5]]})
    trainer = ValueEngine(load(critic_path=str(tmp_path)), optimizer=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=100)
    expected = [model(input_ids=torch.tensor([[1, 2, 3, 4][:end]])).logits.item() for end in (2, 3, 4)]
    assert trainer.values(data)[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["language model", "tied", "classifier", "gpt2", "gpt2 classifier", "qwen2 classifier"])
def test_weights_opened_to_be_read_in_parts_are_those_that_are_loaded(tmp_path, kind: str):
    small = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": 1}
    gpt2 = GPT2Config(**small, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    qwen2 = Qwen2Config(**small, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    made = {
        "language model": lambda: tiny_model(seed=6),
        "tied": lambda: tiny_model(seed=6, tied=True),
        "classifier": classifier,
        "gpt2": lambda: GPT2LMHeadModel(gpt2),
        "gpt2 classifier": lambda: GPT2ForSequenceClassification(gpt2),
        "qwen2 classifier": lambda: Qwen2ForSequenceClassification(qwen2),
    }[kind]()
    made.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    opened, loaded = open_value_model(config, path=None, seed=4), load_value_model(config, path=None, seed=4)
    assert opened is not None
    assert all(parameter.is_meta for parameter in opened[0].backbone.parameters())
    assert equal({name: weight[...] for name, weight in opened[1].items()}, dict(named_weights(loaded)))
    read = ValueEngine(opened[0], weights=opened[1], optimizer=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=100)
    read.join(Groups())
    assert all(np.array_equal(mine, other) for mine, other in zip(read.values(batch()), critic(loaded).values(batch()), strict=True))


def test_a_built_in_model_is_not_opened_but_made():
    assert open_value_model(ModelConfig(path="tiny"), path=None, seed=0) is None


def test_classifier_with_two_labels_is_refused(tmp_path):
    classifier(labels=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm.critic_path.*one output") as caught:
        load(critic_path=str(tmp_path))
    assert caught.value.problems[0].subject == "algorithm.critic_path"


def test_classifier_without_its_head_is_refused(tmp_path):
    model = classifier()
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("score")}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"weights are missing in its files: score.weight"):
        load(critic_path=str(tmp_path))


def test_missing_folder_names_the_option_of_the_critic(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(critic_path=str(tmp_path / "nothing"))
    assert [problem.subject for problem in caught.value.problems] == ["algorithm.critic_path"]


def test_body_that_looks_ahead_is_refused():
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = ValueModel.of_causal(BertLMHeadModel(config).eval(), seed=0)
    with pytest.raises(ValueError, match="BertModel is not causal"):
        ValueEngine(model, optimizer=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=100)


@pytest.mark.parametrize("bias", [True, False])
def test_values_in_bfloat16_have_no_steps(bias: bool):
    """The numbers near 10 that bfloat16 has are 1/16 apart; here the states differ by less."""
    model = value_model()
    with torch.no_grad():
        model.head.bias.fill_(9.97)
        if not bias:
            model.head.bias = None
            model.head.weight.mul_(1000)
    exact, found = (np.concatenate(critic(model, compute_dtype=form).values(critic_batch())) for form in (torch.float32, torch.bfloat16))
    assert len(np.unique(found)) > 0.9 * len(np.unique(exact))
    assert np.allclose(found, exact, rtol=0.02, atol=0.02 * np.abs(exact).max())
    assert not np.array_equal(found, torch.tensor(found).bfloat16().float().numpy())


@pytest.mark.parametrize("tied", [False, True])
def test_body_of_a_warm_started_policy_can_be_taken_over(tied: bool):
    policy, trainer = engine(tiny_model(seed=9, tied=tied)), critic()
    head = trainer.model.head.weight.clone()
    trainer.load_backbone(policy.named_weights())
    assert equal(dict(policy.model.model.named_parameters()), dict(trainer.model.backbone.named_parameters()))
    assert torch.equal(trainer.model.head.weight, head)
    weights = [(name, weight) for name, weight in policy.named_weights() if "norm" not in name]
    with pytest.raises(ValueError, match=r"norm.weight is missing"):
        trainer.load_backbone(weights)
