"""A tiny model, a batch with everything an update reads, and an engine over them. Shared by the tests of this folder."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rolemesh.algorithms import Grpo, Ppo
from rolemesh.batch import Batch
from rolemesh.config.schema import AlgorithmConfig
from rolemesh.engines.train import OptimizerSettings, TrainEngine, ValueEngine, ValueModel
from rolemesh.engines.train.replica import Replica
from rolemesh.observe import Metrics

VOCABULARY = 24
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum")


def tiny_model(seed: int = 0, *, tied: bool = False) -> LlamaForCausalLM:
    """Two layers of width 16. Weights of spread 0.1, above the usual 0.02: a near-uniform output would hide wrong positions."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def engine(model=None, *, rows: int = 8, learning_rate: float = 1e-3, **options) -> TrainEngine:
    """An engine whose micro-batches hold `rows` rows of the longest length of `batch()`, 12 tokens."""
    settings = options.pop("optimizer", OptimizerSettings(learning_rate=learning_rate))
    return TrainEngine(tiny_model() if model is None else model, optimizer=settings, micro_batch_tokens=12 * rows, **options)


@cache
def batch(seed: int = 0, rows: int = 8, noise: float = 0.3, mode: str = "token_mean") -> Batch:
    """Rows of uneven lengths in groups of two, one of them without a reward, with old log-probabilities a bit off the model's own."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCABULARY, 1 + k % 4).tolist() for k in range(rows)]
    lengths = [8, 3, 1, 5, 2, 7, 4, 6] * (rows // 8 + 1)
    responses = [random.integers(0, VOCABULARY, lengths[k]).tolist() for k in range(rows)]
    rewards = random.normal(size=rows)
    rewards[-1] = np.nan
    columns = {
        "draw": np.arange(rows) // 2 + 40,
        "sample": np.arange(rows) % 2,
        "prompt_ids": prompts,
        "response_ids": responses,
        "response_length": np.array([len(response) for response in responses]),
        "reward": rewards,
    }
    made = Batch.from_columns(columns)
    own = engine().logprobs(made, 1.0)
    made = made.with_columns(
        {"rollout_logprobs": [(row + random.normal(size=len(row)) * noise).astype(np.float32).tolist() for row in own]}
    )
    return algorithm(mode).prepare(made, Metrics())


def algorithm(mode: str = "token_mean", **options) -> Grpo:
    return Grpo(AlgorithmConfig(group_size=8, normalize_std=False, aggregation=mode, **options), minibatches=1)


def ppo(mode: str = "token_mean", **options) -> Ppo:
    return Ppo(AlgorithmConfig(**{"name": "ppo", "group_size": 8, "aggregation": mode, "lam": 0.9} | options), minibatches=1)


def value_model(seed: int = 0) -> ValueModel:
    """With a head of spread 0.5: values near 0 would hide wrong positions."""
    made = ValueModel.of_causal(tiny_model(seed), seed=seed)
    with torch.no_grad():
        made.head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(seed))
    return made


def critic(model=None, *, rows: int = 8, learning_rate: float = 1e-3, **options) -> ValueEngine:
    """`engine` for values."""
    settings = options.pop("optimizer", OptimizerSettings(learning_rate=learning_rate))
    return ValueEngine(value_model() if model is None else model, optimizer=settings, micro_batch_tokens=12 * rows, **options)


def critic_batch(mode: str = "token_mean", **columns) -> Batch:
    """`batch` with what the critic learns from: old values a bit off its own, advantages and returns."""
    return _critic_batch(mode, **columns) if columns else _usual_critic_batch(mode)


@cache
def _usual_critic_batch(mode: str) -> Batch:
    return _critic_batch(mode)


def _critic_batch(mode: str, **columns) -> Batch:
    random = np.random.default_rng(7)
    data = batch().drop(["advantage", "token_weight", "minibatch"]).with_columns(columns)
    own = critic().values(data)
    data = data.with_columns({"values": [row + random.normal(size=len(row)).astype(np.float32) * 0.3 for row in own]})
    algorithm = ppo(mode)
    return algorithm.prepare(data.join(algorithm.estimate(data, kl_coefficient=0.0)), Metrics())


WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"


def save(trainer: Replica, folder: Path) -> None:
    """Write this rank's blocks of weights and optimizer state."""
    weights, optimizer = trainer.files()
    weights.write(folder / WEIGHTS)
    optimizer.write(folder / OPTIMIZER)


def load_state(trainer: Replica, folder: Path, step: int) -> None:
    trainer.load_files(folder / WEIGHTS, folder / OPTIMIZER, step)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """All that `save` wrote, by names of both files."""
    return load_file(folder / WEIGHTS) | load_file(folder / OPTIMIZER)


def state_of(trainer: Replica) -> dict[str, torch.Tensor]:
    """What an engine that has everything would save."""
    with tempfile.TemporaryDirectory() as folder:
        save(trainer, Path(folder))
        return saved(Path(folder))


def largest_gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Largest difference of two sets of gradients, as a share of the largest element."""
    assert first.keys() == second.keys()
    largest = max(float(gradient.abs().max()) for gradient in first.values())
    return max(float((first[name] - second[name]).abs().max()) for name in first) / largest


def naive_logprobs(model, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """One row at a time, the whole model, no padding: what every shortcut of the engine must agree with."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
