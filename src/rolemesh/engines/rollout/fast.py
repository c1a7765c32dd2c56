"""Runner for the Llama family (Llama, Qwen2, Qwen3): a decoding loop over fused weights and a static cache. Called by `builtin.py`.

Against a plain module forward it saves operations, which is what counts for small models and on CPUs: query, key and value are one
matrix, gate and up another; the weight of a norm is folded into the matrix behind it; rotary embedding is one complex
multiplication; all keys and values of a step are written by one indexed copy; only rows in use and columns in use are computed;
matrices are laid out anew for the products that they are used in (`matrices.py`).

Layout. Queries, keys and values of one key-value head lie together: a projected row is [kv_heads, group + 2, head_dim], `group`
queries, then the key, then the value. A view of it is a batch of matrices for attention without a copy. Rotary pairs (i, i + d/2)
of queries and keys are stored side by side, which no dot product notices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rolemesh.engines.rollout.matrices import Matrix, activation_format, make_matrix
from rolemesh.engines.rollout.runner import Prompt, Rows

FAMILY = ("llama", "qwen2", "qwen3")
DETERMINISTIC_ROWS = 16
"""Rows of every decoding block in deterministic mode: any row of such a block gets the same bits whatever lies in the others."""
_ALIGNMENT = 16  # columns of the cache: keeps every head's keys on a 64-byte boundary
_PREFILL_TOKENS = 1024  # of one pass, padding included: larger passes leave the CPU's caches
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")

_LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def why_not_fast(model: Any) -> str | None:
    """None when the fast runner knows the architecture of `model`, else the reason why it does not."""
    config = model.config
    if config.model_type not in FAMILY:
        return f"architecture {config.model_type!r} is not one of {', '.join(FAMILY)}"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act!r} is not silu"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some layers have sliding-window attention"
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        return f"rotary embedding {rope!r} depends on the length"
    parameters = dict(model.named_parameters())
    if len({parameter.dtype for parameter in parameters.values()}) > 1:
        return "its parameters have several number formats"
    unknown = sorted(set(parameters) - _known_names(config.num_hidden_layers))
    return f"parameter {unknown[0]} is unknown" if unknown else None


def _known_names(layers: int) -> set[str]:
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for index in range(layers):
        prefix = f"model.layers.{index}"
        names |= {f"{prefix}.{part}.{kind}" for part in _LAYER for kind in ("weight", "bias")}
        names |= {f"{prefix}.{part}.weight" for part in _NORMS}
    return names


@dataclass(slots=True, kw_only=True)
class _Layer:
    """Weights of one layer."""

    qkv: Matrix
    qk_norm: torch.Tensor | None
    """[group + 1, head_dim]: weights of the query norm, `group` times, and of the key norm."""
    out: Matrix
    gate_up: Matrix
    down: Matrix


class _Scratch:
    """Where the projections of n tokens are written, with all the views that a layer needs. Decoding keeps one for each number of rows:
    at small sizes making views takes as long as some of the arithmetic."""

    __slots__ = ("gate", "gate_up", "heads", "new", "pairs", "qk", "qkv", "queries", "up")

    def __init__(self, qkv: torch.Tensor, gate_up: torch.Tensor, shape: tuple[int, int, int]) -> None:
        """`qkv` [n, kv_heads * (group + 2) * head_dim], `gate_up` [n, 2 * intermediate], `shape` (kv_heads, group + 2, head_dim)."""
        kv_heads, parts, dim = shape
        width = gate_up.shape[1] // 2
        self.qkv, self.gate_up = qkv, gate_up
        self.heads = qkv.view(-1, parts, dim)
        self.queries, self.new = self.heads[:, : parts - 2], self.heads[:, parts - 2 :]
        self.qk = qkv.view(-1, kv_heads, parts, dim)[:, :, : parts - 1]
        pairs = self.qk.unflatten(-1, (dim // 2, 2))  # type: ignore[no-untyped-call]
        self.pairs: torch.Tensor | None = torch.view_as_complex(pairs) if qkv.dtype == torch.float32 else None
        self.gate, self.up = gate_up[:, :width], gate_up[:, width:]


class FastRunner:
    """See the module docstring. `rows` is the most rows at once, `columns` the most tokens of a row."""

    joins = True

    def __init__(self, model: Any, *, rows: int, columns: int, deterministic: bool, device: torch.device) -> None:
        config, attention = model.config, model.model.layers[0].self_attn
        self._model = model
        self._device = device
        self._dtype = activation_format(model.dtype, device)
        self._deterministic = deterministic
        self._kv_heads: int = config.num_key_value_heads
        self._group: int = config.num_attention_heads // config.num_key_value_heads
        self._head_dim: int = attention.head_dim
        self._heads = (self._kv_heads, self._group + 2, self._head_dim)
        self._scale: float = attention.scaling
        self._eps = torch.full((1,), config.rms_norm_eps, device=device)
        block = DETERMINISTIC_ROWS if deterministic else 1
        self._rows = -(-rows // block) * block
        self._columns = -(-columns // _ALIGNMENT) * _ALIGNMENT
        self._length = np.zeros(self._rows, np.int64)
        self._turns = self._rotary_table(model)
        self._cache = torch.empty(0)  # allocated when it is first needed, as the scratch
        self._decode_scratch: _Scratch | None = None
        self._blocks: dict[tuple[int, int], tuple[_Scratch, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]] = {}
        self._places = self._first_places()
        self._column = torch.arange(self._columns, device=device)
        self._remembered: tuple[Prompt, torch.Tensor] | None = None
        self._layers: list[_Layer] = []
        self.refresh()

    def _rotary_table(self, model: Any) -> torch.Tensor:
        """exp(i * angle), shape [columns, head_dim / 2], from the model's own module, so that scaled variants are honoured."""
        position = torch.arange(self._columns, device=self._device)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1, device=self._device), position)
        half = self._head_dim // 2
        return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())

    def _first_places(self) -> torch.Tensor:
        """Index of column 0 of each row, head, and key or value in the flat cache of a layer: [rows, kv_heads, 2]."""
        row = torch.arange(self._rows)[:, None, None]
        head = torch.arange(self._kv_heads)[None, :, None]
        kind = torch.arange(2)[None, None, :]
        return (((kind * (self._rows + 1) + row) * self._kv_heads + head) * self._columns).to(self._device)

    # -- weights

    @torch.inference_mode()
    def refresh(self, *, keep_rows: bool = False) -> None:
        self.forget()
        if not keep_rows:
            self._cache.zero_()
        body = self._model.model
        self._layers = [self._fuse(layer) for layer in body.layers]
        self._embedding = body.embed_tokens.weight.detach()
        self._head = make_matrix(self._model.lm_head.weight.detach() * body.norm.weight, None)

    def forget(self) -> None:
        self._remembered = None

    def release(self) -> None:
        self.forget()
        self._blocks.clear()
        self._layers.clear()
        self._cache = self._embedding = torch.empty(0)
        self._decode_scratch = None
        del self._head

    def _allocate(self) -> None:
        # one row more: the keys and values of the remembered prompt
        shape = (len(self._layers), 2, self._rows + 1, self._kv_heads, self._columns, self._head_dim)
        self._decode_scratch = self._scratch(self._rows)
        self._cache = torch.zeros(shape, dtype=self._dtype, device=self._device)  # last: whether there is one says that all is there

    def _fuse(self, layer: Any) -> _Layer:
        a, m = layer.self_attn, layer.mlp
        qkv = self._interleave(a.q_proj.weight, a.k_proj.weight, a.v_proj.weight) * layer.input_layernorm.weight
        gate_up = torch.cat([m.gate_proj.weight, m.up_proj.weight]) * layer.post_attention_layernorm.weight
        qk_norm = None
        if hasattr(a, "q_norm"):
            qk_norm = self._pairs(torch.stack([a.q_norm.weight] * self._group + [a.k_norm.weight])[None]).squeeze(0).to(self._dtype)
        qkv_bias = None if a.q_proj.bias is None else self._interleave(a.q_proj.bias, a.k_proj.bias, a.v_proj.bias)
        gate_up_bias = None if m.gate_proj.bias is None else torch.cat([m.gate_proj.bias, m.up_proj.bias])
        return _Layer(
            qkv=make_matrix(qkv, qkv_bias),
            qk_norm=qk_norm,
            out=make_matrix(a.o_proj.weight.detach(), a.o_proj.bias),
            gate_up=make_matrix(gate_up, gate_up_bias),
            down=make_matrix(m.down_proj.weight.detach(), m.down_proj.bias),
        )

    def _pairs(self, heads: torch.Tensor) -> torch.Tensor:
        """[kv_heads, any, head_dim, ...]: bring rotary pairs (i, i + head_dim / 2) side by side."""
        kv_heads, number, dim, *rest = heads.shape
        return heads.reshape(kv_heads, number, 2, dim // 2, *rest).transpose(2, 3).reshape(heads.shape)

    def _interleave(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Rows of three projections -> rows in the layout of the module docstring."""
        q, k, v = (part.view(self._kv_heads, -1, self._head_dim, *part.shape[1:]) for part in (q, k, v))
        return torch.cat([self._pairs(q), self._pairs(k), v], 1).flatten(0, 2)

    # -- shared by prefill and decode

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) over the last dimension, in float32 inside; the weight of the norm is elsewhere."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return x * scale if x.dtype == torch.float32 else (x * scale).to(x.dtype)

    def _scratch(self, tokens: int) -> _Scratch:
        layer = self._layers[0]
        qkv, gate_up = (
            torch.empty((tokens, matrix.width), dtype=self._dtype, device=self._device) for matrix in (layer.qkv, layer.gate_up)
        )
        return _Scratch(qkv, gate_up, self._heads)

    def _project(self, layer: _Layer, x: torch.Tensor, turns: torch.Tensor, scratch: _Scratch) -> None:
        """Rotated queries and keys, and values, of x [n, hidden] into the scratch. `turns` is [n, 1, 1, head_dim / 2]."""
        layer.qkv.into(scratch.qkv, self._unit(x))
        if layer.qk_norm is not None:
            scratch.qk.copy_(self._unit(scratch.qk).mul_(layer.qk_norm))
        if scratch.pairs is not None:
            scratch.pairs.mul_(turns)
        else:
            pairs = torch.view_as_complex(scratch.qk.float().view(*scratch.qk.shape[:3], -1, 2))
            scratch.qk.copy_(torch.view_as_real(pairs * turns).flatten(-2))

    def _finish_layer(self, layer: _Layer, x: torch.Tensor, attended: torch.Tensor, scratch: _Scratch) -> None:
        """Output projection and feed-forward part, added to the residual stream `x` in place."""
        layer.out.add_to(x, attended)
        layer.gate_up.into(scratch.gate_up, self._unit(x))
        layer.down.add_to(x, F.silu(scratch.gate).mul_(scratch.up))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._head(self._unit(x))

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self._embedding).to(self._dtype)

    # -- prefill

    def prefill(self, prompts: Sequence[Prompt], copies: Sequence[int], first: int, remember: Prompt) -> torch.Tensor:
        if not self._cache.numel():
            self._allocate()
        logits = []
        for start, stop in self._passes(prompts):
            group, counts = prompts[start:stop], copies[start:stop]
            if self._remembered is not None and group[0] == self._remembered[0]:
                found = self._recall(first, counts[0])
            else:
                found = self._prefill_pass(group, counts, first)
            rows = sum(counts)
            self._length[first : first + rows] = np.repeat([len(prompt) for prompt in group], counts)
            if remember in group:
                at = sum(counts[: group.index(remember)])
                self._cache[:, :, self._rows].copy_(self._cache[:, :, first + at])
                self._remembered = (remember, found[at].clone())
            logits.append(found)
            first += rows
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _passes(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int]]:
        """Ranges of prompts that run together. Deterministic mode: one by one, so that shapes depend on the prompt alone."""
        known = self._remembered[0] if self._remembered is not None else None
        start = 0
        while start < len(prompts):
            stop, longest = start + 1, len(prompts[start])
            while not self._deterministic and prompts[start] != known and stop < len(prompts) and prompts[stop] != known:
                longest = max(longest, len(prompts[stop]))
                if longest * (stop + 1 - start) > _PREFILL_TOKENS:
                    break
                stop += 1
            yield start, stop
            start = stop

    def _recall(self, first: int, rows: int) -> torch.Tensor:
        assert self._remembered is not None
        prompt, logits = self._remembered
        used = len(prompt)
        self._cache[:, :, first : first + rows, :, :used] = self._cache[:, :, self._rows :, :, :used]
        return logits.expand(rows, -1)

    def _prefill_pass(self, prompts: Sequence[Prompt], copies: Sequence[int], first: int) -> torch.Tensor:
        """Right-padded and causal: a prompt never sees the padding behind it, and decoding overwrites or masks it."""
        count, width = len(prompts), max(map(len, prompts))
        padded = np.zeros((count, width), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        last = torch.tensor([row * width + len(prompt) - 1 for row, prompt in enumerate(prompts)], device=self._device)
        source = torch.repeat_interleave(torch.arange(count), torch.tensor(copies)).to(self._device)
        rows = slice(first, first + len(source))
        x = self._embed(torch.from_numpy(padded).to(self._device).view(-1))
        turns = self._turns[:width].repeat(count, 1).view(count * width, 1, 1, -1)
        scratch = self._scratch(count * width)
        for index, layer in enumerate(self._layers):
            self._project(layer, x, turns, scratch)
            qkv = scratch.qkv.view(count, width, *self._heads)
            q = qkv[:, :, :, : self._group].permute(0, 2, 3, 1, 4).flatten(1, 2)
            k, v = (qkv[:, :, :, self._group + kind].transpose(1, 2).contiguous() for kind in (0, 1))
            self._cache[index, 0, rows, :, :width] = k.index_select(0, source)
            self._cache[index, 1, rows, :, :width] = v.index_select(0, source)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=self._group > 1)
            attended = attended.transpose(1, 2).reshape(count * width, -1)
            if index == len(self._layers) - 1:  # nothing but the last position of each prompt matters from here on
                x, attended, scratch = x[last], attended[last], self._scratch(count)
            self._finish_layer(layer, x, attended, scratch)
        return self._logits(x).index_select(0, source)

    # -- decode

    def decode(self, tokens: Rows) -> torch.Tensor:
        rows = len(tokens)
        if not self._deterministic:
            logits = self._decode_block(tokens, 0, rows, int(self._length[:rows].max()) + 1)
        else:
            blocks = []
            for start in range(0, rows, DETERMINISTIC_ROWS):
                block = np.zeros(DETERMINISTIC_ROWS, np.int64)
                part = tokens[start : start + DETERMINISTIC_ROWS]
                block[: len(part)] = part
                self._length[rows : start + DETERMINISTIC_ROWS] = 0  # idle rows of the block compute something harmless
                blocks.append(self._decode_block(block, start, start + DETERMINISTIC_ROWS, self._columns))
            logits = torch.cat(blocks)[:rows]
        self._length[:rows] += 1
        return logits

    def _decode_block(self, tokens: Rows, start: int, stop: int, extent: int) -> torch.Tensor:
        """One token for rows start..stop-1, attending to columns 0..extent-1 (those beyond a row's length are masked)."""
        rows, heads, group = stop - start, self._kv_heads, self._group
        position = torch.from_numpy(self._length[start:stop]).to(self._device)
        x = self._embed(torch.from_numpy(tokens).to(self._device))
        turns = self._turns.index_select(0, position).view(rows, 1, 1, -1)
        places = (self._places[start:stop] + position.view(rows, 1, 1)).view(rows * heads, 2)
        bias = torch.zeros((rows, heads * group, extent), dtype=self._dtype, device=self._device)
        bias.masked_fill_((self._column[:extent] > position[:, None])[:, None], torch.finfo(self._dtype).min)
        bias = bias.view(rows * heads, group, extent)
        scratch, caches = self._block(start, stop)
        for layer, (flat, keys, values) in zip(self._layers, caches, strict=True):
            self._project(layer, x, turns, scratch)
            flat.index_put_((places,), scratch.new)
            scores = torch.baddbmm(bias, scratch.queries, keys.narrow(2, 0, extent), alpha=self._scale)
            attended = torch.bmm(torch.softmax(scores, -1), values.narrow(1, 0, extent))
            self._finish_layer(layer, x, attended.view(rows, -1), scratch)
        return self._logits(x)

    def _block(self, start: int, stop: int) -> tuple[_Scratch, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """Scratch for the rows, and per layer the flat cache [any, head_dim], keys [rows * heads, head_dim, columns] and values
        [rows * heads, columns, head_dim]. Made once for each block of rows."""
        if (start, stop) not in self._blocks:
            whole, rows = self._decode_scratch, stop - start
            assert whole is not None
            caches = [
                (layer.view(-1, self._head_dim), layer[0, start:stop].flatten(0, 1).transpose(1, 2), layer[1, start:stop].flatten(0, 1))
                for layer in self._cache
            ]
            self._blocks[start, stop] = _Scratch(whole.qkv[:rows], whole.gate_up[:rows], self._heads), caches
        return self._blocks[start, stop]

    def move(self, to: Rows, source: Rows) -> None:
        used = int(self._length[source].max())
        self._cache[:, :, torch.from_numpy(to), :, :used] = self._cache[:, :, torch.from_numpy(source), :, :used]
        self._length[to] = self._length[source]
