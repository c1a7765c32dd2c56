"""The train engine on one thread: packed rows against padded ones, and a whole update against the same step in bare torch.

    python benchmarks/train_engine.py [--quick]

mixed    answers have lengths as real ones do: exponential, mean a quarter of the limit, cut at the limit (drawn in advance). Prompts
         have 32 tokens. Micro-batches hold 4096 tokens, and rows of similar length go together on both sides.
equal    all answers have the same length, so there is nothing to win by packing.
step     one optimizer step of GRPO over the mixed rows: the engine with packing off against a loop of bare torch over the same
         micro-batches, with the same work in it: body on all positions, head and entropy on response positions, clipped loss, backward,
         clipping of the norm over all parameters, fused AdamW. Rows lie in Arrow columns on one side and as lists on the other.
TRL      the update of its GRPOTrainer on the same rows, where it is installed: micro-batches of 8, padded to the longest of the step.

`padded time / packed time` above 1 says that packing pays; `engine time / bare torch time` is what the engine costs, 1 for nothing;
`TRL time / packed time` is above 1 where we are faster. Prints one JSON line last.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib.util
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from _harness import arguments, finish, interleaved, median_ratio
from rollout_engine import SHAPES
from transformers import LlamaConfig, LlamaForCausalLM

from rolemesh.algorithms import Grpo
from rolemesh.batch import Batch
from rolemesh.config.schema import AlgorithmConfig
from rolemesh.engines.train import OptimizerSettings, TrainEngine
from rolemesh.observe import Metrics

PROMPT, BUDGET = 32, 4096


def model_of(shape: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=2048, attn_implementation="sdpa")).eval()


def rows_of(vocabulary: int, lengths: np.ndarray) -> Batch:
    random = np.random.default_rng(0)
    count = len(lengths)
    responses = [random.integers(0, vocabulary, length).tolist() for length in lengths]
    return Batch.from_columns(
        {
            "draw": np.arange(count),
            "sample": np.zeros(count, dtype=np.int64),
            "prompt_ids": [random.integers(0, vocabulary, PROMPT).tolist() for _ in range(count)],
            "response_ids": responses,
            "rollout_logprobs": [[-np.log(vocabulary)] * len(response) for response in responses],
            "advantage": random.normal(size=count),
            "token_weight": np.full(count, 1.0 / lengths.sum()),
        }
    )


def engine_step(shape: str, data: Batch, *, packing: bool) -> Callable[[], None]:
    settings = OptimizerSettings(learning_rate=1e-6)
    engine = TrainEngine(model_of(shape), optimizer=settings, micro_batch_tokens=BUDGET, packing=packing)
    loss = Grpo(AlgorithmConfig(), minibatches=1).loss
    return lambda: engine.update(data, loss, temperature=1.0, metrics=Metrics())


def bare_step(shape: str, data: Batch) -> Callable[[], None]:
    """The step as one writes it by hand."""
    model = model_of(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    names = ("prompt_ids", "response_ids", "rollout_logprobs")
    rows = list(zip(*(data.rows(name) for name in names), data.scalars("advantage"), data.scalars("token_weight"), strict=True))
    rows.sort(key=lambda row: -len(row[1]))

    def pass_over(part: list) -> None:
        width = max(len(prompt) + len(response) for prompt, response, *_ in part) - 1
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        for index, (prompt, response, *_) in enumerate(part):
            ids[index, : len(prompt) + len(response) - 1] = torch.tensor((prompt + response)[:-1])
        at = torch.cat([index * width + torch.arange(len(row[0]) - 1, len(row[0]) + len(row[1]) - 1) for index, row in enumerate(part)])
        targets = torch.tensor([token for row in part for token in row[1]])
        old = torch.tensor([value for row in part for value in row[2]])
        counts = torch.tensor([len(row[1]) for row in part])
        advantages, weights = (torch.tensor([row[k] for row in part], dtype=torch.float32).repeat_interleave(counts) for k in (3, 4))
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[at]
        logprobs = model.lm_head(hidden).log_softmax(-1)
        with torch.no_grad():
            -(logprobs.exp() * logprobs).sum(-1)
        ratio = (logprobs.gather(-1, targets[:, None])[:, 0] - old).exp()
        loss = -(weights * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).sum()
        loss.backward()

    def step() -> None:
        start = 0
        while start < len(rows):
            count = max(1, BUDGET // (len(rows[start][0]) + len(rows[start][1])))
            pass_over(rows[start : start + count])
            start += count
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def rivals(shape: str, data: Batch) -> dict[str, Callable[[], None]]:
    """TRL's update, if it is installed."""
    if importlib.util.find_spec("trl") is None:
        return {}
    from _trl_update import trl_step

    return {"TRL": trl_step(model_of(shape), data)}


def main() -> None:
    quick = arguments("Packed against padded rows, and an update against bare torch.").quick
    torch.set_num_threads(1)
    ratios, speeds = {}, {}
    for shape, count, limit, rounds in [("1M", 16, 128, 2)] if quick else [("1M", 64, 512, 9), ("15M", 16, 512, 3)]:
        vocabulary, random = SHAPES[shape]["vocab_size"], np.random.default_rng(1)
        mixed = np.clip(random.exponential(limit / 4, count), 1, limit).astype(np.int64)
        works = {"mixed": rows_of(vocabulary, mixed), "equal": rows_of(vocabulary, np.full(count, limit // 4))}
        for name, data in works.items():
            cases = {
                "padded": engine_step(shape, data, packing=False),
                "packed": engine_step(shape, data, packing=True),
                **({"bare": bare_step(shape, data)} if name == "mixed" else {}),
                **rivals(shape, data),
            }
            times = interleaved(cases, rounds)
            print(f"{shape} {name}: " + ", ".join(f"{case} {median(times[case]):.2f} s" for case in times), flush=True)
            ratios[f"{shape} {name}: padded time / packed time"] = median_ratio(times["padded"], times["packed"])
            if "TRL" in times:
                ratios[f"{shape} {name}: TRL time / packed time"] = median_ratio(times["TRL"], times["packed"])
            if "bare" in times:
                ratios[f"{shape} step: engine time / bare torch time"] = median_ratio(times["padded"], times["bare"])
            speeds[f"{shape} {name}"] = {case: int(data.token_counts.sum()) / median(seconds) for case, seconds in times.items()}
    trl = ["trl"] if importlib.util.find_spec("trl") else []
    skipped = [] if trl else ["TRL: trl is not installed"]
    finish("train_engine", ratios, ["rolemesh", "torch", "transformers", *trl], tokens_per_second=speeds, skipped=skipped)


if __name__ == "__main__":
    main()
