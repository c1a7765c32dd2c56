"""A whole GRPO step of rolemesh beside one of TRL's GRPOTrainer, in one run.

    python benchmarks/grpo_step_trl.py [--quick]

Both: the same model in float32, the same 16 prompts x 8 answers a step, temperature 1, two processes of one thread, one AdamW step, a
reward that costs nothing. Ours goes the way of every run: Ray, roles, references, publication. TRL generates with `generate` of
transformers, in the layout that is its best on two cores, with activations kept and larger micro-batches than its default. Without trl
(`pip install trl==1.16.0`) it is skipped.

equal   every answer has 32 tokens.
mixed   lengths as real answers have them: exponential, mean 32, at most 128, drawn in advance, the same for both: ours as the limit of each
        request, TRL's as a stopping criterion of each row.

A ratio is TRL's time over ours for the same step, medians over steps that alternate in blocks. Prints one JSON line last.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _harness import Side, arguments, finish
from grpo_step import GROUP, NEW, PROMPTS, WORKERS, Silent, config_of, one_step
from rollout_engine import SHAPES
from transformers import LlamaConfig, LlamaForCausalLM

from rolemesh.config.schema import ModelConfig
from rolemesh.models import load_tokenizer
from rolemesh.observe import RunDirectory
from rolemesh.plan import local_inventory
from rolemesh.protocols.engine import Request, Sampling
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.training import phases
from rolemesh.training.launch import backend_for, open_run, run_on
from rolemesh.training.preflight import prepare

MICRO_BATCH = 16
SECONDS = 180.0
LONGEST = 4
"""Limit of mixed lengths, in means."""


def mixed_lengths() -> list[int]:
    """Of the answers of a step, prompt after prompt."""
    random = np.random.default_rng(0)
    return np.ceil(random.exponential(NEW, PROMPTS * GROUP)).clip(2, LONGEST * NEW).astype(int).tolist()


class RolloutToLengths(RolloutWorker):
    """Ends answers at lengths that were drawn in advance."""

    def load(self) -> None:
        super().load()
        self.stop = ()
        lengths, add = mixed_lengths(), self.engine.add

        def to_length(requests: list[Request], sampling: Sampling) -> None:
            for request in requests:
                length = lengths[request.id[0] % PROMPTS * GROUP + request.id[1]]
                add([request], replace(sampling, max_new_tokens=length))

        self.engine.add = to_length  # type: ignore[method-assign]


def save_model(shape: str, folder: str) -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(ModelConfig(path="tiny"))
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=512, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trl_sides(folder: str, prompts: list[str], name: str) -> list[Side]:
    settings = {
        "folder": folder, "prompts": prompts, "group": GROUP, "micro_batch": MICRO_BATCH,
        "limit": NEW if name == "equal" else LONGEST * NEW, "lengths": [] if name == "equal" else mixed_lengths(),
    }  # fmt: skip
    script = str(Path(__file__).with_name("_trl_grpo.py"))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000), "WORLD_SIZE": str(WORKERS)}
    command = [sys.executable, script, json.dumps(settings)]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(WORKERS)]
    return [side.greet() for side in [Side("TRL", command, SECONDS, where | rank) for rank in ranks]]


def compare(folder: str, shape: str, name: str, quick: bool) -> dict[str, list[float]]:
    """Seconds of the steps of both sides."""
    rollout = "grpo_step:EndlessRollout" if name == "equal" else "grpo_step_trl:RolloutToLengths"
    limit = NEW if name == "equal" else LONGEST * NEW
    config = config_of(folder, f"model.path={folder}/{shape}", f"roles.rollout.worker={rollout}", f"data.max_response_tokens={limit}")
    prepared = prepare(config, local_inventory())
    directory = RunDirectory.create(config.runs_dir, "bench")
    backend = backend_for(config, local_inventory(), directory.name)
    texts = prepared.prompts.draw(PROMPTS).scalars("prompt")
    sides = trl_sides(f"{folder}/{shape}", list(texts), name) if importlib.util.find_spec("trl") else []
    times: dict[str, list[float]] = {"rolemesh": [], "TRL": []}
    blocks, steps = (1, 1) if quick else (4, 4) if shape == "1M" else (3, 1)

    def theirs() -> float:
        for side in sides:
            side.tell("step")
        return max([side.answer() for side in sides], default=0.0)

    async def session() -> None:
        async with open_run(prepared, directory, backend, Silent()) as run:
            await phases.publish(run)
            for block in range(blocks + 1):
                found = {"rolemesh": [await one_step(run) for _ in range(steps)], "TRL": [theirs() for _ in range(steps)]}
                for who, seconds in found.items():
                    times[who] += seconds if block else []

    try:
        run_on(backend, session())
    finally:
        for side in sides:
            side.close()
    return times if sides else {"rolemesh": times["rolemesh"]}


def main() -> None:
    quick = arguments(__doc__ or "").quick
    ratios, speeds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in ("1M",) if quick else ("1M", "15M"):
            save_model(shape, f"{folder}/{shape}")
            for name in ("equal", "mixed"):
                times = compare(folder, shape, name, quick)
                tokens = PROMPTS * GROUP * NEW if name == "equal" else sum(mixed_lengths())
                speeds |= {f"{shape} {name}, {who}": tokens / median(seconds) for who, seconds in times.items()}
                if "TRL" in times:
                    ratios[f"{shape} {name}: TRL time / rolemesh time"] = median(times["TRL"]) / median(times["rolemesh"])
                told = ", ".join(f"{who} {speeds[f'{shape} {name}, {who}']:.0f} tokens/s" for who in times)
                print(f"{shape} {name}: {told}", flush=True)
    installed = importlib.util.find_spec("trl") is not None
    packages = ["rolemesh", "torch", "transformers", "ray", *(["trl"] if installed else [])]
    finish("grpo_step_trl", ratios, packages, tokens_per_second=speeds, skipped=[] if installed else ["TRL: trl is not installed"])


if __name__ == "__main__":
    main()
