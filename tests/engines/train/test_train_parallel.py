"""One, two and four ranks over gloo, in every layout, against one process. The ranks are started once for all tests of this file."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from grid import Grid, run_grid
from train_support import (
    AGGREGATIONS,
    VOCABULARY,
    algorithm,
    batch,
    critic,
    critic_batch,
    engine,
    largest_gap,
    load_state,
    ppo,
    save,
    saved,
    state_of,
    tiny_model,
    value_model,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolemesh.engines.train import Groups, Scorer, TrainEngine
from rolemesh.engines.train.groups import agree
from rolemesh.engines.train.placed import without_weights
from rolemesh.engines.train.weights import named_weights
from rolemesh.observe import Metrics

LAYOUTS = {
    "two ranks": (2, 1, "none"),
    "two shards": (2, 1, "fsdp"),
    "four shards": (4, 1, "fsdp"),
    "two rows of two, sharded": (4, 2, "fsdp"),
    "four ranks": (4, 1, "none"),
    "a row of two": (2, 2, "none"),
    "two rows of two": (4, 2, "none"),
}
"""Ranks, ranks of a row, sharding."""
FAST = list(LAYOUTS)[:4]
RESHARDED = [("two shards", "two rows of two, sharded"), ("two rows of two, sharded", "two ranks"), ("two ranks", "four shards")]
"""From 2 to 4 ranks and back, with and without parts of either kind."""
EVERY_LAYOUT = pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in FAST)]
)
SHARES = {
    "one each in turn": lambda rank, size: list(range(8))[rank::size],
    "all rows on the last rank": lambda rank, size: [5, 0, 7, 3, 1, 6, 2, 4] if rank == size - 1 else [],
}
"""Rows of the mini-batch that a row of ranks gets, in any order; some ranks have fewer micro-batches than others, or none."""
CUTS = {"8 rows padded": (8, False), "2 rows padded": (2, False), "2 rows packed": (2, True), "1 row packed": (1, True)}


def qwen() -> Qwen3ForCausalLM:
    """With norms of heads, biases, shared key heads, a tied output layer and a row for padding: what a plan has beside plain layers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=True, attention_bias=True, pad_token_id=3,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def gradients(trainer: TrainEngine, data, rows: list[int], mode: str = "token_mean", metrics: Metrics | None = None):
    prepared = algorithm(mode).prepare(data, Metrics()).take(rows)
    return trainer.compute_gradients(prepared, algorithm(mode).loss, temperature=1.0, metrics=metrics or Metrics())


def update(trainer: TrainEngine, data, rows: list[int], metrics: Metrics) -> None:
    trainer.update(data.take(rows), algorithm().loss, temperature=1.0, metrics=metrics)


def of_layout(grid: Grid, name: str) -> dict:
    """Everything that one layout is asked for on this rank."""
    size, tensor, sharding = LAYOUTS[name]
    groups, data, found = grid.groups(size, tensor), batch(), {"gradients": {}, "metrics": {}}
    rank, ranks = groups.rank // tensor, size // tensor
    trainer = engine(rows=2, sharding=sharding, activation_checkpointing=name == "four shards", weights=weights_of(tiny_model()))
    trainer.join(groups)
    for mode in AGGREGATIONS:
        for share, rows in SHARES.items():
            metrics = found["metrics"][mode, share] = Metrics()
            found["gradients"][mode, share] = gradients(trainer, data, rows(rank, ranks), mode, metrics)
    mine = SHARES["one each in turn"](rank, ranks)
    found["logprobs"] = dict(zip(mine, trainer.logprobs(data.take(mine), 0.7), strict=True))
    found["updates"] = Metrics()
    for _ in range(2):
        update(trainer, data, mine, found["updates"])
    found["memory"], found["freed"] = trainer.memory(), trainer.sleep()
    found["asleep"] = trainer.memory()
    trainer.leave()  # the groups are gone: formed anew, they go on from what this rank kept
    trainer.join(grid.groups(size, tensor))
    update(trainer, data, mine, found["updates"])
    found["weights"] = {key: weight.clone() for key, weight in trainer.named_weights()}
    found["step"] = trainer.step
    save_together(trainer, grid.folder / name)
    skipped = found["skipped"] = Metrics()
    update(trainer, data.with_columns({"token_weight": np.zeros(8)}), mine, skipped)
    broken = data.with_columns({"rollout_logprobs": [[float("nan")] * len(row) for row in data.rows("response_ids")]})
    update(trainer, broken, [0] if rank == ranks - 1 else [], skipped)
    return found | of_critic(grid.groups(size, tensor), sharding) | of_qwen(grid.groups(size, tensor), sharding)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """An engine that is given them is set up once, by `join`, instead of before that as well."""
    return dict(named_weights(model))


def save_together(trainer: TrainEngine, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save(trainer, folder)
    agree(trainer.groups.world, 0, torch.device("cpu"))  # all have written


def resharded(grid: Grid, source: str, target: str) -> dict:
    """Gradient of a replica of one layout that goes on from what another has saved."""
    size, tensor, sharding = LAYOUTS[target]
    groups = grid.groups(size, tensor)
    trainer = engine(tiny_model(seed=5), rows=2, sharding=sharding)
    trainer.join(groups)
    load_state(trainer, grid.folder / source, 3)
    trainer.check_replicas()
    save_together(trainer, grid.folder / f"{source} to {target}")
    return gradients(trainer, batch(), SHARES["one each in turn"](groups.rank // tensor, size // tensor))


def of_critic(groups: Groups, sharding: str) -> dict:
    data, metrics = critic_batch(), Metrics()
    rank, ranks = groups.rank // groups.tensor_size, groups.data_size
    mine = SHARES["all rows on the last rank"](rank, ranks)
    trainer = critic(rows=2, sharding=sharding, weights=weights_of(value_model()))
    trainer.join(groups)
    found = {"values": dict(zip(mine, trainer.values(data.take(mine)), strict=True))}
    found["value_gradients"] = trainer.compute_gradients(data.take(mine), ppo().value_loss, metrics=Metrics())
    trainer.update(data.take(mine), ppo().value_loss, metrics=metrics)
    trainer.load_backbone(passing(tiny_model(seed=3)))
    return found | {"value_metrics": metrics, "value_weights": dict(trainer.named_weights())}


def passing(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights one after the other: who takes them holds the last one alone, of which the next one may take the place."""
    given: list[weakref.ref] = []
    for name, weight in model.state_dict().items():
        memory = weight.numpy().copy()
        given.append(weakref.ref(memory))
        yield name, torch.from_numpy(memory)
        memory.fill(np.nan)
        assert all(one() is None for one in given[:-1]), f"weights before {name} are held still"


def of_qwen(groups: Groups, sharding: str) -> dict:
    trainer = engine(qwen(), rows=2, sharding=sharding, weights=weights_of(qwen()))
    trainer.join(groups)
    mine = SHARES["one each in turn"](groups.rank // groups.tensor_size, groups.data_size)
    return {"qwen": gradients(trainer, batch(), mine)}


def slow_main(grid: Grid) -> dict:
    return {name: of_layout(grid, name) for name in LAYOUTS if name not in FAST}


def rank_main(grid: Grid) -> dict:
    found: dict = {name: of_layout(grid, name) for name in FAST}
    for source, target in RESHARDED:
        found[f"{source} to {target}"] = resharded(grid, source, target)
    pair = grid.groups(2)
    for cut, (rows, packing) in CUTS.items():
        trainer = engine(rows=rows, packing=packing)
        trainer.join(pair)
        found[cut] = gradients(trainer, batch(), SHARES["one each in turn"](pair.rank, 2))
    for sharding in ("none", "fsdp"):
        trainer = engine(compute_dtype=torch.bfloat16, sharding=sharding)
        trainer.join(pair)
        found["bfloat16", sharding] = gradients(trainer, batch(), SHARES["one each in turn"](pair.rank, 2))
    found["other weights"] = refusal(lambda: engine(tiny_model(seed=pair.rank)).join(pair))
    trainer = engine(sharding="fsdp")
    trainer.join(pair)
    read = engine(without_weights(tiny_model(seed=5)), weights=dict(tiny_model().named_parameters()), sharding="fsdp")
    read.join(pair)
    found["read in parts"] = [dict(one.named_weights()) for one in (trainer, read)]
    found["scorer"] = of_scorer(pair, grid.groups(2))
    found["other ranks"] = refusal(lambda: trainer.join(grid.groups(4)))
    return found


def of_scorer(pair: Groups, other: Groups) -> dict:
    """A sharded reference, read in parts, set up twice, and then with other weights."""
    mine = batch().take(SHARES["all rows on the last rank"](pair.rank, 2))
    weights = dict(tiny_model().named_parameters())
    scorer = Scorer(without_weights(tiny_model(seed=5)), weights=weights, micro_batch_tokens=24, sharding="fsdp")
    scorer.join(pair)
    found = {"logprobs": [scorer.logprobs(mine, 0.7)], "bytes": scorer.memory()}
    scorer.leave()
    scorer.join(other)
    found["logprobs"].append(scorer.logprobs(mine, 0.7))
    found["weights"] = dict(scorer.named_weights())
    scorer.load_weights(passing(tiny_model(seed=3)))
    found["refused"] = refusal(lambda: scorer.load_weights({}.items()))
    return found | {"taken": scorer.logprobs(mine, 0.7)}


def refusal(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grid")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict]:
    return run_grid(rank_main, 4, folder)


@pytest.fixture(scope="module")
def slow_ranks(folder: Path) -> list[dict]:
    (folder / "store").unlink(missing_ok=True)  # of other ranks
    return run_grid(slow_main, 4, folder)


@pytest.fixture
def found(request: pytest.FixtureRequest, name: str) -> list[dict]:
    """What the first group of ranks found in the layout of this name."""
    ranks = request.getfixturevalue("ranks" if name in FAST else "slow_ranks")
    return [one[name] for one in ranks[: LAYOUTS[name][0]]]


def merged(metrics: list[Metrics]) -> dict[str, float]:
    whole = Metrics()
    for one in metrics:
        whole.merge(one)
    return whole.reduce()


def assert_same(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


@EVERY_LAYOUT
def test_C01_C04_D09_D13_gradient_and_metrics_are_those_of_one_rank(found: list[dict], name: str):
    tolerance = 1e-5 if "row" in name else 1e-6
    for mode in AGGREGATIONS:
        metrics = Metrics()
        alone = gradients(engine(), batch(), list(range(8)), mode, metrics)
        for share in SHARES:
            for rank in found:
                assert largest_gap(alone, rank["gradients"][mode, share]) < tolerance, (mode, share)
            assert_same(merged([rank["metrics"][mode, share] for rank in found]), metrics.reduce())


@EVERY_LAYOUT
def test_weights_after_three_steps_are_those_of_one_rank_also_when_it_slept_and_left(found: list[dict], folder: Path, name: str):
    trainer, metrics = engine(), Metrics()
    for _ in range(3):
        update(trainer, batch(), list(range(8)), metrics)
    tolerance = 1e-5 if "row" in name else 1e-6
    for rank in found:
        assert rank["step"] == 3
        for key, weight in trainer.named_weights():
            assert torch.allclose(rank["weights"][key], weight, rtol=0, atol=tolerance), key
    written = saved(folder / name)
    for key, tensor in state_of(trainer).items():
        assert torch.allclose(written[key], tensor, rtol=1e-3, atol=1e-6), key
    for key, weight in found[0]["weights"].items():
        assert torch.equal(written[key], weight), key
    assert_same(merged([rank["updates"] for rank in found]), metrics.reduce())


@EVERY_LAYOUT
def test_G08_one_process_goes_on_from_what_several_ranks_have_saved(found: list[dict], folder: Path, name: str):
    alone = engine(tiny_model(seed=5))
    load_state(alone, folder / name, 3)
    assert_equal(state_of(alone), saved(folder / name))


@pytest.mark.parametrize(("source", "target"), RESHARDED)
def test_G08_state_is_the_same_on_other_ranks_and_so_is_the_next_gradient(ranks: list[dict], folder: Path, source: str, target: str):
    assert_equal(saved(folder / f"{source} to {target}"), saved(folder / source))
    alone = engine(tiny_model(seed=5))
    load_state(alone, folder / source, 3)
    expected = gradients(alone, batch(), list(range(8)))
    for rank in ranks[: LAYOUTS[target][0]]:
        assert largest_gap(expected, rank[f"{source} to {target}"]) < 1e-5


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@EVERY_LAYOUT
def test_logprobs_and_values_are_those_of_one_rank(found: list[dict], name: str):
    logprobs, values = engine().logprobs(batch(), 0.7), critic().values(critic_batch())
    for rank in found:
        for row, mine in rank["logprobs"].items():
            assert mine == pytest.approx(logprobs[row], abs=1e-5)
        for row, mine in rank["values"].items():
            assert mine == pytest.approx(values[row], abs=1e-5)


@EVERY_LAYOUT
def test_critic_learns_as_on_one_rank(found: list[dict], name: str):
    data, trainer, metrics = critic_batch(), critic(), Metrics()
    alone = trainer.compute_gradients(data, ppo().value_loss, metrics=Metrics())
    trainer.update(data, ppo().value_loss, metrics=metrics)
    for rank in found:
        assert largest_gap(alone, rank["value_gradients"]) < (1e-5 if "row" in name else 1e-6)
        body = tiny_model(seed=3).model.state_dict()
        assert all(torch.equal(rank["value_weights"][f"backbone.{key}"], weight) for key, weight in body.items())
    assert_same(merged([rank["value_metrics"] for rank in found]), metrics.reduce())


@EVERY_LAYOUT
def test_model_with_norms_of_heads_biases_and_tied_weights_is_split_and_sharded_alike(found: list[dict], name: str):
    alone = gradients(engine(qwen()), batch(), list(range(8)))
    for rank in found:
        assert largest_gap(alone, rank["qwen"]) < 1e-5


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_of_two_ranks_does_not_depend_on_micro_batches_or_packing(ranks: list[dict], cut: str):
    alone = gradients(engine(), batch(), list(range(8)))
    assert all(largest_gap(alone, found[cut]) < 1e-6 for found in ranks)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_products_in_bfloat16_give_gradients_in_float32_that_are_near(ranks: list[dict], sharding: str):
    alone = gradients(engine(), batch(), list(range(8)))
    for found in ranks:
        gap = largest_gap(alone, found["bfloat16", sharding])
        assert 1e-5 < gap < 0.05  # rounded to 8 bits
        assert all(gradient.dtype == torch.float32 for gradient in found["bfloat16", sharding].values())


@EVERY_LAYOUT
def test_a_bad_step_of_one_rank_is_left_out_by_all_and_counted_once(found: list[dict], name: str):
    skipped = merged([rank["skipped"] for rank in found])
    assert skipped["actor/steps_skipped_empty"] == 1
    assert skipped["actor/steps_skipped_nonfinite"] == 1


@pytest.mark.parametrize(("name", "share"), [("two ranks", 1), ("two shards", 2), ("four shards", 4)])
def test_memory_of_a_rank_is_its_share_and_sleep_drops_what_can_be_computed_again(found: list[dict], name: str, share: int):
    # Per layer q, k, v, o of 16 x 16, three matrices of 16 x 32 and two norms of 16; embedding and head of 24 x 16, a norm of 16.
    parameters = 2 * (4 * 256 + 3 * 512 + 2 * 16) + 2 * 384 + 16
    for rank in found:
        memory = rank["memory"]
        assert memory["weights"] == memory["gradients"] == 4 * parameters // share
        assert memory["optimizer"] == 8 * parameters // share + 4 * 21  # a step for each of the 21 parameters
        assert rank["freed"] == memory["gradients"]
        assert rank["asleep"] == {"weights": 0, "gradients": 0, "optimizer": 0, "asleep": memory["weights"] + memory["optimizer"]}


def test_weights_can_be_read_in_parts_when_the_ranks_have_met(ranks: list[dict]):
    for found in ranks:
        first, second = found["read in parts"]
        assert first.keys() == second.keys()
        assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_a_sharded_reference_is_a_whole_one_to_the_last_bit(ranks: list[dict]):
    whole = dict(tiny_model().named_parameters())
    for rank, found in enumerate(one["scorer"] for one in ranks[:2]):
        mine = batch().take(SHARES["all rows on the last rank"](rank, 2))
        for seed, logprobs in ((0, found["logprobs"][0]), (0, found["logprobs"][1]), (3, found["taken"])):
            expected = Scorer(tiny_model(seed=seed), micro_batch_tokens=24).logprobs(mine, 0.7)
            assert len(logprobs) == len(expected) == len(mine)
            assert all(np.array_equal(row, other) for row, other in zip(logprobs, expected, strict=True))
        assert found["weights"].keys() == whole.keys()
        assert all(torch.equal(found["weights"][name], weight) for name, weight in whole.items())
        assert "lm_head.weight is missing" in found["refused"]
    assert sum(one["scorer"]["bytes"] for one in ranks[:2]) == 4 * sum(weight.numel() for weight in whole.values())
    assert ranks[0]["scorer"]["bytes"] < 0.6 * 4 * sum(weight.numel() for weight in whole.values())


def test_ranks_that_hold_other_weights_or_other_parts_are_refused(ranks: list[dict]):
    assert all("the workers hold different weights" in found["other weights"] for found in ranks)
    assert all("it was formed with other ranks than before" in found["other ranks"] for found in ranks)
