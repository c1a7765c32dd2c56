"""Tiny random models of several architectures, and the helpers that the rollout tests share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from rolemesh.protocols.engine import Completion, Request, RolloutEngine, Sampling

VOCABULARY = 61
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama_biases": lambda: LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True),
    "llama_scaled_rope": lambda: LlamaConfig(**_COMMON, rope_parameters=_LLAMA3_ROPE),
    "llama_wide_heads": lambda: LlamaConfig(**{**_COMMON, "num_key_value_heads": 4}, head_dim=16),
    "llama_odd": lambda: LlamaConfig(
        **{**_COMMON, "hidden_size": 120, "intermediate_size": 83, "num_attention_heads": 5, "num_key_value_heads": 1}
    ),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "qwen2_packed": lambda: Qwen2Config(**{**_COMMON, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}),
    "qwen3_tied": lambda: Qwen3Config(**_COMMON, head_dim=16, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    ),
    "mistral_sliding": lambda: MistralConfig(**_COMMON, sliding_window=8),
    "qwen2_sliding": lambda: Qwen2Config(**_COMMON, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "gemma2": lambda: Gemma2Config(
        **_COMMON, head_dim=8, sliding_window=8, attn_logit_softcapping=5.0, final_logit_softcapping=3.0, query_pre_attn_scalar=8
    ),
    "phi_partial_rotary": lambda: PhiConfig(**_COMMON, partial_rotary_factor=0.5),
    "bloom": lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None),
    "mixtral": lambda: MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "phi3_longrope": lambda: Phi3Config(**_COMMON, original_max_position_embeddings=16, rope_parameters=_LONGROPE),
    "llama_yarn": lambda: LlamaConfig(**_COMMON, rope_parameters=_YARN),
    "llama_one_kv_head": lambda: LlamaConfig(**{**_COMMON, "num_key_value_heads": 1}),
    "qwen3_biases": lambda: Qwen3Config(**_COMMON, head_dim=16, attention_bias=True),
    "llama_dynamic_rope": lambda: LlamaConfig(**_COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
}
WIDE = {"hidden_size": 128, "head_dim": 32}
"""Changes that give heads of a size that vLLM can compute with on CPUs."""
FAST = (
    "llama",
    "llama_biases",
    "llama_scaled_rope",
    "llama_wide_heads",
    "llama_odd",
    "qwen2",
    "qwen2_packed",  # large enough for the layout of oneDNN, with biases and without
    "qwen3_tied",
    "llama_yarn",
    "llama_one_kv_head",
    "qwen3_biases",
)
GENERIC = (
    *("gpt2", "mistral_sliding", "qwen2_sliding", "llama_dynamic_rope", "gemma2", "phi_partial_rotary", "bloom"),
    pytest.param("mixtral", marks=pytest.mark.slow),
)


def make_model(kind: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Every parameter is random, norms and biases too, and large enough that distributions are far from flat."""
    return copy.deepcopy(_make_model(kind, seed, tuple(changes.items())))


@functools.cache
def _make_model(kind: str, seed: int, changes: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    config = CONFIGS[kind]()
    for key, value in changes:
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            base = 1.0 if ("norm" in name or "ln_" in name) and kind != "gemma2" else 0.0  # whose norms add 1 themselves
            spread = 0.25 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            torch.nn.init.normal_(parameter.data, base if name.endswith("weight") else 0.0, spread)
    return model


def sampling(**changes: Any) -> Sampling:
    settings: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12, "stop_token_ids": (), "seed": 7}
    return Sampling(**{**settings, **changes})


def make_requests(prompts: int, samples: int = 1, longest: int = 9, seed: int = 3) -> list[Request]:
    """Random prompts of 1 to `longest` tokens; the answers to one prompt follow each other."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (prompts,), generator=generator).tolist()
    ids = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [Request(id=(draw, sample), prompt_ids=ids[draw]) for draw in range(prompts) for sample in range(samples)]


def drain(engine: RolloutEngine) -> list[Completion]:
    """Step until nothing is left."""
    done: list[Completion] = []
    for _ in range(10_000):
        if not engine.unfinished:
            return done
        done += engine.step()
    raise AssertionError(f"{engine.unfinished} requests are still unfinished")


def generate(engine: RolloutEngine, requests: Iterable[Request], settings: Sampling) -> dict[tuple[int, int], Completion]:
    engine.add(list(requests), settings)
    return {completion.id: completion for completion in drain(engine)}


@torch.no_grad()
def forward_logprobs(model: PreTrainedModel, prompt: Iterable[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """What a trainer computes: one plain forward over prompt and answer, log-softmax after temperature."""
    prompt = list(prompt)
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def largest_gap(
    model: PreTrainedModel, requests: Iterable[Request], done: dict[tuple[int, int], Completion], temperature: float = 1.0
) -> float:
    """Between the log-probabilities of the answers and those that a trainer computes."""
    prompts = {request.id: request.prompt_ids for request in requests}
    return max(
        (forward_logprobs(model, prompts[id], completion.token_ids, temperature) - torch.tensor(completion.logprobs)).abs().max().item()
        for id, completion in done.items()
    )
