"""One process of TRL's side of `grpo_step_trl.py`: its GRPOTrainer as it is, held up before each step until one is asked for.

    PYTHON _trl_grpo.py SETTINGS

Reads a line for each step and answers with the seconds that it took, from the first token generated to the optimizer's step. RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which process of how many it is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any, TextIO

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Lengths(StoppingCriteria):
    """Row i ends with its `lengths[i]`-th token, which is the padding token, standing for the end token of a real answer."""

    def __init__(self, lengths: list[int], prompt: int, pad: int) -> None:
        self._ends = torch.tensor(lengths) - 1 + prompt
        self.eos_token_id = [pad]  # has `generate` pad what has ended

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return self._ends <= input_ids.shape[1]


class OneAtATime(TrainerCallback):
    """Begins a step when told to."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not sys.stdin.readline():
            os._exit(0)  # nothing is left to be written or joined
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        print(json.dumps(time.perf_counter() - self._began), file=self._answers)


def length_reward(completions: list[str], **_: object) -> list[float]:
    return [float(sum(map(ord, text)) % 10) for text in completions]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, ranks, group = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), settings["group"]
    rows = len(settings["prompts"]) * group // ranks
    tokenizer = AutoTokenizer.from_pretrained(settings["folder"])
    tokenizer.eos_token = tokenizer.pad_token
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32)
    model.generation_config.eos_token_id = None
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"), per_device_train_batch_size=settings["micro_batch"], num_generations=group,
        gradient_accumulation_steps=rows // settings["micro_batch"], max_completion_length=settings["limit"], temperature=1.0,
        learning_rate=1e-6, lr_scheduler_type="constant", max_grad_norm=1.0, beta=0.0, max_steps=1_000_000, use_cpu=True, bf16=False,
        gradient_checkpointing=False, ddp_backend="gloo", ddp_find_unused_parameters=False, optim="adamw_torch_fused",
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, shuffle_dataset=False,
        generation_kwargs={"eos_token_id": None, "suppress_tokens": [tokenizer.pad_token_id]},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=options, processing_class=tokenizer, reward_funcs=length_reward, callbacks=[OneAtATime(answers)],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in settings["prompts"]]),
    )  # fmt: skip
    if lengths := settings["lengths"]:
        mine, generate = lengths[rank * rows : (rank + 1) * rows], model.generate

        def to_lengths(**inputs: Any) -> Any:
            stop = Lengths(mine, inputs["input_ids"].shape[1], tokenizer.pad_token_id)
            return generate(**inputs, stopping_criteria=StoppingCriteriaList([stop]))

        model.generate = to_lengths
    print(json.dumps({"version": trl.__version__}), file=answers)
    trainer.train()


if __name__ == "__main__":
    main()
