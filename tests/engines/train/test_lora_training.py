"""Training an adapter: gradients for every cut and layout, what a step changes, the reference below it, and published weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from grid import Grid, run_grid
from safetensors.torch import load_file
from train_support import AGGREGATIONS, algorithm, batch, engine, largest_gap, tiny_model

from rolemesh.batch import Batch
from rolemesh.config.schema import LoraConfig
from rolemesh.engines.rollout import create_engine
from rolemesh.engines.train import OptimizerSettings, Scorer, TrainEngine
from rolemesh.engines.train.groups import agree
from rolemesh.engines.train.placed import without_weights
from rolemesh.engines.train.weights import named_weights
from rolemesh.models import lora
from rolemesh.models.lora import adapted_names, add_adapter, is_adapter
from rolemesh.observe import Metrics
from rolemesh.protocols.engine import Request, Sampling

LORA = LoraConfig(rank=4, alpha=8)
LAYOUTS = {"two ranks": (2, "none"), "two shards": (2, "fsdp"), "four shards": (4, "fsdp"), "four ranks": (4, "none")}
"""Ranks, sharding."""
EVERY_LAYOUT = pytest.mark.parametrize(
    "name", [name if ranks == 2 else pytest.param(name, marks=pytest.mark.slow) for name, (ranks, _) in LAYOUTS.items()]
)
CUTS = {
    "4 rows padded": (4, False),
    "2 rows padded": (2, False),
    "1 row padded": (1, False),
    "4 rows packed": (4, True),
    "1 row packed": (1, True),
}


def adapted(seed: int = 1, *, fresh: bool = False) -> torch.nn.Module:
    """With an adapter whose B is not 0, or A would have no gradient."""
    model = tiny_model()
    add_adapter(model, LORA, seed=seed)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and not fresh:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def gradients(trainer: TrainEngine, data: Batch, mode: str = "token_mean") -> dict[str, torch.Tensor]:
    prepared = algorithm(mode).prepare(batch(), Metrics())
    prepared = prepared.take([int(np.flatnonzero((prepared.ids == row).all(1))[0]) for row in data.ids])
    return trainer.compute_gradients(prepared, algorithm(mode).loss, temperature=1.0, metrics=Metrics())


def update(trainer: TrainEngine, data: Batch) -> dict[str, float]:
    metrics = Metrics()
    trainer.update(data, algorithm().loss, temperature=1.0, metrics=metrics)
    return dict(metrics.reduce())


def copied(trainer: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.named_weights()}


def plain_reference(data: Batch) -> list[np.ndarray]:
    return Scorer(tiny_model(), micro_batch_tokens=24).logprobs(data, 0.7)


def of_layout(grid: Grid, name: str) -> dict:
    size, sharding = LAYOUTS[name]
    groups, data = grid.groups(size), batch()
    mine = data.take(list(range(8))[groups.rank :: size])
    empty = without_weights(adapted())
    read = adapted_names(empty, dict(tiny_model().named_parameters())) | {n: w for n, w in adapted().named_parameters() if is_adapter(n)}
    options = {"weights": read} if sharding == "fsdp" else {}
    trainer = engine(empty if options else adapted(), rows=2, sharding=sharding, activation_checkpointing=name == "four shards", **options)
    trainer.join(groups)
    found: dict = {"gradients": {mode: gradients(trainer, mine, mode) for mode in AGGREGATIONS}}
    found["reference"] = trainer.reference_logprobs(mine, 0.7)
    found["expected reference"] = plain_reference(mine)
    found["logprobs"] = dict(zip(map(tuple, mine.ids.tolist()), trainer.logprobs(mine, 0.7), strict=True))
    trainer.keep_reference()
    for _ in range(3):
        found["metrics"] = update(trainer, mine)
    found["memory"], found["weights"] = trainer.memory(), copied(trainer)
    found["kept"] = [trainer.reference_logprobs(mine, 0.7), [found["logprobs"][tuple(row)] for row in mine.ids.tolist()]]
    found["after"] = copied(trainer)
    trainer.sleep()
    found["merged"] = dict(trainer.merged_weights())
    found["adapter"] = trainer.adapter_weights()
    folder = Path(grid.folder) / name
    folder.mkdir(exist_ok=True)
    merged, moments = trainer.files()
    for file, path in ((merged, "merged"), (moments, "moments"), (trainer.adapter_file(), "adapter")):
        file.write(folder / path)
    agree(trainer.groups.world, 0, torch.device("cpu"))  # all have written
    trainer.check_below_adapter(folder / "merged")
    return found | {"folder": folder}


def rank_main(grid: Grid) -> dict:
    return {name: of_layout(grid, name) for name, (size, _) in LAYOUTS.items() if size == grid.size}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_grid(rank_main, 2, tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_grid(rank_main, 4, tmp_path_factory.mktemp("grid"))


@pytest.fixture
def found(request: pytest.FixtureRequest, name: str) -> list[dict]:
    """What each rank of the layout of this name found."""
    return [one[name] for one in request.getfixturevalue("pair" if LAYOUTS[name][0] == 2 else "four")]


@pytest.fixture(scope="module")
def alone() -> dict:
    """One process, one pass."""
    data, trainer = batch(), engine(adapted())
    found: dict = {"gradients": {mode: gradients(trainer, data, mode) for mode in AGGREGATIONS}}
    found["logprobs"] = dict(zip(map(tuple, data.ids.tolist()), trainer.logprobs(data, 0.7), strict=True))
    for _ in range(3):
        found["metrics"] = update(trainer, data)
    return found | {"memory": trainer.memory(), "weights": copied(trainer), "merged": dict(trainer.merged_weights())}


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_does_not_depend_on_micro_batches_or_packing(alone: dict, cut: str):
    rows, packing = CUTS[cut]
    for mode in AGGREGATIONS:
        found = gradients(engine(adapted(), rows=rows, packing=packing), batch(), mode)
        assert largest_gap(found, alone["gradients"][mode]) < 1e-6
    assert len(found) == 2 * 14
    assert min(float(gradient.abs().max()) for gradient in found.values()) > 0


def test_products_in_bfloat16_give_gradients_in_float32_that_are_near(alone: dict):
    found = gradients(engine(adapted(), compute_dtype=torch.bfloat16), batch())
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert 1e-4 < largest_gap(found, alone["gradients"]["token_mean"]) < 0.05


def test_gradient_is_that_of_the_merged_weights():
    """By the chain rule: with G the gradient of W + s B A, that of B is s G A^T and that of A is s B^T G."""
    data, trainer, plain = batch(), engine(adapted()), tiny_model()
    plain.load_state_dict(dict(trainer.merged_weights()))
    found, whole, own = gradients(trainer, data), gradients(engine(plain), data), copied(trainer)
    expected = {}
    for name in (name.removesuffix(".lora_A.default.weight") for name in found if "lora_A" in name):
        a, b = f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight"
        expected |= {a: 2 * own[b].T @ whole[f"{name}.weight"], b: 2 * whole[f"{name}.weight"] @ own[a].T}
    assert largest_gap(found, expected) < 1e-6


def test_first_step_by_hand_changes_the_adapter_alone():
    """AdamW's first step is the learning rate against the sign of the gradient. A fresh adapter moves B alone, since A's gradient is 0."""
    data, trainer = batch(), engine(adapted(fresh=True), learning_rate=1e-3)
    gradient, before = gradients(trainer, data), copied(trainer)
    metrics = update(trainer, data)
    after = copied(trainer)
    for name in before:
        if "lora_B" in name:
            clear = gradient[name].abs() > 1e-5  # AdamW's epsilon hides smaller ones
            step = (after[name] - before[name])[clear]
            assert torch.allclose(step, -1e-3 * gradient[name][clear].sign(), rtol=2e-3, atol=0), name
            assert clear.float().mean() > 0.5, name
        else:
            assert torch.equal(after[name], before[name]), name
    norm = torch.cat([one.flatten() for one in gradient.values()]).norm()
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    update(trainer, data)
    assert all(torch.equal(weight, before[name]) for name, weight in copied(trainer).items() if not is_adapter(name))
    assert all(not torch.equal(weight, before[name]) for name, weight in copied(trainer).items() if is_adapter(name))


@EVERY_LAYOUT
def test_every_layout_trains_as_one_process(found: list[dict], alone: dict, name: str):
    for mine in found:
        for mode in AGGREGATIONS:
            assert largest_gap(mine["gradients"][mode], alone["gradients"][mode]) < 1e-6, mode
        for row, logprobs in mine["logprobs"].items():
            assert logprobs == pytest.approx(alone["logprobs"][row], abs=1e-5)
        assert mine["weights"].keys() == alone["weights"].keys()
        for weight, expected in ((mine["weights"], alone["weights"]), (mine["merged"], alone["merged"])):
            assert max(float((weight[key] - expected[key]).abs().max()) for key in expected) < 2e-6
        assert mine["adapter"].keys() == {key for key in alone["weights"] if is_adapter(key)}
        assert all(torch.equal(mine["adapter"][key], mine["weights"][key]) for key in mine["adapter"])
    first = found[0]["metrics"]
    assert first["actor/grad_norm"] == pytest.approx(alone["metrics"]["actor/grad_norm"], rel=1e-5)


@EVERY_LAYOUT
def test_files_of_every_layout_are_resumed_by_one_process_and_hold_merged_weights(found: list[dict], name: str):
    folder, other = found[0]["folder"], engine(adapted(seed=3))
    merged = load_file(folder / "merged")
    assert merged.keys() == found[0]["merged"].keys()
    assert all(torch.equal(merged[key], weight) for key, weight in found[0]["merged"].items())
    other.load_files(folder / "adapter", folder / "moments", 3)
    assert all(torch.equal(weight, found[0]["weights"][key]) for key, weight in copied(other).items())


@EVERY_LAYOUT
def test_reference_is_a_copy_of_the_model_below_to_the_last_bit(found: list[dict], name: str):
    for mine in found:
        for logprobs, expected in zip(mine["reference"], mine["expected reference"], strict=True):
            assert np.array_equal(logprobs, expected)
        for kept, expected in zip(*mine["kept"], strict=True):  # the adapter as it was
            assert np.array_equal(kept, expected)
        assert all(torch.equal(mine["after"][key], weight) for key, weight in mine["weights"].items())


@EVERY_LAYOUT
def test_gradients_and_moments_are_those_of_the_adapter_alone(found: list[dict], alone: dict, name: str):
    size, sharding = LAYOUTS[name]
    weights = {key: weight.numel() for key, weight in alone["weights"].items()}
    adapter = sum(count for key, count in weights.items() if is_adapter(key))
    assert alone["memory"]["gradients"] == 4 * adapter
    assert alone["memory"]["weights"] == 4 * sum(weights.values())
    shares = [mine["memory"] for mine in found]
    copies = 1 if sharding == "fsdp" else size
    assert sum(share["gradients"] for share in shares) == 4 * adapter * copies
    assert sum(share["weights"] for share in shares) == 4 * sum(weights.values()) * copies
    moments = sum(share["optimizer"] for share in shares) - 8 * adapter * copies
    assert 0 <= moments <= 4 * 28 * size, "and one step number of each"


def test_files_bring_back_adapter_reference_and_what_follows(tmp_path: Path):
    data, trainer = batch(), engine(adapted())
    update(trainer, data)
    trainer.keep_reference()
    merged, moments = trainer.files()
    for name, file in (("merged", merged), ("moments", moments), ("adapter", trainer.adapter_file())):
        file.write(tmp_path / name)
    other = engine(adapted(seed=3))
    other.load_files(tmp_path / "adapter", tmp_path / "moments", trainer.step)
    other.take_reference(trainer.reference)
    other.check_below_adapter(tmp_path / "merged")
    elsewhere = adapted(seed=3)
    with torch.no_grad():
        elsewhere.get_parameter("model.norm.weight")[0] += 1e-3
    elsewhere = engine(elsewhere)
    elsewhere.load_files(tmp_path / "adapter", tmp_path / "moments", trainer.step)
    with pytest.raises(ValueError, match=r"not the one that it was trained on: 1 of its weights, such as model\.norm\.weight, differ"):
        elsewhere.check_below_adapter(tmp_path / "merged")
    expected = dict(trainer.merged_weights())
    found = load_file(tmp_path / "merged")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for one in (trainer, other):
        update(one, data)
    assert all(torch.equal(weight, copied(trainer)[name]) for name, weight in copied(other).items())
    for mine, theirs in zip(trainer.reference_logprobs(data, 1.0), other.reference_logprobs(data, 1.0), strict=True):
        assert np.array_equal(mine, theirs)
    with pytest.raises(ValueError, match=r"lora_A\.default\.weight is missing"):
        other.take_reference({})
    with pytest.raises(ValueError, match=r"lora_A\.default\.weight is missing"):
        other.load_files(tmp_path / "merged", tmp_path / "moments", 1)


def test_an_adapter_is_merged_weight_by_weight_when_its_file_is_copied_and_not_for_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, merge, merged = engine(adapted()), lora._merge, []
    monkeypatch.setattr(lora, "_merge", lambda *parts: merged.append(len(merged)) or merge(*parts))
    file, _ = trainer.files()
    size = file.size
    assert not merged
    copies = file.snapshot()
    assert len(merged) == 14
    copies.write(tmp_path / "merged")
    assert len(merged) == 14
    assert (tmp_path / "merged").stat().st_size == size
    assert load_file(tmp_path / "merged").keys() == dict(named_weights(tiny_model())).keys()


def test_F07_F08_rollout_has_the_trainers_logprobs_after_each_publication_and_the_base_stays():
    data, trainer = batch(noise=0.0), engine(adapted(fresh=True), optimizer=OptimizerSettings(learning_rate=3e-2))
    before, start = copied(trainer), trainer.logprobs(data, 1.0)
    served = create_engine("builtin", tiny_model(), slots=8, max_prompt_tokens=8, max_response_tokens=8, deterministic=True, device="cpu")
    for version in range(1, 4):
        update(trainer, data)
        own = copied(trainer)
        served.load_weights(trainer.merged_weights(), version)
        assert all(torch.equal(weight, own[name]) for name, weight in trainer.named_weights()), "publishing changed the model"
        prompts = data.rows("prompt_ids")
        served.add(
            [Request(id=(version, k), prompt_ids=prompt) for k, prompt in enumerate(prompts)],
            Sampling(temperature=0.8, max_new_tokens=6, stop_token_ids=(), seed=version, top_p=1.0, top_k=0),
        )
        done = {}
        while served.unfinished:
            done |= {completion.id[1]: completion for completion in served.step()}
        rows = [done[k] for k in range(len(prompts))]
        sampled = data.select(["prompt_ids"]).with_columns({"response_ids": [row.token_ids for row in rows]})
        for mine, row in zip(trainer.logprobs(sampled, 0.8), rows, strict=True):
            assert mine == pytest.approx(np.array(row.logprobs), abs=1e-5)
        for mine, row in zip(Scorer(tiny_model(), micro_batch_tokens=96).logprobs(sampled, 0.8), rows, strict=True):
            assert np.abs(mine - row.logprobs).max() > 1e-3, "the engine serves the model without its adapter"
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.named_weights() if not is_adapter(name))
    assert max(np.abs(one - two).max() for one, two in zip(start, trainer.logprobs(data, 1.0), strict=True)) > 0.01
    assert dict(trainer.empty_weights()).keys() == dict(named_weights(tiny_model())).keys()
