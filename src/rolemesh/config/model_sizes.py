"""Sizes of a language model, and its number of parameters from those in a `config.json`. Called by `model_files.py`.

Exact (a test compares them with the models that transformers builds) for llama, mistral, mixtral, qwen2, qwen3 and their mixtures of
experts, gemma 1 to 3, phi3, olmo2, granite, smollm3, cohere, glm4, stablelm, gpt2, gpt_neox, opt, phi and starcoder2; close for
others of the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

# Heads are tied in these when config.json is silent.
_TIED: Final = frozenset(
    ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_neo", "bloom", "opt", "cohere", "cohere2", "falcon", "starcoder2", "smollm3")
)
# Size of a head where config.json does not give one and hidden / heads is not it.
_HEAD_DIM: Final = {"gemma": 256, "gemma2": 256, "gemma3": 256, "gemma3_text": 256, "qwen3": 128, "qwen3_moe": 128, "glm4": 128}
# Norms of a layer, where they are not two.
_NORMS: Final = {"gemma2": 4, "gemma3": 4, "gemma3_text": 4, "glm4": 4, "cohere": 1, "cohere2": 1, "phi": 1, "olmo": 0}
_HEAD_NORMS: Final = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
"""One norm of queries and one of keys, of the size of a head."""
_WIDE_NORMS: Final = ("olmo2", "olmo3")
"""The same over all heads."""
_QUERY_BIAS: Final = ("qwen2", "qwen2_moe")
"""Biases on queries, keys and values, none on the output, whatever the config says."""
_PLAIN: Final = ("gpt2", "gpt_neo", "gpt_neox", "opt", "phi", "starcoder2", "bloom", "falcon")
"""Two-layer MLP, and layer norms with biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a decoder-only language model."""

    family: str
    """`model_type` of config.json, or `general.architecture` of a GGUF file."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    """Input and output embeddings are one tensor."""
    parameters: int
    """Number of parameters: exact for the architectures named above, an estimate for others."""
    active_parameters: int = 0
    """Parameters that one token passes through: fewer than `parameters` in a mixture of experts; 0 when all do."""
    experts: int = 0
    """Experts of one token; 0 without a mixture."""
    mlp_size: int = 0
    """Intermediate numbers of one token over all its experts; 0 when that is `intermediate`."""
    plain_head: bool = True
    """Logits are the output layer's and nothing else, so that they can be computed for some positions only."""
    context: int = 0
    """Most tokens of a sequence; 0 when the config does not say."""

    @property
    def query(self) -> int:
        """Numbers of the queries of all heads together."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Numbers of the keys of all heads together, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def width(self) -> int:
        """Numbers of one token in the wider of residual stream and attention."""
        return max(self.hidden, self.query)

    @property
    def mlp_width(self) -> int:
        """Intermediate numbers of one token."""
        return self.mlp_size or self.intermediate

    @property
    def pass_width(self) -> int:
        """Numbers of one token that a pass without gradients holds."""
        return 4 * self.hidden + self.query + 2 * self.key_value + 3 * self.mlp_width

    @property
    def body_parameters(self) -> int:
        """Parameters without a separate output layer, and with one number out: a critic's."""
        return self.parameters - (0 if self.tied else self.vocab * self.hidden) + self.hidden + 1

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of an adapter of all linear layers: rank * (inputs + outputs) of each. Fewer when it has fewer layers."""
        attention = 2 * (self.hidden + self.query) + 2 * (self.hidden + self.key_value)
        return self.layers * rank * (attention + 3 * (self.hidden + self.mlp_width))

    @property
    def layer_parameters(self) -> int:
        """Parameters that every token is multiplied with: active ones without embeddings and output layer."""
        return (self.active_parameters or self.parameters) - self.vocab * self.hidden * (1 if self.tied else 2)


def is_tied(family: str, data: Mapping[str, Any]) -> bool:
    """Whether input and output embeddings are one tensor."""
    return bool(data.get("tie_word_embeddings", family in _TIED))


def head_dim(family: str, data: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Size of one attention head."""
    return int(data.get("head_dim") or _HEAD_DIM.get(family) or hidden // heads)


def counted(sizes: ModelFacts, data: Mapping[str, Any]) -> ModelFacts:
    """The sizes with the parameters of a whole causal language model."""
    if sizes.family in _PLAIN or "n_embd" in data or "ffn_dim" in data:
        return replace(sizes, parameters=_plain(sizes, data))
    outside = sizes.vocab * sizes.hidden * (1 if sizes.tied else 2) + (0 if sizes.family == "olmo" else _norm(sizes))
    block = _attention(sizes, data) + _NORMS.get(sizes.family, 2) * _norm(sizes)
    dense = 3 * sizes.hidden * sizes.intermediate + (2 * sizes.intermediate + sizes.hidden if data.get("mlp_bias") else 0)
    experts = int(data.get("num_experts") or data.get("num_local_experts") or 0)
    if not experts:
        return replace(sizes, parameters=outside + sizes.layers * (block + dense))
    sparse = _sparse_layers(sizes, data)
    used = int(data.get("num_experts_per_tok") or 1)
    width = int(data.get("moe_intermediate_size") or sizes.intermediate)
    shared = int(data.get("shared_expert_intermediate_size") or 0)
    beside = experts * sizes.hidden + (3 * sizes.hidden * shared + sizes.hidden if shared else 0)
    fixed = outside + sizes.layers * block + (sizes.layers - sparse) * dense + sparse * beside
    one = 3 * sizes.hidden * width
    total, active = fixed + sparse * experts * one, fixed + sparse * used * one
    return replace(
        sizes,
        parameters=total,
        active_parameters=active if active < total else 0,
        experts=used,
        mlp_size=max(used * width + shared, sizes.intermediate if sparse < sizes.layers else 0),
    )


def _norm(sizes: ModelFacts) -> int:
    return sizes.hidden * (2 if sizes.family == "stablelm" else 1)


def _attention(sizes: ModelFacts, data: Mapping[str, Any]) -> int:
    """Projections of queries, keys, values and output, their biases, and norms of queries and keys."""
    count = sizes.hidden * (sizes.query + 2 * sizes.key_value) + sizes.query * sizes.hidden
    inner = sizes.query + 2 * sizes.key_value
    if sizes.family in _QUERY_BIAS or (sizes.family == "stablelm" and data.get("use_qkv_bias")):
        count += inner
    elif data.get("attention_bias"):
        count += inner + (0 if sizes.family == "glm4" else sizes.hidden)
    if sizes.family in _HEAD_NORMS:
        count += 2 * sizes.head_dim
    elif sizes.family in _WIDE_NORMS:
        count += sizes.query + sizes.key_value
    return count


def _sparse_layers(sizes: ModelFacts, data: Mapping[str, Any]) -> int:
    """Layers whose MLP is a mixture of experts."""
    step, dense = int(data.get("decoder_sparse_step") or 1), data.get("mlp_only_layers") or ()
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(sizes.layers))


def _plain(sizes: ModelFacts, data: Mapping[str, Any]) -> int:
    """GPT shape: LayerNorm with bias and a two-layer MLP; biases and learned positions depend on the family."""
    family, hidden = sizes.family, sizes.hidden
    bias = bool(data.get("use_bias", True)) if family == "starcoder2" else True
    attention = hidden * (sizes.query + 2 * sizes.key_value) + sizes.query * hidden
    if family == "gpt_neo":
        attention += hidden
    elif bias and not (family == "gpt_neox" and data.get("attention_bias") is False):
        attention += sizes.query + 2 * sizes.key_value + hidden
    mlp = 2 * hidden * sizes.intermediate + (sizes.intermediate + hidden if bias else 0)
    positions = {"gpt2": data.get("n_positions"), "gpt_neo": data.get("max_position_embeddings")}.get(family) or 0
    if family == "opt":
        positions = int(data.get("max_position_embeddings") or 0) + 2
    outside = (sizes.vocab * (1 if sizes.tied else 2) + int(positions)) * hidden + 2 * hidden
    if family == "phi" and not sizes.tied:
        outside += sizes.vocab
    if family == "bloom":
        outside += 2 * hidden
    return outside + sizes.layers * (attention + mlp + _NORMS.get(family, 2) * 2 * hidden)
