"""Predicted times of the stages of a step, from the sizes of the model and the kind of device. Called by `build.py`.

A roofline with an overhead: a stage lasts as long as the longest of

* compute: FLOP / (rate of the device * 0.4), the share that training steps of transformers reach;
* memory: bytes / (bandwidth * 0.6), where weights are read once for each pass over the layers and decoding reads keys and values;
* overhead: passes over the layers * layers * a constant for launching what one layer does;
* transfer or functions, for publication and rewards.

A token costs 2 FLOP for each parameter of the layers, attention 4 heads head_dim FLOP for each earlier token, and the output layer
2 vocab hidden; backward costs twice forward, and the trainer computes the output layer once more for it. All prompts and answers count
with their longest allowed length, so the prediction is an upper end; what matters is the proportion of the stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rolemesh.config.model_files import ModelFacts
from rolemesh.config.schema import Config
from rolemesh.names import ACTOR, CRITIC, REF, REWARD, ROLLOUT
from rolemesh.plan.devices import UNKNOWN_DEVICE, Device, device_type
from rolemesh.plan.ledger import has_device
from rolemesh.plan.memory import micro_batch_tokens, width_of
from rolemesh.plan.placement import scoring_processes
from rolemesh.plan.schema import NodeInfo, Stage, WorkerPlan

CPU_CORE: Final = Device(name="CPU core", memory_bytes=0, bfloat16=110e9, float32=110e9, bandwidth=11e9)
"""Measured on one core of an AVX-512 server with torch 2.13: float32 products of 512 x 512, and a sum over 256 MB. Bfloat16 is taken
to be no faster, which holds where the CPU has no instructions for it. Workers compute in one thread."""
COMPUTE_SHARE: Final = 0.4
"""Measured: training passes of a 1M-parameter model over 4,096 tokens reach 45 of 110 GFLOP/s on a core; usual on accelerators too."""
MEMORY_SHARE: Final = 0.6
LAYER_SECONDS: Final = {False: 0.5e-3, True: 0.2e-3}
"""Launching one layer once, on a CPU (measured, decoding two rows) and on a device (about 30 launches of 5 to 10 microseconds)."""
PUBLISH_BANDWIDTH: Final = 0.5e9
"""Bytes/s of packing, checking twice and copying weights; measured: a checksum alone makes 1.75 GB/s."""
REWARD_SECONDS: Final = {"exact": 3e-4, "regex": 3e-4, "reasoning_gym": 3e-4, "math_verify": 3e-3}
"""Of one sample. Measured, with the way to a scoring process and back."""
OWN_REWARD_SECONDS: Final = 10e-3
"""Assumed of a function of the user's own."""
PREFILL_TOKENS: Final = 1024
"""Of one prefill pass of the built-in engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What one worker does in a stage: FLOP, bytes of its memory, and passes over the layers."""

    flops: float
    bytes: float
    passes: float


def predict_stages(
    config: Config,
    facts: Mapping[str, ModelFacts],
    judges: Mapping[int, ModelFacts],
    nodes: tuple[NodeInfo, ...],
    workers: Mapping[str, list[WorkerPlan]],
) -> Iterator[Stage]:
    """All calls of a step in order, for roles that have workers and, where they need one, a model in `facts`. `judges` are the models that
    score answers."""
    calls = [
        (ROLLOUT, "generate", _generate),
        (REF, "logprobs", _score),
        (CRITIC, "values", _score),
        (ACTOR, "update", _update),
        (CRITIC, "update", _update),
    ]
    for role, call, work in calls:
        if role in facts and workers.get(role):
            yield _timed(config, role, call, facts[role], nodes, workers[role], work(config, role, facts[role], len(workers[role])))
        if (role, call) == (ROLLOUT, "generate") and workers.get(REWARD):
            yield _reward(config, judges, nodes, workers[REWARD])
    if workers.get(ACTOR) and ACTOR in facts:
        buffer = 4.0 * facts[ACTOR].parameters
        yield Stage(
            role=ACTOR, call="publish", workers=1, seconds=buffer / PUBLISH_BANDWIDTH, flops=0, bytes=4 * buffer, bound="transfer"
        )  # fmt: skip


def step_seconds(stages: Iterable[Stage], pools: Mapping[str, str]) -> float:
    """Seconds of a step: the groups of calls that the loop makes after each other. In each, roles of one pool take turns and those of
    different pools work side by side; `pools` has the pool of each role but of those with processes of their own."""
    phases: dict[int, dict[str, float]] = {}
    for stage in stages:
        number = {"generate": 0, "score": 1, "logprobs": 1, "values": 1, "update": 2, "publish": 3}[stage.call]
        place = pools.get(stage.role, stage.role)
        phase = phases.setdefault(number, {})
        phase[place] = phase.get(place, 0.0) + stage.seconds
    return sum(max(phase.values()) for phase in phases.values())


def _timed(
    config: Config, role: str, call: str, facts: ModelFacts, nodes: tuple[NodeInfo, ...], workers: list[WorkerPlan], work: _Work
) -> Stage:
    pool = config.pools[config.roles[role].pool]
    rates = _rates(config, nodes, workers)
    parts = {
        "compute": work.flops / (min(rate for rate, _ in rates) * COMPUTE_SHARE),
        "memory": work.bytes / (min(bandwidth for _, bandwidth in rates) * MEMORY_SHARE),
        "overhead": work.passes * facts.layers * LAYER_SECONDS[has_device(pool)],
    }
    bound = max(parts, key=lambda name: parts[name])
    count = len(workers)
    return Stage(
        role=role, call=call, workers=count, seconds=parts[bound], flops=count * work.flops, bytes=count * work.bytes, bound=bound
    )  # fmt: skip


def _rates(config: Config, nodes: tuple[NodeInfo, ...], workers: list[WorkerPlan]) -> set[tuple[float, float]]:
    """FLOP/s and bytes/s of the role's kinds of workers."""
    pool = config.pools[workers[0].pool]
    found, kinds = set(), set()
    for node, cpus in {worker.node: worker.cpus for worker in workers}.items():  # all slots of a node are equal
        gpu_type = nodes[node].gpu_type
        kinds.add((gpu_type, min(1.0, cpus)))
    for gpu_type, cpus in kinds:
        device = (device_type(gpu_type) or UNKNOWN_DEVICE) if has_device(pool) else CPU_CORE
        rate = device.bfloat16 if config.model.dtype == "bfloat16" else device.float32
        share = max(1, pool.gpus) / pool.share if has_device(pool) else cpus
        found.add((rate * share, device.bandwidth * share))
    return found


def _lengths(config: Config) -> tuple[int, int, int]:
    """Answers of a step, and tokens of a prompt and of an answer."""
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    return samples, config.data.max_prompt_tokens, config.data.max_response_tokens


def _attention(facts: ModelFacts, before: float, new: float) -> float:
    """FLOP of attention for `new` tokens behind `before`, in all layers."""
    return 4.0 * facts.layers * facts.query * (new * before + new * new / 2)


def _generate(config: Config, role: str, facts: ModelFacts, workers: int) -> _Work:
    samples, prompt, response = _lengths(config)
    width = width_of(config.model.dtype)
    mine, prompts = samples / workers, math.ceil(config.trainer.prompts_per_step / workers)
    rows = min(config.rollout.slots, math.ceil(mine))
    steps = response * max(1.0, mine / config.rollout.slots)
    prefills = max(1.0, prompts * prompt / PREFILL_TOKENS)
    flops = 2.0 * facts.layer_parameters * (prompts * prompt + mine * response)
    flops += 2.0 * facts.vocab * facts.hidden * (prompts + mine * response)
    flops += prompts * _attention(facts, 0, prompt) + mine * _attention(facts, prompt, response)
    token = 2.0 * facts.layers * facts.key_value * width
    weights = (facts.parameters - (0 if facts.tied else facts.vocab * facts.hidden)) * width
    return _Work(
        flops=flops,
        bytes=(steps + prefills) * weights + steps * rows * (prompt + response / 2) * token,
        passes=steps + prefills,
    )


def _forward(facts: ModelFacts, rows: float, prompt: int, response: int, heads: int) -> float:
    """FLOP of one pass over whole rows, with `heads` computations of the output layer for each token of the answer."""
    length = prompt + response
    head = 2.0 * facts.vocab * facts.hidden * response * heads
    return rows * (2.0 * facts.layer_parameters * length + _attention(facts, 0, length) + head)


def _score(config: Config, role: str, facts: ModelFacts, workers: int) -> _Work:
    samples, prompt, response = _lengths(config)
    rows = samples / workers
    passes = max(1.0, rows * (prompt + response) / micro_batch_tokens(config, workers, minibatches=1))
    flops = _forward(facts, rows, prompt, response, heads=1 if role == REF else 0)
    return _Work(flops=flops, bytes=passes * 4.0 * facts.parameters, passes=passes)


def _update(config: Config, role: str, facts: ModelFacts, workers: int) -> _Work:
    """Forward and twice that backward, or once where only an adapter is trained; with the output layer once more. AdamW reads and writes
    28 bytes a trained parameter."""
    samples, prompt, response = _lengths(config)
    trainer = config.trainer
    rows, steps = samples / workers * trainer.epochs, trainer.minibatches * trainer.epochs
    passes = max(float(steps), rows * (prompt + response) / micro_batch_tokens(config, workers))
    lora = config.model.lora if role == ACTOR else None
    trained = facts.parameters if lora is None else facts.adapter_parameters(lora.rank)
    flops = (3 if lora is None else 2) * _forward(facts, rows, prompt, response, heads=0)
    if role == ACTOR:
        flops += 4 * rows * 2.0 * facts.vocab * facts.hidden * response
    moved = 3 * passes * 4.0 * facts.parameters + steps * 28.0 * trained
    return _Work(flops=flops, bytes=moved, passes=3 * passes)


def _reward(config: Config, judges: Mapping[int, ModelFacts], nodes: tuple[NodeInfo, ...], workers: list[WorkerPlan]) -> Stage:
    """Models one after the other, beside the functions."""
    samples, _, _ = _lengths(config)
    each = sum(REWARD_SECONDS.get(reward.name, OWN_REWARD_SECONDS) for reward in config.reward if reward.model is None)
    side_by_side = len(workers) * scoring_processes(config, REWARD)
    functions = samples * each / min(side_by_side, samples)
    count = len(workers)
    models = [_timed(config, REWARD, "score", facts, nodes, workers, _score(config, REWARD, facts, count)) for facts in judges.values()]
    seconds, slowest = sum(stage.seconds for stage in models), max(models, key=lambda stage: stage.seconds, default=None)
    return Stage(
        role=REWARD,
        call="score",
        workers=count,
        seconds=max(functions, seconds),
        flops=sum(stage.flops for stage in models),
        bytes=sum(stage.bytes for stage in models),
        bound="functions" if slowest is None or functions > seconds else slowest.bound,
    )
