"""The reward role with models: what they read, how scores become rewards, and what becomes of rows that they cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from rolemesh.batch import Batch
from rolemesh.config.schema import Config, ModelConfig, RewardConfig
from rolemesh.errors import ConfigError
from rolemesh.models import RewardReader, load_tokenizer
from rolemesh.rewards import RewardError
from rolemesh.roles.reward import DETAILS
from rolemesh.roles.reward_model import ModelRewardWorker
from rolemesh.runtime import WorkerContext

CONTEXT = WorkerContext(group="reward", rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", address="127.0.0.1")
POLICY = load_tokenizer(ModelConfig())
TEMPLATE = "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}."
"""Of one letter for who speaks, and a dot at the end."""


def letters(chat_template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    vocabulary = {token: place for place, token in enumerate(["?", "^", "$", *"0123456789 =+-<>.uas"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", chat_template=chat_template, **special)


def save_reward_model(folder: Path, tokenizer: Any = POLICY, **more: Any) -> Any:
    """A small classifier with one label for this tokenizer; returns it as transformers loads it."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    settings = {"vocab_size": len(tokenizer), "num_labels": 1, "initializer_range": 0.1, "max_position_embeddings": 64}
    torch.manual_seed(9)
    torch.set_num_threads(1)
    LlamaForSequenceClassification(LlamaConfig(**sizes | settings | more)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LlamaForSequenceClassification.from_pretrained(folder).eval()


@torch.no_grad()
def own_score(model: Any, ids: list[int]) -> float:
    return float(model(input_ids=torch.tensor([ids])).logits)


@pytest.fixture
def worker_of():
    made = []

    def make(*rewards: dict[str, Any]) -> ModelRewardWorker:
        worker = ModelRewardWorker(CONTEXT, config=Config(reward=tuple(map(RewardConfig.model_validate, rewards)), backend="local"))
        worker.load()
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.close()


def batch_of(texts: list[tuple[str, str]], sources: str = "", **more: Any) -> Batch:
    """Prompts and answers as the policy's tokenizer has them; every answer but the last was ended by the policy."""
    count = len(texts)
    stops = ["stop"] * (count - 1) + ["length"]
    ends = [[POLICY.eos_token_id] if stop == "stop" else [] for stop in stops]
    columns = {
        "draw": list(range(count)),
        "sample": [0] * count,
        "source": list(sources) or ["a"] * count,
        "prompt": [prompt for prompt, _ in texts],
        "response": [response for _, response in texts],
        "answer": ["5"] * count,
        "task": [None] * count,
        "finish_reason": stops,
        "prompt_ids": [POLICY(prompt)["input_ids"] for prompt, _ in texts],
        "response_ids": [POLICY(response)["input_ids"] + end for (_, response), end in zip(texts, ends, strict=True)],
    }
    return Batch.from_columns(columns | more)


TEXTS = [("2 + 3 =", "5"), ("7 - 2 =", "5 5 5 5"), ("1 + 1 + 1 =", "3"), ("9 =", "8")]


def test_reward_is_the_weighted_sum_of_models_and_functions(tmp_path: Path, worker_of) -> None:
    model = save_reward_model(tmp_path)
    judged = {"model": {"path": str(tmp_path)}, "weight": 2.0, "sources": ("a", "b")}
    worker = worker_of({"name": "exact", "weight": 0.5, "sources": ("a", "c")}, judged)
    data = batch_of(TEXTS, "abca")
    found = worker.score(data)
    own = [own_score(model, p + r) for p, r in zip(data.rows("prompt_ids"), data.rows("response_ids"), strict=True)]
    assert np.ptp(own) > 0.01
    expected = [0.5 * 1 + 2 * own[0], 2 * own[1], 0.5 * 0, 0.5 * 0 + 2 * own[3]]
    assert found.scalars("reward").tolist() == pytest.approx(expected, abs=1e-6)
    assert found.scalars("reward_status") == ["ok"] * 4
    details = [json.loads(text) for text in found.scalars(DETAILS)]
    assert [sorted(entry) for entry in details] == [["exact", "model"], ["model"], ["exact"], ["exact", "model"]]
    metrics = worker.metrics.reduce()
    assert metrics["reward/extra/model"] == pytest.approx(np.mean([own[0], own[1], own[3]]), abs=1e-6)
    assert metrics["reward/extra/exact"] == pytest.approx(1 / 3)
    assert metrics["memory/reward/weights"] == worker.judges[1].engine.memory() > 0
    assert metrics["reward/status/ok"] == 4
    assert len(worker.score(data.take([]))) == 0


def test_threshold_and_any_order_and_number_of_rows(tmp_path: Path, worker_of) -> None:
    model = save_reward_model(tmp_path)
    data = batch_of(TEXTS)
    own = [own_score(model, p + r) for p, r in zip(data.rows("prompt_ids"), data.rows("response_ids"), strict=True)]
    bound = sorted(own)[2] - 1e-4
    worker = worker_of({"name": "good", "model": {"path": str(tmp_path)}, "threshold": bound})
    assert worker._executor is None, "no function, no processes"
    assert worker.score(data).scalars("reward").tolist() == [float(score >= bound) for score in own]
    plain = worker_of({"model": {"path": str(tmp_path)}})
    whole = plain.score(data).scalars("reward")
    alone = np.concatenate([plain.score(data.take([row])).scalars("reward") for row in (3, 1, 0, 2)])
    assert np.abs(alone - whole[[3, 1, 0, 2]]).max() < 1e-6


def test_another_tokenizer_reads_the_texts(tmp_path: Path, worker_of) -> None:
    tokenizer = letters(eos_token="$")
    model = save_reward_model(tmp_path, tokenizer)
    data = batch_of(TEXTS)
    found = worker_of({"model": {"path": str(tmp_path)}}).score(data).scalars("reward")
    texts = [prompt + response + "$" * (number < 3) for number, (prompt, response) in enumerate(TEXTS)]
    expected = [own_score(model, tokenizer.convert_tokens_to_ids(list(text))) for text in texts]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_chat_template_of_the_model(tmp_path: Path, worker_of) -> None:
    tokenizer = letters(TEMPLATE, bos_token="^")
    model = save_reward_model(tmp_path, tokenizer)

    def expected(texts: list[str]) -> list[float]:
        return [own_score(model, tokenizer.convert_tokens_to_ids(list(text))) for text in texts]

    worker = worker_of({"model": {"path": str(tmp_path)}})
    told = [f"^<u>{prompt}<a>{response}." for prompt, response in TEXTS]
    assert worker.score(batch_of(TEXTS)).scalars("reward").tolist() == pytest.approx(expected(told), abs=1e-6)
    messages = [json.dumps([{"role": "system", "content": "1"}, {"role": "user", "content": "2"}])] * 4  # what `prompt` was made of
    told = [f"^<s>1<u>2<a>{response}." for _, response in TEXTS]
    assert worker.score(batch_of(TEXTS, messages=messages)).scalars("reward").tolist() == pytest.approx(expected(told), abs=1e-6)
    plain = worker_of({"model": {"path": str(tmp_path), "chat": False}})
    told = [prompt + response for prompt, response in TEXTS]
    assert plain.score(batch_of(TEXTS)).scalars("reward").tolist() == pytest.approx(expected(told), abs=1e-6)


def test_with_the_policys_vocabulary_the_template_has_to_be_asked_for(tmp_path: Path, worker_of) -> None:
    model = save_reward_model(tmp_path, type(POLICY).from_pretrained(POLICY.name_or_path, chat_template=TEMPLATE))
    data = batch_of(TEXTS)
    as_they_are = [prompt + response for prompt, response in zip(data.rows("prompt_ids"), data.rows("response_ids"), strict=True)]
    templated = [POLICY(f"<u>{prompt}<a>{response}.", add_special_tokens=False)["input_ids"] for prompt, response in TEXTS]
    if POLICY.bos_token_id is not None:
        templated = [[POLICY.bos_token_id, *ids] for ids in templated]
    for chat, read in ((None, as_they_are), (True, templated)):
        found = worker_of({"model": {"path": str(tmp_path), "chat": chat}}).score(data).scalars("reward")
        assert found.tolist() == pytest.approx([own_score(model, ids) for ids in read], abs=1e-6)


def test_rows_that_are_too_long_or_refused_have_no_reward_or_are_cut(tmp_path: Path, worker_of) -> None:
    refuses = "{% if messages[0].content == '9 =' %}{{ raise_exception('no nines') }}{% endif %}" + TEMPLATE
    model = save_reward_model(tmp_path, letters(refuses, bos_token="^"))
    settings = {"path": str(tmp_path), "max_tokens": 17}
    told = {number: list(f"^<u>{prompt}<a>{response}.") for number, (prompt, response) in enumerate(TEXTS)}
    assert [len(text) for text in told.values()] == [16, 22, 20, 12]
    ids = {number: letters().convert_tokens_to_ids(text) for number, text in told.items()}

    worker = worker_of({"model": settings})
    found = worker.score(batch_of(TEXTS))
    assert found.scalars("reward_status") == ["ok", "error", "error", "error"]
    assert found.table.column("reward").to_pylist() == [pytest.approx(own_score(model, ids[0]), abs=1e-6), None, None, None]
    errors = [json.loads(text)["reward_error"] for text in found.scalars(DETAILS)[1:]]
    assert "22 tokens, and the model reads at most 17" in errors[0]
    assert "no nines" in errors[2]
    assert worker.metrics.reduce()["reward/model/cut"] == 0
    for side, kept in (("left", ids[1][:1] + ids[1][-16:]), ("right", ids[1][:17])):
        worker = worker_of({"model": settings | {"overlong": side}})
        assert worker.score(batch_of(TEXTS)).scalars("reward")[1] == pytest.approx(own_score(model, kept), abs=1e-6)
        assert worker.metrics.reduce()["reward/model/cut"] == 2
    with pytest.raises(RewardError, match=r"no nines"):
        worker_of({"model": settings}).score(batch_of(TEXTS[3:]))


def test_score_that_is_no_number_masks_its_row(tmp_path: Path, worker_of) -> None:
    save_reward_model(tmp_path)
    worker = worker_of({"model": {"path": str(tmp_path)}})
    with torch.no_grad():
        worker.judges[0].engine._model.score.weight.fill_(float("nan"))
    found = worker.score(batch_of(TEXTS))
    assert found.scalars("reward_status") == ["not_finite"] * 4
    assert found.table.column("reward").null_count == 4


def test_what_a_reader_refuses(tmp_path: Path) -> None:
    save_reward_model(tmp_path, letters())

    def refused(**settings: Any) -> str:
        config = RewardConfig.model_validate({"model": {"path": str(tmp_path), **settings}}).model
        assert config is not None
        with pytest.raises(ConfigError) as caught:
            RewardReader(config, POLICY, option="reward.0.model")
        return str(caught.value)

    assert "reward.0.model.chat: the model's tokenizer must have a chat template" in refused(chat=True)
    assert "reward.0.model.max_tokens: must be at most 64" in refused(max_tokens=65)
    save_reward_model(tmp_path, letters(), vocab_size=5)
    assert "below the 5 rows of the model's embedding" in refused()
    (tmp_path / "tokenizer.json").unlink()
    assert "reward.0.model.path: " in refused()
