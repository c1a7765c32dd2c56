"""What a checkpoint costs the loop: saved beside the next step, and with training waiting for the disk.

    python benchmarks/checkpoint.py [--quick]

One process trains a model of 15M parameters (190 MB of weights and moments; 1M with `--quick`) by GRPO, and after each step saves, in
turns beside the next step and not. For a save beside the steps the loop waits only until the state is copied.

`stall / save` is that wait as a part of the time of a save that the loop waits for to its end: at most 0.1. `step beside a save / step`
says what the writing takes from the step beside it, above 1 where both want the same cores. Prints one JSON line last.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _harness import arguments, finish, median_ratio
from rollout_engine import SHAPES
from transformers import LlamaConfig, LlamaForCausalLM

from rolemesh.config import load_config
from rolemesh.config.schema import Config, ModelConfig
from rolemesh.models import load_tokenizer, save_model
from rolemesh.observe import list_runs, read_json_lines
from rolemesh.training import loop, phases, saving
from rolemesh.training.launch import run_training
from rolemesh.training.run import TrainingRun

LIMIT = 0.1
"""Part of a save for which the loop may wait."""


def letters_reward(sample: Any, **options: object) -> float:
    """Differs within a group, whatever the model answers."""
    return float(sum(map(ord, sample.response)) % 7)


class Silent:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def config_of(folder: Path, shape: str, steps: int) -> Config:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(ModelConfig())
    sizes = SHAPES[shape] | {"vocab_size": max(SHAPES[shape]["vocab_size"], len(tokenizer))}
    save_model(folder / "model", LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256)), tokenizer)
    return load_config(
        "demo",
        [
            f"runs_dir={folder / 'runs'}", f"model.path={folder / 'model'}", "backend=local", "pools.main.nodes=[1]", "sft=null",
            "reward=[{name: 'checkpoint:letters_reward'}]", f"trainer.steps={steps}", "trainer.prompts_per_step=4",
            "algorithm.group_size=4", "data.max_response_tokens=32", "trainer.keep_checkpoints=1",
        ],
    )  # fmt: skip


def saves_by(beside: bool, config: Config) -> Config:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"async_save": beside})})


def main() -> None:
    options = arguments(__doc__ or "")
    shape, rounds = ("1M", 2) if options.quick else ("15M", 8)
    stalls: dict[bool, list[float]] = {True: [], False: []}
    steps: dict[bool, list[float]] = {True: [], False: []}

    async def measured(run: TrainingRun) -> None:
        """Steps in turns with a save beside them and none, the first for warming up."""
        await phases.publish(run)
        for number in run.steps():
            began = time.perf_counter()
            await loop.step(run)
            took = time.perf_counter() - began
            await saving.finish(run)
            beside = number % 2 == 1
            if number > 2:
                steps[not beside].append(took)  # the save before it was of the other kind
            run.config = saves_by(beside, run.config)
            began = time.perf_counter()
            await phases.save(run)
            if number > 2:
                stalls[beside].append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
        folder = Path(name)
        run_training(config_of(folder, shape, 2 * rounds + 2), Silent(), loop=measured)
        (run,) = list_runs(folder / "runs")
        saved = [row for row in read_json_lines(run.metrics) if "checkpoint/bytes" in row]
    ratios = {
        "stall / save": 1 / median_ratio(stalls[False], stalls[True]),
        "step beside a save / step": median(steps[True]) / median(steps[False]),
    }
    figures = {
        "stall ms": 1000 * median(stalls[True]),
        "save ms": 1000 * median(stalls[False]),
        "checkpoint MB": saved[0]["checkpoint/bytes"] / 1e6,
    }
    for what, figure in (ratios | figures).items():
        print(f"{what}: {figure:.3f}")
    finish("checkpoint", ratios, ["rolemesh", "torch"], figures=figures, limits={"stall / save": LIMIT})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
