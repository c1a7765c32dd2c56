"""A rank's part of a checkpoint: what is described beside the next step, and the word that every failure leaves."""

import gc
import json
import threading
import weakref
from pathlib import Path

import pytest
import torch

from rolemesh.config.load import load_config
from rolemesh.config.schema import ModelConfig
from rolemesh.engines.train.tensor_file import Copying, TensorFile
from rolemesh.models import load_model, load_tokenizer, save_model, stop_token_ids
from rolemesh.roles import saving
from rolemesh.roles.actor import ActorWorker
from rolemesh.roles.marks import make_mark, mark_path, read_mark
from rolemesh.runtime import WorkerContext

CONTEXT = WorkerContext(group="actor", rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", address="127.0.0.1")
UNWRITABLE = json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 2]})
"""transformers reads it, and refuses to write it: sampling settings without `do_sample`."""


@pytest.fixture
def actor(tmp_path: Path) -> ActorWorker:
    model = ModelConfig()
    save_model(tmp_path / "base", load_model(model, seed=0), load_tokenizer(model))
    (tmp_path / "base" / "generation_config.json").write_text(UNWRITABLE)
    worker = ActorWorker(CONTEXT, config=load_config("demo", [f"model.path={tmp_path / 'base'}", "model.lora.rank=4"]))
    worker.load()
    return worker


def test_an_actor_is_described_asleep_with_the_generation_config_that_it_came_with(actor: ActorWorker, tmp_path: Path) -> None:
    parameters = [weakref.ref(parameter) for parameter in actor.engine.model.parameters()]
    actor.copying.begin()
    copied: list[bool] = []
    threading.Timer(0.1, lambda: (copied.append(True), actor.copying.end())).start()
    assert actor.engine.sleep() > 0
    assert copied, "what a copy reads is not freed"
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters), "a device would still hold them"
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
    actor.describe(tmp_path)
    assert actor.engine.memory()["weights"] == 0, "it still sleeps"
    assert (tmp_path / "model" / "generation_config.json").read_text() == UNWRITABLE
    written = actor.config.model.model_copy(update={"path": str(tmp_path / "model")})
    assert stop_token_ids(load_tokenizer(written), written) == (2, 5)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4


class Unreadable(TensorFile):
    def snapshot(self) -> TensorFile:
        raise ValueError("no such tensor")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_a_copy_fails_with_stands_in_the_mark(tmp_path: Path) -> None:
    mark, copying = mark_path(tmp_path, "actor", 0), Copying()
    make_mark(mark)
    saving.write_part(mark, {"weights": Unreadable.of_whole({"w": torch.ones(2)})}, None, copying)
    copying.wait()
    for thread in [thread for thread in threading.enumerate() if thread.name == f"save {mark.name}"]:
        thread.join(10)
    told = read_mark(mark)
    assert told is not None, "no word"
    assert told["error"] == "ValueError: no such tensor"


def test_a_thread_that_cannot_start_holds_up_no_later_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copying = Copying()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("rolemesh.engines.train.tensor_file.COPY_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        saving.write_part(mark_path(tmp_path, "actor", 0), {}, None, copying)
    copying.wait()
