"""A small Llama and the GGUF file with the same weights, written with the `gguf` package the way llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolemesh.config import model_files

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 2, 16, 4, 2, 32, 512
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CHAT = "{% for m in messages %}<pad>{{ m.role }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<pad>assistant:{% endif %}"


def small_llama(*, tied: bool) -> LlamaForCausalLM:
    """Random weights of about the size that makes every part count."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, rms_norm_eps=1e-5, rope_theta=5000.0, tie_word_embeddings=tied, initializer_range=0.3,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def _pairs_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in the order of llama.cpp: the two halves that a rotation mixes lie side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM, **extra: str | int) -> Path:
    """Write weights (float32), sizes, the vocabulary of the built-in tokenizer and a chat template; `extra` are further keys,
    with `__` for their dots."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(VOCAB)
    _add_tokenizer(writer)
    for key, value in extra.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key.replace("__", "."), value)
    _add_weights(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    made = json.loads((model_files("tiny").folder / "tokenizer.json").read_text())
    vocabulary = made["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = {token["content"] for token in made["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in made["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)


def _add_weights(writer: gguf.GGUFWriter, model: LlamaForCausalLM) -> None:
    weights = dict(model.named_parameters())
    named = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
    for layer in range(LAYERS):
        named |= {f"blk.{layer}.{theirs}.weight": f"model.layers.{layer}.{ours}.weight" for theirs, ours in BLOCK_NAMES.items()}
    for theirs, ours in named.items():
        if ours not in weights:
            continue  # a tied head is no tensor of its own
        weight = weights[ours].detach()
        if ".attn_q." in theirs or ".attn_k." in theirs:
            weight = _pairs_together(weight, HEADS if ".attn_q." in theirs else KV_HEADS)
        writer.add_tensor(theirs, weight.numpy())
