"""The built-in rollout engine against `generate` of transformers, on one thread.

The engine runs in fast mode and returns a log-probability with every token; `generate` returns tokens alone. Both sample at
temperature 1 from the same weights and hold at most SLOTS sequences at once.

equal   every answer has the same number of tokens.
mixed   answers end at different times, as real ones do. Lengths are drawn in advance (exponential, mean a quarter of the limit, cut
        at the limit) and are the same for both: the engine gets them as max_new_tokens of each request, `generate` as a stopping
        criterion of each row, which it treats like a sampled end token. Requests come in random order of lengths.
        Only tokens of answers are counted.
shared  each prompt is answered 8 times, as group-based algorithms do. distinct: all prompts differ, so no prefill can be shared.

A ratio is the time of `generate` over the time of the engine for the same requests. `deterministic / fast` is what the deterministic mode
costs, whose answers are the same bits on any number of engines: its time over that of the fast mode.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from _harness import arguments, finish, interleaved, median_ratio
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from rolemesh.engines.rollout.builtin import BuiltinEngine
from rolemesh.protocols.engine import Request, Sampling

SLOTS = 64
PROMPT_TOKENS = 32
SHAPES = {
    "1M": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "5M": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "15M": {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "25M": {
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompts [n, PROMPT_TOKENS] and the length of the answer to each, at most `limit`."""

    prompts: torch.Tensor
    lengths: np.ndarray
    limit: int


class Lengths(StoppingCriteria):
    """Row i is done after `lengths[i]` new tokens."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._ends = torch.from_numpy(lengths) + PROMPT_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return self._ends <= input_ids.shape[1]


def make_work(vocabulary: int, answers: int, limit: int, *, mixed: bool, shared: bool) -> Work:
    rng = np.random.default_rng(0)
    per_prompt = 8 if shared else 1
    prompts = torch.from_numpy(rng.integers(vocabulary, size=(answers // per_prompt, PROMPT_TOKENS))).repeat_interleave(per_prompt, 0)
    lengths = np.ceil(rng.exponential(limit / 4, answers)).clip(1, limit).astype(np.int64) if mixed else np.full(answers, limit)
    return Work(prompts=prompts, lengths=lengths, limit=limit)


def made_engine(model: LlamaForCausalLM, limit: int, *, deterministic: bool) -> BuiltinEngine:
    own, most = LlamaForCausalLM(model.config), {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": limit}
    engine = BuiltinEngine(own, slots=SLOTS, deterministic=deterministic, **most)
    engine.load_weights(model.named_parameters(), 0)
    return engine


def engine_run(engine: BuiltinEngine, work: Work) -> Callable[[], None]:
    def run() -> None:
        for number, (prompt, length) in enumerate(zip(work.prompts.tolist(), work.lengths.tolist(), strict=True)):
            settings = Sampling(temperature=1.0, max_new_tokens=length, stop_token_ids=(), seed=0)
            engine.add([Request(id=(number, 0), prompt_ids=prompt)], settings)
        tokens = 0
        while engine.unfinished:
            tokens += sum(len(completion.logprobs) for completion in engine.step())
        assert tokens == work.lengths.sum()

    return run


def generate_run(model: LlamaForCausalLM, work: Work) -> Callable[[], None]:
    @torch.inference_mode()
    def run() -> None:
        for start in range(0, len(work.prompts), SLOTS):
            ids = work.prompts[start : start + SLOTS]
            lengths = work.lengths[start : start + SLOTS]
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=work.limit,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Lengths(lengths)]) if lengths.min() < work.limit else None,
            )
            assert output.shape[1] == PROMPT_TOKENS + lengths.max()

    return run


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    ratios: dict[str, float] = {}
    speeds: dict[str, float] = {}
    for shape in ("1M", "15M"):
        config = SHAPES[shape]
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**config, bos_token_id=None, eos_token_id=None, pad_token_id=None)).eval()
        limit = 16 if options.quick else 128
        engine, deterministic = (made_engine(model, limit, deterministic=mode) for mode in (False, True))
        for lengths in ("equal", "mixed"):
            for prompts in ("shared", "distinct"):
                if shape == "15M" and prompts == "distinct" and not options.quick:
                    continue  # minutes that would say what the small model has said
                case = f"{shape} {lengths} {prompts}"
                tokens = limit // 2 if lengths == "equal" else limit
                answers = SLOTS if lengths == "equal" or options.quick else 4 * SLOTS
                work = make_work(config["vocab_size"], answers, tokens, mixed=lengths == "mixed", shared=prompts == "shared")
                rounds = 1 if options.quick else 9 if shape == "1M" else 3
                cases = {"engine": engine_run(engine, work), "generate": generate_run(model, work)}
                if prompts == "shared":
                    cases["deterministic"] = engine_run(deterministic, work)
                times = interleaved(cases, rounds)
                ratios[case] = median_ratio(times["generate"], times["engine"])
                if prompts == "shared":
                    ratios[f"{case}: deterministic / fast"] = median_ratio(times["deterministic"], times["engine"])
                for who, seconds in times.items():
                    speeds[f"{case} {who}"] = round(float(work.lengths.sum()) / median(seconds))
                print(f"{case}: {ratios[case]:.2f}", flush=True)
    finish("rollout_engine", ratios, ["rolemesh", "torch", "transformers", "numpy"], tokens_per_second=speeds)


if __name__ == "__main__":
    main()
