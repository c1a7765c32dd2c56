"""The reward with models: workers in slots that score answers with frozen models, and with functions beside them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rolemesh.batch import Batch
from rolemesh.engines.train import RewardEngine, load_reward_model
from rolemesh.models import RewardReader, UnreadableSample, load_tokenizer
from rolemesh.observe import Metrics
from rolemesh.protocols.reward import Sample
from rolemesh.rewards.work import Answer, Fault
from rolemesh.roles.reward import READS, WRITES, RewardWorker
from rolemesh.runtime import register


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward model and how it reads."""

    reader: RewardReader
    engine: RewardEngine

    def answers(self, batch: Batch, samples: Sequence[Sample], metrics: Metrics) -> list[Answer]:
        """Its score of each row, or why there is none."""
        rows, faults = dict[int, list[int]](), dict[int, Fault]()
        prompts, responses = batch.rows("prompt_ids"), batch.rows("response_ids")
        messages = batch.scalars("messages") if "messages" in batch.names else [None] * len(samples)
        for row, sample in enumerate(samples):
            try:
                if self.reader.same_tokens:
                    ids = prompts[row] + responses[row]
                else:
                    ids = self.reader.encode(sample.prompt, messages[row], sample.response, ended=sample.finish_reason == "stop")
                rows[row] = self.reader.fit(ids)
                metrics.sum("reward/model/cut", len(rows[row]) < len(ids))
            except UnreadableSample as error:
                faults[row] = Fault(type="UnreadableSample", message=str(error))
        scores = dict(zip(rows, self.engine.scores(list(rows.values())).tolist(), strict=True))
        return [Answer(value=scores[row]) if row in scores else Answer(fault=faults[row]) for row in range(len(samples))]


class ModelRewardWorker(RewardWorker):
    """Scores answers with whole copies of the models of the `reward` section; functions run in processes of their own meanwhile."""

    def load(self) -> None:
        """Load the models, and what functions need."""
        torch.set_num_threads(1)
        config, policy = self.config, load_tokenizer(self.config.model)
        self.judges: dict[int, Judge] = {}
        for number, model in config.reward_models.items():
            engine = RewardEngine(
                load_reward_model(model.as_model, option=f"reward.{number}.model.path"),
                micro_batch_tokens=config.trainer.micro_batch_tokens,
                device=self.context.device,
                packing=config.trainer.packing,
            )
            self.judges[number] = Judge(RewardReader(model, policy, option=f"reward.{number}.model"), engine)
        super().load()

    @register(dispatch="balanced", reads=(*READS, "prompt_ids", "response_ids", "messages"), writes=WRITES)
    def score(self, batch: Batch) -> Batch:
        """As without models; rows are balanced by tokens."""
        self.metrics.max(f"memory/{self.context.group}/weights", sum(judge.engine.memory() for judge in self.judges.values()))
        return super().score(batch)

    def _answers(self, batch: Batch, samples: list[Sample]) -> dict[int, list[Answer]]:
        with ThreadPoolExecutor(1, thread_name_prefix="functions") as beside:
            functions = beside.submit(super()._answers, batch, samples)
            found = {}
            for number, judge in self.judges.items():
                rows = self.scorer.rows_of(number, samples)
                with self.spans.span("model", entry=number, rows=len(rows)):
                    found[number] = judge.answers(batch.take(np.array(rows, dtype=np.int64)), [samples[row] for row in rows], self.metrics)
            return functions.result() | found
