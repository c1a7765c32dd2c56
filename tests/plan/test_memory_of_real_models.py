"""The constants of the memory estimate against real models: what one layer keeps for backward, and the peak of the output layer.

Saved tensors and allocations are counted, so nothing depends on the machine.
"""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from rolemesh.config import Config, read_model_facts
from rolemesh.engines.train.forward import _logprobs_and_entropy
from rolemesh.plan.memory import _trained

ROWS, LENGTH = 4, 64
TOKENS = ROWS * LENGTH
FAMILIES = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"head_dim": 32, "num_key_value_heads": 2},
    "gemma2": {"head_dim": 32},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def kept_bytes(family: str, layers: int, half: bool, folder) -> tuple[int, int]:
    """(bytes that the layers keep from forward to backward beside parameters, parameters)."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = AutoConfig.for_model(family, **{**sizes, **tokens, **FAMILIES[family], "num_hidden_layers": layers})
    config.save_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # holding it keeps its address from being used again
        return tensor

    ids = torch.randint(0, 32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=half):
        model.base_model(input_ids=ids, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values()), sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_of_a_layer_are_estimated_above_the_truth_and_not_far(tmp_path, family, half):
    (small, few), (large, many) = (kept_bytes(family, layers, half, tmp_path) for layers in (1, 3))
    facts = read_model_facts(tmp_path)
    batch = {
        "model": {"dtype": "bfloat16" if half else "float32"},
        "data": {"max_prompt_tokens": LENGTH // 2, "max_response_tokens": LENGTH // 2},
        "trainer": {"prompts_per_step": ROWS, "micro_batch_tokens": TOKENS},
        "algorithm": {"group_size": 1},
    }
    estimate = _trained(Config.model_validate(batch), "actor", facts, 1)
    copies = (many - few) * 2 if half else 0  # of the parameters, which autocast keeps: a line of their own
    measured = large - small - copies
    assert measured <= 2 * estimate["activations"] / facts.layers  # of the two layers by which the models differ
    assert 2 * estimate["activations"] / facts.layers < 1.5 * measured


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_peak_of_the_output_layer_is_within_24_bytes_a_logit(half, temperature):
    tokens, vocabulary = 64, 4096
    hidden, head = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = torch.nn.functional.linear(hidden, head)
            logprobs, _ = _logprobs_and_entropy(logits, torch.zeros(tokens, dtype=torch.long), temperature)
        del logits
        logprobs.sum().backward()
    held = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 16 < peak / (tokens * vocabulary) < 24.5  # half a byte for everything of the size of tokens alone
