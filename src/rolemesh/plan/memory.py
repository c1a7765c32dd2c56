"""Memory of one slot's process and of the node around it, estimated from the model's sizes. Called by `build.py`.

Rough on purpose, and meant to be above the truth: it answers "can this ever fit?" before anything starts. Formats are those that the
workers use. Trained models and the reference hold float32 weights whatever `model.dtype`, which is the format of matrix products (b
bytes); rollout workers hold weights and cache in it, on CPUs the cache of the fast path in float32. With P parameters (P' of a critic: the
body alone; of actor, critic and ref what one rank holds of them, when a row of ranks splits the model or a column shards it), of which Q
are trained (all; of an actor with an adapter of rank r those of the adapter, which P counts too):

| what | bytes | who |
|---|---|---|
| weights | 4 P; P b | actor, critic, ref; rollout |
| gathered | while sharded: two blocks with embedding and head in the format of products; with a block of gradients | actor, critic, ref |
| bfloat16 copies | 2 P, kept by autocast from forward to backward; none in float32 | actor, critic |
| gradients | 4 Q, one flat vector | actor, critic |
| optimizer | 8 Q: two float32 moments of AdamW | actor, critic |
| activations | T layers (58 w + 16 i); in bfloat16 T layers (52 w + 8 i): what one block keeps for its backward pass | actor, critic |
| activations | 28 T layers r more, of the inner sides of an adapter | actor |
| activations | T (40 w + 12 i): one block, nothing is kept | ref |
| logits | 24 min(T vocab, 2^24): logits, log-softmax, entropy and gradient; all T at once where the head is no plain layer | actor, ref |
| copy while saving | (4 P + 8 Q of all ranks) / ranks, in host memory, with `trainer.async_save`: weights and moments | actor, critic |
| copy while saving | 4 P, when there is a warm start | ref |
| fused copies | (layers hidden (heads head_dim + 2 kv_heads head_dim + 2 i) + vocab hidden) b, on the fast path | rollout |
| fused copies | layers hidden (heads head_dim + i) b more on CPUs, on the fast path | rollout |
| KV cache | (slots + 1) columns 2 layers kv_heads head_dim b; columns in steps of 16, slots in steps of 16 when deterministic | rollout |
| sampling | slots vocab (20 + b): float32 logits and weights, float64 sums | rollout |
| passes | 1024 tokens of prefill, and the attention scores of one decoding step; with vLLM and SGLang 4096 tokens | rollout |
| KV cache, with vLLM | (slots blocks + 1) 32 2 layers kv_heads head_dim b; blocks of 32 tokens for the longest sequence | rollout |
| packed head | vocab hidden b, with vLLM on CPUs | rollout |
| KV cache, with SGLang | slots (longest sequence + 8) 2 layers kv_heads head_dim b | rollout |
| sampling, with SGLang | 40 slots vocab: all in float64 | rollout |
| libraries | 350 MiB with vLLM; 6 GiB with SGLang, assumed | rollout |
| asleep | 4 P + 8 Q in host memory, on a device with `trainer.offload` | actor, critic |
| loading | on a device: the weights pass through the process's own memory, one model at a time | each process |
| process | Python, torch and their libraries | each process |
| context | on a device: 600 MiB | each process |
| weights | P b of each model of the section `reward`, in its own format | reward |
| activations | T (40 w + 12 i) of the largest of them: one block, nothing is kept | reward |
| scoring processes | 120 MiB, and 40 MiB for each of them, where there are functions | reward |
| shared weights | P b; 4 P with `trainer.publish` adapter, and to critic and ref after a warm start: one file for all readers | each node |
| published weights | 4 buckets (`trainer.bucket_mib`, or the embedding if larger): two packed, two in the object store | each node |
| published weights | with `trainer.publish_folder` one bucket packed, and one of each rollout worker that reads | each node |
| adapter's base | 4 P: what an adapter that is published alone is merged into | rollout |

No weights are published where every rollout worker shares a process with the actor.
With activation checkpointing, activations are T (4 layers w) and one block's. T is the tokens of a micro-batch:
`trainer.micro_batch_tokens`, or fewer when a rank's part of the rows is smaller. w is the larger of hidden and heads head_dim, i the
intermediate size; with a mixture of experts, i and 8 w more (20 w in bfloat16) for each expert of a token. The constants of activations
and logits are bounds of what was measured on seven architectures. A reference that is the actor without its adapter takes nothing: its
passes are smaller than the actor's.

What a device holds at a time is less than the sum. Of roles that do not compute just then only weights, gradients, moments, fused copies
and cache are there; a process computes for one role at a time; and with `trainer.offload` actor and critic are asleep in phases of others.
So its need is that of the phase that takes most, of generation, scoring and update. Other phases have no more models awake, and compute
nothing (publication, saves) or the same (evaluation, a warm start).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

from rolemesh.config.model_files import ModelFacts
from rolemesh.config.schema import Config, LoraConfig
from rolemesh.names import ACTOR, CRITIC, REF, REWARD, ROLLOUT
from rolemesh.plan import sglang, vllm
from rolemesh.plan.ledger import has_device
from rolemesh.plan.placement import scoring_processes
from rolemesh.plan.routes import Route
from rolemesh.plan.schema import MemoryLine, PoolMemory

MIB: Final = 1024**2
PROCESS_BYTES: Final = 500 * MIB
"""A process that has imported torch and transformers."""
GPU_PROCESS_BYTES: Final = 3 * 1024 * MIB
"""The same with CUDA's libraries and pinned buffers."""
CONTEXT_BYTES: Final = 600 * MIB
"""What a process takes of its device before any model: CUDA's context and workspaces. Assumed, not measured yet."""
REWARD_PROCESS_BYTES: Final = 450 * MIB
"""A reward worker: Python, Ray, Arrow and what the roles import."""
SCORING_BYTES: Final = 120 * MIB
"""The process that scoring processes are forked from, with the verifiers and their libraries; measured, the larger ones take 114."""
SCORING_PROCESS_BYTES: Final = 40 * MIB
"""One of them: pages of its own; measured, 26 when it begins."""
COPY: Final = "copy while saving"
TRAINED: Final = (ACTOR, CRITIC)
WITH_MODEL: Final = (ACTOR, CRITIC, REF, ROLLOUT)
COMPUTING: Final = {"generate": (ROLLOUT,), "score": (REWARD, REF, CRITIC), "update": (ACTOR, CRITIC)}
"""Who computes in the phases of a step that take most of a device."""
WORKING: Final = ("gathered", "bfloat16 copies", "activations", "logits", "sampling", "passes")
"""Lines of memory that is there only while its role computes."""
VISIBLE: Final = 0.99
"""Part of a need from which on another one is not worth to be told."""
FAST_FAMILIES: Final = ("llama", "qwen2", "qwen3")
"""Architectures whose weights the built-in rollout engine fuses."""

_HEAD_CHUNK: Final = 2**24  # logits that the trainer holds at a time
_PREFILL_TOKENS: Final = 1024
_CACHE_STEP: Final = 16


def pool_memory(
    config: Config, pool: str, facts: Mapping[str, ModelFacts], ranks: Mapping[str, int], judges: Mapping[int, ModelFacts]
) -> PoolMemory:
    """One slot's process of the pool with all its roles. `facts` has the model of each role, `ranks` its number of workers, `judges` the
    models of the section `reward` by entry."""
    roles = [name for name in config.slot_roles(pool) if name in facts]
    on_device = has_device(config.pools[pool])
    lines = [MemoryLine(role="", what="process", bytes=GPU_PROCESS_BYTES if on_device else PROCESS_BYTES)]
    models: list[MemoryLine] = []
    for role in roles:
        if borrowed := _borrowed(config, role):
            lines.append(MemoryLine(role=role, what="libraries", bytes=borrowed.LIBRARIES_BYTES))
        estimate = {ROLLOUT: _rollout, REF: _reference}.get(role, _trained)(config, role, facts[role], max(1, ranks.get(role, 0)))
        mine = [MemoryLine(role=role, what=what, bytes=count) for what, count in estimate.items()]
        models += [replace(line, on_gpu=on_device and line.what != COPY) for line in mine]
        if on_device and config.trainer.offload and role in TRAINED:
            asleep = sum(line.bytes for line in mine if line.what in ("weights", "optimizer"))
            models.append(MemoryLine(role=role, what="asleep", bytes=asleep))
    if judges and config.roles[REWARD].pool == pool:
        mine = [MemoryLine(role=REWARD, what=what, bytes=count) for what, count in _judges(config, judges, ranks.get(REWARD, 1)).items()]
        models += [replace(line, on_gpu=on_device) for line in mine]
        lines += _scoring(config, REWARD)
    if on_device:
        lines.append(MemoryLine(role="", what="context", bytes=CONTEXT_BYTES, on_gpu=True))
    if on_device and models:
        lines.append(MemoryLine(role="", what="loading", bytes=max(line.bytes for line in models if line.what == "weights")))
    found = tuple(replace(line, working=line.what in WORKING) for line in (*lines, *models))
    return PoolMemory(pool=pool, lines=found, phases=_phases(config, found) if on_device else {})


def _phases(config: Config, lines: Sequence[MemoryLine]) -> dict[str, tuple[MemoryLine, ...]]:
    """What of the lines of a slot is on its device in each phase in which one of its roles computes."""
    found, roles = {}, {line.role for line in lines if line.on_gpu}
    for phase, computing in COMPUTING.items():
        if here := [role for role in computing if role in roles]:
            using = {*computing, *((ACTOR,) if REF in here and config.ref_is_actor else ())}
            asleep = {*TRAINED} - using if config.trainer.offload else set()
            held = [line for line in lines if line.on_gpu and not line.working and line.role not in asleep]
            works = [[line for line in lines if line.on_gpu and line.working and line.role == role] for role in here]
            found[phase] = (*held, *max(works, key=lambda mine: sum(line.bytes for line in mine)))
    return found


def cheaper(config: Config, *of: Any) -> list[tuple[str, int]]:
    """(option, bytes on a device of one slot with it) of each single option with which a pool needs visibly less; `of` are the other
    arguments of `pool_memory`."""
    now = pool_memory(config, *of).gpu_bytes
    needs = [(option, pool_memory(other, *of).gpu_bytes) for option, other in _alternatives(config)]
    return [(option, need) for option, need in needs if need < VISIBLE * now]


def _alternatives(config: Config) -> Iterator[tuple[str, Config]]:
    """Configs with another way to train, and the option that makes each of them of this one."""
    changes: dict[str, dict[str, Any]] = {"activation_checkpointing=true": {"activation_checkpointing": True}}
    changes["sharding=fsdp"] = {"sharding": "fsdp"}
    actor, rollout = (config.roles.get(role) for role in (ACTOR, ROLLOUT))
    if actor is not None and rollout is not None and actor.pool == rollout.pool:
        changes["offload=true"] = {"offload": True}
    for text, change in changes.items():
        yield f"trainer.{text}", config.model_copy(update={"trainer": config.trainer.model_copy(update=change)})
    if config.model.lora is None and (actor is None or actor.tensor_parallel == 1):
        lora = LoraConfig()
        yield f"model.lora.rank={lora.rank}", config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})


def reward_memory(config: Config, role: str) -> PoolMemory:
    """One process of a role that has its own."""
    lines = (MemoryLine(role=role, what="process", bytes=REWARD_PROCESS_BYTES), *_scoring(config, role))
    return PoolMemory(pool=config.roles[role].pool, process=role, lines=lines)


def _scoring(config: Config, role: str) -> list[MemoryLine]:
    if config.backend == "local" or len(config.reward_models) == len(config.reward):
        return []
    count = SCORING_BYTES + scoring_processes(config, role) * SCORING_PROCESS_BYTES
    return [MemoryLine(role=role, what="scoring processes", bytes=count)]


def _judges(config: Config, judges: Mapping[int, ModelFacts], ranks: int) -> dict[str, int]:
    width = {number: width_of(config.reward_models[number].dtype) for number in judges}
    tokens = micro_batch_tokens(config, ranks, minibatches=1)
    return {
        "weights": sum(width[number] * facts.body_parameters for number, facts in judges.items()),
        "activations": max(tokens * (40 * facts.width + 12 * facts.mlp_width) for facts in judges.values()),
    }


def node_memory(config: Config, facts: ModelFacts, sent: Collection[tuple[Route | None, str | None]], *, readers: int) -> PoolMemory:
    """What the processes of a node share, once: weights on their way by these routes in these formats, of which the widest counts.
    `readers` are the most processes of a node that read them from disk at a time."""
    found = dict[str, int]()
    for way, form in sorted(sent, key=lambda one: (one[1] == "float32", str(one[0]))):
        width = 4 if form == "float32" else 2
        whole, largest = width * facts.parameters, width * facts.vocab * facts.hidden
        if way == "shared_memory":
            found["shared weights"] = whole
        elif way is not None:
            buckets = 4 if way == "object_store" else 1 + readers
            found["published weights"] = buckets * min(whole, max(config.trainer.bucket_mib * MIB, largest))
    return PoolMemory(pool="", process="node", lines=tuple(MemoryLine(role=ACTOR, what=what, bytes=count) for what, count in found.items()))


def _trained(config: Config, role: str, facts: ModelFacts, ranks: int) -> dict[str, int]:
    half, row = config.model.dtype == "bfloat16", config.roles[role].tensor_parallel
    column = max(1, ranks // row)
    shards = column if config.trainer.sharding == "fsdp" else 1
    lora = config.model.lora if role == ACTOR else None
    adapter = 0 if lora is None else facts.adapter_parameters(lora.rank)
    parameters = (facts.parameters if role == ACTOR else facts.body_parameters) + adapter
    mine, trained = (-(-count // (row * shards)) for count in (parameters, adapter or parameters))
    found = {"weights": 4 * mine}
    if shards > 1:
        found["gathered"] = (_gathered(config, facts) + 4 * (facts.parameters // facts.layers)) // row
    elif half:
        found["bfloat16 copies"] = 2 * mine
    tokens, wide = micro_batch_tokens(config, column), facts.width
    kept = (52 * wide + 8 * facts.mlp_width if half else 58 * wide + 16 * facts.mlp_width) + (20 if half else 8) * wide * facts.experts
    kept += 28 * lora.rank if lora is not None else 0
    by_token = 4 * facts.layers * wide + kept if config.trainer.activation_checkpointing else facts.layers * kept
    found |= {"gradients": 4 * trained, "optimizer": 8 * trained, "activations": tokens * by_token}
    if role == ACTOR:
        found["logits"] = _logits(tokens, facts)
    saved = 4 * parameters + 8 * (adapter or parameters)
    return found | ({COPY: -(-saved // ranks)} if config.trainer.async_save else {})


def _reference(config: Config, role: str, facts: ModelFacts, ranks: int) -> dict[str, int]:
    if config.ref_is_actor:
        return {"weights": 0}
    shards = ranks if config.trainer.sharding == "fsdp" else 1
    found = {"weights": 4 * -(-facts.parameters // shards)}
    if shards > 1:
        found["gathered"] = _gathered(config, facts)
    tokens = micro_batch_tokens(config, ranks, minibatches=1)
    block = 40 * facts.width + 12 * facts.mlp_width
    found |= {"activations": tokens * block, "logits": _logits(tokens, facts)}
    return found | ({COPY: found["weights"]} if config.trainer.async_save and config.sft is not None else {})


def _gathered(config: Config, facts: ModelFacts) -> int:
    """Two blocks, and embedding and head twice, in the format of products."""
    return 2 * width_of(config.model.dtype) * (facts.parameters // facts.layers + 2 * facts.vocab * facts.hidden)


def _logits(tokens: int, facts: ModelFacts) -> int:
    elements = tokens * facts.vocab
    return 24 * (min(elements, _HEAD_CHUNK) if facts.plain_head else elements)


def _rollout(config: Config, role: str, facts: ModelFacts, ranks: int) -> dict[str, int]:
    width = width_of(config.model.dtype)
    found = {"weights": facts.parameters * width}
    if config.trainer.publish == "adapter":
        found["adapter's base"] = 4 * facts.parameters
    if borrowed := _borrowed(config, role):
        found.update(borrowed.memory(config, facts, longest=_longest(config, facts), width=width))
        return found
    on_host = not has_device(config.pools[config.roles[role].pool])
    if fast := facts.family in FAST_FAMILIES and config.rollout.engine == "builtin":
        fused = facts.layers * facts.hidden * (facts.query + 2 * facts.key_value + 2 * facts.intermediate)
        others = facts.layers * facts.hidden * (facts.query + facts.intermediate)
        found["fused copies"] = (fused + (others if on_host else 0) + facts.vocab * facts.hidden) * width
    if fast and on_host:
        width = 4
    slots, columns = cache_shape(config, facts)
    prefill = max(_PREFILL_TOKENS, config.data.max_prompt_tokens) * facts.pass_width
    return found | {
        "KV cache": (slots + 1) * columns * 2 * facts.layers * facts.key_value * width,
        "sampling": config.rollout.slots * facts.vocab * (20 + width),
        "passes": (prefill + 2 * slots * facts.heads * columns) * width,
    }


def width_of(dtype: str | None) -> int:
    """Bytes of a number."""
    return 2 if dtype == "bfloat16" else 4


def _borrowed(config: Config, role: str) -> ModuleType | None:
    """What the plan knows of the other project's engine that the role runs on, if it does."""
    return next((engine for engine in (vllm, sglang) if engine.used_by(config, role)), None)


def cache_shape(config: Config, facts: ModelFacts) -> tuple[int, int]:
    """(rows, columns) of the built-in engine's cache, without the row that remembers a prompt."""
    rows = max(config.rollout.slots, 2)
    return _up(rows, _CACHE_STEP) if config.deterministic else rows, _up(_longest(config, facts), _CACHE_STEP)


def _longest(config: Config, facts: ModelFacts) -> int:
    length = config.data.max_prompt_tokens + config.data.max_response_tokens
    return min(length, facts.context) if facts.context else length


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def micro_batch_tokens(config: Config, ranks: int, minibatches: int | None = None) -> int:
    """Most tokens of one forward and backward pass of a rank that gets its part of a mini-batch (of a step with `minibatches` 1)."""
    parts = config.trainer.minibatches if minibatches is None else minibatches
    rows = -(-config.trainer.prompts_per_step * config.algorithm.group_size // parts // max(1, ranks))
    length = config.data.max_prompt_tokens + config.data.max_response_tokens
    return min(max(config.trainer.micro_batch_tokens, length), rows * length)


def size(count: float) -> str:
    """Bytes in the largest binary unit that keeps the number above 1: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
