"""A whole GRPO step of rolemesh against the same work in a plain PyTorch loop, in one run.

    python benchmarks/grpo_step.py [--quick]

Both sides: the built-in tiny model in float32, 16 prompts x 8 answers, exactly 32 new tokens each (no end token), two processes of one
thread, one AdamW step with gradients summed over gloo. The plain loop is what one writes by hand: batched decoding with the model's own
KV cache and multinomial sampling, one padded forward and backward, no scoring, no records, no weight hand-over (it has one copy of the
weights). The ratio is plain time / rolemesh time per step: 1 means that roles, pools, references, rewards, publication, metrics and
trace cost nothing. Steps alternate between the two in blocks, because timings of a shared machine drift. Prints one JSON line last.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.multiprocessing as mp
from _harness import arguments, finish, median_ratio

from rolemesh.config import load_config
from rolemesh.config.schema import Config, ModelConfig
from rolemesh.models import load_model
from rolemesh.observe import RunDirectory
from rolemesh.plan import local_inventory
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.training import phases
from rolemesh.training.launch import backend_for, open_run, run_on
from rolemesh.training.preflight import prepare
from rolemesh.training.run import TrainingRun

PROMPTS, GROUP, NEW, WORKERS = 16, 8, 32, 2


class EndlessRollout(RolloutWorker):
    """Never stops before the limit, so that both sides make the same number of tokens."""

    def load(self) -> None:
        super().load()
        self.stop = ()


def length_reward(sample: Any, **options: object) -> float:
    """Something cheap that differs within a group."""
    return float(sum(map(ord, sample.response)) % 10)


class Silent:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def config_of(folder: str, *more: str) -> Config:
    """`more`: further overrides."""
    return load_config(
        "demo",
        [
            f"runs_dir={folder}", "trainer.steps=100000", f"trainer.prompts_per_step={PROMPTS}", f"algorithm.group_size={GROUP}",
            "trainer.minibatches=1", "trainer.epochs=1", "algorithm.no_signal=train", f"data.max_response_tokens={NEW}", "sft=null",
            f"rollout.slots={PROMPTS * GROUP // WORKERS}", "roles.rollout.worker=grpo_step:EndlessRollout", f"pools.main.nodes=[{WORKERS}]",
            "reward=[{name: 'grpo_step:length_reward'}]", "trainer.micro_batch_tokens=8192", "trainer.save_samples_every=1000000",
            *more,
        ],
    )  # fmt: skip


async def one_step(run: TrainingRun) -> float:
    """The phases of `training/loop.py`."""
    run.recorder.begin_step(run.progress.step + 1)
    began = time.perf_counter()
    samples = await phases.generate(run, phases.draw(run))
    batch = await phases.advantages(run, await phases.score(run, samples))
    await phases.update(run, batch)
    await phases.publish(run)
    seconds = time.perf_counter() - began
    await phases.record(run, batch)
    return seconds


def plain_rank(rank: int, port: int, prompts: list[list[int]], pipe: Connection) -> None:
    """One process of the plain loop."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    model = load_model(ModelConfig(path="tiny"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    mine = [prompt for prompt in prompts[rank::WORKERS] for _ in range(GROUP)]
    while pipe.recv():
        began = time.perf_counter()
        plain_step(model, optimizer, mine)
        pipe.send(time.perf_counter() - began)


def plain_step(model: Any, optimizer: torch.optim.Optimizer, prompts: list[list[int]]) -> None:
    import torch.distributed as dist

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    answers, old = plain_generate(model, ids, mask)
    mask = torch.cat([mask, torch.ones_like(answers)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(torch.cat([ids, answers], 1), attention_mask=mask, position_ids=positions, logits_to_keep=NEW + 1).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, answers[..., None])[..., 0]
    advantages = torch.randn(len(prompts), 1)
    ratio = (logprobs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / (PROMPTS * GROUP * NEW)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def plain_generate(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, logprobs, cache = [], [], None
    step, positions = ids, (mask.cumsum(1) - 1).clamp_min(0)
    for _ in range(NEW):
        out = model(step, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        scores = torch.log_softmax(out.logits[:, -1], -1)
        step = torch.multinomial(scores.exp(), 1)
        tokens.append(step)
        logprobs.append(scores.gather(1, step))
        mask = torch.cat([mask, torch.ones_like(step)], 1)
        positions = mask.sum(1, keepdim=True) - 1
    return torch.cat(tokens, 1).clone(), torch.cat(logprobs, 1).clone()


async def measure(run: TrainingRun, pipes: list[Connection], blocks: int, steps: int) -> tuple[list[float], list[float]]:
    """Alternate blocks of steps; the first block of each warms up and is not counted."""
    ours: list[float] = []
    plain: list[float] = []
    await phases.publish(run)
    for block in range(blocks + 1):
        for _ in range(steps):
            seconds = await one_step(run)
            ours += [seconds] if block else []
        for _ in range(steps):
            for pipe in pipes:
                pipe.send(True)
            times = [pipe.recv() for pipe in pipes]
            plain += [max(times)] if block else []
    return ours, plain


def main() -> None:
    quick = arguments("A GRPO step of rolemesh against a plain PyTorch loop of the same work.").quick
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(folder)
        prepared = prepare(config, local_inventory())
        prompts = prepared.prompts.draw(PROMPTS).rows("prompt_ids")
        pairs = [mp.Pipe() for _ in range(WORKERS)]
        context = mp.get_context("spawn")
        port = 20_000 + os.getpid() % 20_000
        processes = [context.Process(target=plain_rank, args=(rank, port, prompts, pairs[rank][1]), daemon=True) for rank in range(WORKERS)]
        for process in processes:
            process.start()
        directory = RunDirectory.create(config.runs_dir, "bench")
        backend = backend_for(config, local_inventory(), directory.name)

        async def session() -> tuple[list[float], list[float]]:
            async with open_run(prepared, directory, backend, Silent()) as run:
                return await measure(run, [pair[0] for pair in pairs], 2 if quick else 6, 3 if quick else 5)

        try:
            ours, plain = run_on(backend, session())
        finally:
            for pair in pairs:
                pair[0].send(False)
            for process in processes:
                process.join(timeout=10)
    tokens = PROMPTS * GROUP * NEW
    speeds = {name: tokens / statistics.median(times) for name, times in (("rolemesh", ours), ("plain loop", plain))}
    ratios = {"plain loop time / rolemesh time": median_ratio(plain, ours)}
    finish("grpo_step", ratios, ["rolemesh", "torch", "transformers", "ray"], tokens_per_second=speeds)


if __name__ == "__main__":
    main()
