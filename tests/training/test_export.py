"""`rolemesh export`: the folder that it leaves is the policy of the checkpoint, or there is none (G13, G14)."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import ONE_PROCESS, Quiet, only_run, small
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolemesh.cli.main import main
from rolemesh.config.schema import ModelConfig
from rolemesh.engines.train import OptimizerSettings, TrainEngine
from rolemesh.errors import RolemeshError
from rolemesh.models import load_model, load_tokenizer, save_description
from rolemesh.observe import RunDirectory
from rolemesh.training import checkpoint, export
from rolemesh.training.launch import run_training

TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("run")
    moving = ("reward=[{name: 'test_loop:varied'}]", "trainer.learning_rate=0.01", "trainer.warmup_steps=0")
    saves = ("sft=null", "trainer.save_every=1", *moving)
    run_training(small(folder, *ONE_PROCESS, *saves), Quiet())
    return only_run(folder)


def rolemesh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """(exit code, what stands on the screen)"""
    monkeypatch.setattr(sys, "argv", ["rolemesh", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits


def test_G14_an_export_is_the_policy_of_the_checkpoint(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, first = run.checkpoint(2) / "model", run.checkpoint(1) / "model"
    code, shown = rolemesh(monkeypatch, capsys, "export", run.path, "--to", tmp_path / "whole")
    assert (code, "comparing" in shown) == (0, True), shown
    assert torch.equal(logits(tmp_path / "whole"), logits(newest))
    written, kept = load_file(tmp_path / "whole" / "model.safetensors"), load_file(newest / "model.safetensors")
    assert all(torch.equal(written[name], weight) for name, weight in kept.items())
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= names
    template = AutoTokenizer.from_pretrained(tmp_path / "whole").chat_template
    assert template == load_tokenizer(ModelConfig()).chat_template

    assert rolemesh(monkeypatch, capsys, "export", run.path, "--to", tmp_path / "first", "--step", 1)[0] == 0
    assert torch.equal(logits(tmp_path / "first"), logits(first))
    assert not torch.equal(logits(tmp_path / "first"), logits(newest))
    assert rolemesh(monkeypatch, capsys, "export", run.checkpoint(1), "--to", tmp_path / "half", "--dtype", "bfloat16")[0] == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(half[name], weight.bfloat16()) for name, weight in load_file(first / "model.safetensors").items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_exports_that_would_go_wrong_are_refused_before_anything_is_written(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> str:
        code, shown = rolemesh(monkeypatch, capsys, "export", *words)
        assert code == 2, shown
        return shown

    shutil.copytree(run.checkpoint(1) / "model", tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert "a model in" in refused(run.path, "--to", tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert rolemesh(monkeypatch, capsys, "export", run.path, "--to", tmp_path / "model", "--force")[0] == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() != before
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mine.txt").write_text("dear")
    assert "other files" in refused(run.path, "--to", tmp_path / "letters", "--force")
    assert "among the checkpoints" in refused(run.path, "--to", run.checkpoint(2) / "model", "--force")
    assert "complete are: step-1, step-2" in refused(run.path, "--to", tmp_path / "new", "--step", 7)
    assert "float32, bfloat16" in refused(run.path, "--to", tmp_path / "new", "--dtype", "int8")
    assert "Leave it out" in refused(run.checkpoint(1), "--to", tmp_path / "new", "--step", 1)
    old = tmp_path / "runs" / "old" / "checkpoints" / "step-3"
    shutil.copytree(run.checkpoint(1), old)
    state = json.loads((old / "state.json").read_text())
    (old / "state.json").write_text(json.dumps(state | {"format": 2}))
    assert "must be of format 3; found format 2" in refused(old, "--to", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_G14_an_export_that_is_not_the_same_leaves_what_was_there(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run.checkpoint(1) / "model", tmp_path / "mine")
    planned = export.plan_export(str(run.path), tmp_path / "mine", runs_dir=tmp_path, step=None, dtype="float32", force=True)
    whole, before = export.save_model, (tmp_path / "mine" / "model.safetensors").read_bytes()

    def lossy(folder: Path, model: torch.nn.Module, tokenizer: object, **options: object) -> None:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_parameter("model.norm.weight").add_(1e-6)
        whole(folder, other, tokenizer, **options)

    monkeypatch.setattr(export, "save_model", lossy)
    with pytest.raises(RolemeshError, match=r"is not the model of \S+step-2: model\.norm\.weight differs"):
        export.run_export(planned, lambda text: None)
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "nothing half-written is left"


def checkpoint_of(directory: RunDirectory, model: torch.nn.Module) -> None:
    """A checkpoint of step 1 as an actor's ranks write it, of any model."""
    engine = TrainEngine(model, optimizer=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=64)
    folder = checkpoint.new_folder(directory, 1)
    (folder / "model").mkdir()
    weights, optimizer = engine.files()
    weights.write(folder / "model" / "model.safetensors")
    optimizer.write(folder / "actor-optimizer.safetensors")
    names = [name for name, _ in engine.empty_weights()]
    save_description(folder / "model", engine.empty_model, load_tokenizer(ModelConfig()), names)
    state = {"progress": {}, "prompts": {}, "roles": {}, "config": {"model": {"path": "gone"}}}
    checkpoint.publish(folder, directory.checkpoint(1), state)


@pytest.mark.parametrize("kind", ["tied", "G13 separated", "experts"])
def test_G13_checkpoints_and_exports_keep_every_weight_of_models_of_several_kinds(tmp_path: Path, kind: str) -> None:
    run = RunDirectory.create(tmp_path / "runs", "made")
    model = load_model(ModelConfig(), seed=0)
    assert model.config.tie_word_embeddings
    if kind == "G13 separated":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    if kind == "experts":  # in memory the weights of all experts are one tensor, in files of others each is one
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(load_tokenizer(ModelConfig())), **sizes, **heads)).eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
    checkpoint_of(run, model)
    planned = export.plan_export(str(run.path), tmp_path / "out", runs_dir=tmp_path, step=None, dtype="float32", force=False)
    export.run_export(planned, lambda text: None)
    assert torch.equal(logits(run.checkpoint(1) / "model"), expected)
    assert torch.equal(logits(tmp_path / "out"), expected)
    if kind != "experts":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is (kind == "tied")
