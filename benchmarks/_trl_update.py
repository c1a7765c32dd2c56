"""One GRPO update as TRL's trainer does it, on rows that were sampled before. Used by `train_engine.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from rolemesh.batch import Batch

ROWS = 8
"""Of a micro-batch: TRL's default."""


class Updates(GRPOTrainer):
    """Is given its micro-batches instead of generating them."""

    def _prepare_inputs(self, generation_batch: dict) -> dict:
        return generation_batch


def trl_step(model: PreTrainedModel, data: Batch) -> Callable[[], None]:
    """An optimizer step on all rows: TRL's own loss, backward, clipping and AdamW, without its dataloader and logs. As in TRL, completions
    are padded to the longest of the step; activations are kept, which is not its default, as the other sides keep them."""
    count = data.num_rows
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, "<pad>")), pad_token="<pad>")
    tokenizer.eos_token = "a"
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"), per_device_train_batch_size=ROWS, gradient_accumulation_steps=-(-count // ROWS),
        num_generations=ROWS, learning_rate=1e-6, max_grad_norm=1.0, beta=0.0, use_cpu=True, bf16=False, gradient_checkpointing=False,
        optim="adamw_torch_fused", report_to=[],
    )  # fmt: skip
    trainer = Updates(
        model=model, args=options, processing_class=tokenizer, train_dataset=Dataset.from_list([{"prompt": "a"}] * ROWS),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
    )  # fmt: skip
    trainer.create_optimizer_and_scheduler(num_training_steps=1_000_000)
    wrapped, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    wrapped.train()
    trainer.current_gradient_accumulation_steps = options.gradient_accumulation_steps
    micro_batches = _micro_batches(data)

    def step() -> None:
        for inputs in micro_batches:
            trainer.training_step(wrapped, inputs, None)
        trainer.accelerator.clip_grad_norm_(wrapped.parameters(), options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _micro_batches(data: Batch) -> list[dict]:
    names = ("prompt_ids", "response_ids", "rollout_logprobs")
    prompts, responses, logprobs = (data.rows(name) for name in names)
    width = max(len(response) for response in responses)

    def padded(rows: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(torch.tensor(row, dtype=dtype), (0, width - len(row))) for row in rows])

    advantages, tokens = torch.tensor(data.scalars("advantage"), dtype=torch.float32), sum(len(response) for response in responses)
    found = []
    for start in range(0, len(responses), ROWS):
        part = slice(start, start + ROWS)
        found.append(
            {
                "prompt_ids": torch.tensor(prompts[part]),
                "prompt_mask": torch.ones(len(prompts[part]), len(prompts[start]), dtype=torch.int64),
                "completion_ids": padded(responses[part], torch.int64),
                "completion_mask": padded([[1] * len(response) for response in responses[part]], torch.int64),
                "old_per_token_logps": padded(logprobs[part], torch.float32),
                "advantages": advantages[part],
                "num_items_in_batch": torch.tensor(float(tokens)),
            }
        )
    return found
