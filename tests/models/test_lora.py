"""Adapters against `peft` itself: what they compute, how they merge, and that it loads what was saved."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rolemesh.config.schema import LoraConfig, ModelConfig
from rolemesh.engines.train.placed import without_weights
from rolemesh.engines.train.weights import named_weights
from rolemesh.errors import ConfigError
from rolemesh.models import load_model
from rolemesh.models.lora import (
    AdapterMerge,
    adapted_names,
    adapter_off,
    add_adapter,
    check_lora,
    is_adapter,
    merged_weights,
    save_adapter_config,
    saved_name,
    without_adapter,
)

IDS = torch.arange(12)[None]
FEW = LoraConfig(rank=3, alpha=6, target_modules=("q_proj", "v_proj", "down_proj"))


def llama(*, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.1, tie_word_embeddings=tied, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> PreTrainedModel:
    """With layers that keep their weights transposed, and a tied output layer."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.1)).eval()


def adapted(make=llama, lora: LoraConfig | None = None, **options) -> PreTrainedModel:
    """With an adapter that changes something."""
    model = make(**options)
    add_adapter(model, lora or LoraConfig(rank=4, alpha=6), seed=1, base="somewhere")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def merged(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    weights = dict(named_weights(model))
    plain = without_adapter(without_weights(model))
    names, take = [name for name, _ in named_weights(plain)], weights.__getitem__
    found = list(merged_weights(model, names, weight=take, whole=take))
    assert [inside.replace(".base_layer", "") for _, inside, _ in found] == names
    return {name: merge() for name, _, merge in found}


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_new_adapter_changes_no_bit_and_alone_is_trained(make):
    plain, model = make(), make()
    add_adapter(model, LoraConfig(rank=4), seed=1)
    assert torch.equal(logits(model), logits(plain))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in dict(named_weights(model)) if is_adapter(name)}
    layers = {name.rpartition(".lora_")[0] for name in trained}
    assert len(layers) == (14 if make is llama else 8), "all linear layers but the output layer"
    assert len(trained) == 2 * len(layers)


def test_an_adapter_depends_on_the_seed_alone():
    first, second, other = llama(), without_weights(llama()), llama()
    before = torch.random.get_rng_state()
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        add_adapter(model, FEW, seed=seed)
    assert torch.equal(before, torch.random.get_rng_state())
    one, two, three = ({name: weight for name, weight in named_weights(model) if "lora_A" in name} for model in (first, second, other))
    assert one.keys() == two.keys() == three.keys()
    assert len(one) == 6
    assert all(torch.equal(one[name], two[name]) and not torch.equal(one[name], three[name]) for name in one)
    named = adapted_names(second, {name: name for name, _ in named_weights(llama())})
    assert named.keys() == dict(named_weights(first)).keys()
    assert named["model.layers.1.mlp.down_proj.base_layer.weight"] == "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("make", [llama, gpt2])
def test_switched_off_it_is_the_model_below_to_the_last_bit(make):
    plain, model = logits(make()), adapted(make)
    with_adapter = logits(model)
    assert (with_adapter - plain).abs().max() > 0.1
    with adapter_off(model):
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), with_adapter)


@pytest.mark.parametrize(("make", "options"), [(llama, {}), (llama, {"tied": True}), (gpt2, {})])
def test_merged_weights_compute_the_same_and_the_models_own_stay(make, options):
    plain, model = make(**options), adapted(make, **options)
    before = {name: weight.clone() for name, weight in named_weights(model)}
    found = merged(model)
    assert {name: weight.shape for name, weight in found.items()} == {name: weight.shape for name, weight in named_weights(plain)}
    assert all(torch.equal(weight, before[name]) for name, weight in named_weights(model))
    plain.load_state_dict(found, strict=False)
    assert (logits(plain) - logits(model)).abs().max() < 1e-5
    assert without_adapter(plain) is plain


def test_merged_weights_by_hand():
    """W + (alpha / rank) B A, and only there."""
    plain, model = dict(named_weights(llama())), adapted(lora=FEW)
    own, found = dict(named_weights(model)), merged(model)
    layer = "model.layers.0.mlp.down_proj"
    expected = plain[f"{layer}.weight"] + 6 / 3 * own[f"{layer}.lora_B.default.weight"] @ own[f"{layer}.lora_A.default.weight"]
    assert torch.allclose(found[f"{layer}.weight"], expected, rtol=0, atol=1e-6)
    changed = {name for name in found if not torch.equal(found[name], plain[name])}
    assert changed == {name for name in plain if any(f"{target}.weight" in name for target in FEW.target_modules)}


@pytest.mark.parametrize(("make", "lora"), [(llama, None), (llama, FEW), (gpt2, None)])
def test_peft_loads_a_saved_adapter(make, lora: LoraConfig | None, tmp_path: Path):
    model = adapted(make, lora)
    save_file(
        {saved_name(name): weight for name, weight in named_weights(model) if is_adapter(name)}, tmp_path / "adapter_model.safetensors"
    )
    save_adapter_config(tmp_path, without_weights(model))
    loaded = PeftModel.from_pretrained(make(), str(tmp_path)).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.peft_config["default"].base_model_name_or_path == "somewhere"
    for name, weight in loaded.merge_and_unload().state_dict().items():
        assert torch.allclose(weight, merged(model).get(name, weight), rtol=0, atol=1e-6), name
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 2 * len(
        [name for name in dict(named_weights(model)) if "lora_A" in name]
    )


@pytest.mark.parametrize(
    ("target", "hint"), [("q_prj", "'q_proj'"), ("lm_head", "all-linear"), ("embed_tokens", "all-linear"), ("mlp", "all-linear")]
)
def test_layers_that_cannot_have_one_are_refused_with_those_that_can(target: str, hint: str):
    with pytest.raises(ConfigError, match="down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj") as error:
        check_lora(ModelConfig(lora=LoraConfig(target_modules=("v_proj", target))))
    assert repr(target) in str(error.value)
    assert hint in str(error.value)
    check_lora(ModelConfig(lora=LoraConfig(target_modules=("v_proj", "layers.0.mlp.up_proj"))))
    check_lora(ModelConfig())


def test_the_model_below_is_loaded_as_without_an_adapter():
    assert (
        dict(load_model(ModelConfig(lora=FEW), seed=0).named_parameters()).keys()
        == dict(load_model(ModelConfig(), seed=0).named_parameters()).keys()
    )


@pytest.mark.parametrize(("make", "options"), [(llama, {}), (llama, {"tied": True}), (gpt2, {})])
def test_an_adapter_merged_elsewhere_has_the_same_bits_after_every_change_and_never_drifts(tmp_path: Path, make, options):
    lora = LoraConfig(rank=2, alpha=6)
    model = adapted(make, lora, **options)
    make(**options).save_pretrained(tmp_path)
    merge = AdapterMerge(ModelConfig(path=str(tmp_path), lora=lora))

    def current(*, adapter_only: bool) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in named_weights(model) if not adapter_only or is_adapter(name)}

    with pytest.raises(ValueError, match="does not have the model's own weights"):
        list(merge(current(adapter_only=True).items()))
    start, first = merged(model), current(adapter_only=False)
    for step in range(5):
        given = current(adapter_only=step > 0)
        found = {name: weight.clone() for name, weight in merge(given.items())}
        [weight.fill_(torch.nan) for weight in given.values()]  # only valid until the next is asked for
        expected = merged(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items()), step
        assert step == 0 or any(not torch.equal(found[name], weight) for name, weight in start.items())
        with torch.no_grad():
            [weight.mul_(1.3) for name, weight in model.named_parameters() if is_adapter(name)]
    with torch.no_grad():
        [weight.copy_(first[name]) for name, weight in model.named_parameters()]
    back = dict(merge(current(adapter_only=True).items()))
    assert all(torch.equal(back[name], weight) for name, weight in start.items()), "from the model's own weights, whatever came between"
