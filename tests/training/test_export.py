"""`rolemesh export`: the folder that it leaves is the policy of the checkpoint, or there is none (G13, G14)."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from training_helpers import ONE_PROCESS, Quiet, only_run, small
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolemesh.cli.main import main
from rolemesh.config.schema import LoraConfig, ModelConfig
from rolemesh.engines.train import OptimizerSettings, TrainEngine
from rolemesh.errors import ConfigError, RolemeshError
from rolemesh.models import load_model, load_tokenizer, save_description, save_model
from rolemesh.models.lora import add_adapter, load_adapter, save_adapter_config
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


def logits(folder: Path, **options: str) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)(TOKENS).logits


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
    shutil.rmtree(tmp_path / "letters")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "config.json").write_text('{"compilerOptions": {}}')
    assert "other files" in refused(run.path, "--to", tmp_path / "letters", "--force"), "of another program"
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(run.path, "--to", tmp_path / "file" / "below")
    assert "among the checkpoints" in refused(run.path, "--to", run.checkpoint(2) / "model", "--force")
    monkeypatch.chdir(run.path.parent)
    assert "among the checkpoints" in refused(run.name, "--runs-dir", ".", "--to", f"{run.name}/checkpoints/step-2/model", "--force")
    assert "complete are: step-1, step-2" in refused(run.path, "--to", tmp_path / "new", "--step", 7)
    assert "float32, bfloat16" in refused(run.path, "--to", tmp_path / "new", "--dtype", "int8")
    assert "Leave it out" in refused(run.checkpoint(1), "--to", tmp_path / "new", "--step", 1)
    old = tmp_path / "runs" / "old" / "checkpoints" / "step-3"
    shutil.copytree(run.checkpoint(1), old)
    state = json.loads((old / "state.json").read_text())
    (old / "state.json").write_text(json.dumps(state | {"format": 2}))
    assert "must be of format 3; found format 2" in refused(old, "--to", tmp_path / "new")
    gone = refused(run.checkpoint(7), "--to", tmp_path / "new")
    assert "complete are: step-1, step-2" in gone
    assert "trainer.keep_checkpoints" in gone
    assert not (tmp_path / "new").exists()


def test_incomplete_checkpoints_are_named_with_what_is_wrong(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = RunDirectory(Path(shutil.copytree(run.path, tmp_path / "runs" / run.name)))
    weights = damaged.checkpoint(2) / "model" / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, 20)
    code, shown = rolemesh(monkeypatch, capsys, "export", damaged.path, "--to", tmp_path / "new")
    assert code == 0, shown
    cut = f"step-2 (model/model.safetensors has 20 of {size:,} bytes)"
    assert f"skipped incomplete {cut}" in shown
    (damaged.checkpoint(1) / "model" / "config.json").unlink()
    shutil.copytree(damaged.checkpoint(1), damaged.checkpoint(3))
    (damaged.checkpoint(3) / "state.json").write_text("{")
    (damaged.checkpoints / "step-4").mkdir()
    (damaged.checkpoints / ".step-5.abcd.partial").mkdir()
    with pytest.raises(ConfigError) as caught:
        checkpoint.newest(damaged)
    unreadable = "step-3 (state.json cannot be read: JSONDecodeError), step-4 (no state.json)"
    others = f".step-5.abcd.partial (its save or removal did not end), step-1 (no model/config.json), {cut}, {unreadable}"
    assert f"incomplete are {others}" in str(caught.value)


def test_an_export_through_a_symlink_goes_where_it_leads_and_a_checkpoint_that_is_removed_meanwhile_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "made")
    unwritable = tmp_path / "generation_config.json"
    unwritable.write_text(json.dumps({"temperature": 0.6, "eos_token_id": [2, 5]}))  # transformers reads it alone
    checkpoint_of(run, load_model(ModelConfig(), seed=0), generation=unwritable)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for force in (False, True):
        planned = export.plan_export(str(run.path), tmp_path / "link", runs_dir=tmp_path, force=force)
        export.run_export(planned, lambda text: None)
        assert (tmp_path / "link").is_symlink()
        assert torch.equal(logits(tmp_path / "disk"), logits(run.checkpoint(1) / "model"))
        assert (tmp_path / "disk" / "generation_config.json").read_text() == unwritable.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", unwritable.name, "link", "runs"]
    planned = export.plan_export(str(run.path), tmp_path / "late", runs_dir=tmp_path)
    checkpoint.remove(run.checkpoint(1))
    with pytest.raises(RolemeshError, match=r"step-1 is gone: its run has removed it meanwhile"):
        export.run_export(planned, lambda text: None)


def test_G14_an_export_that_is_not_the_same_leaves_what_was_there(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run.checkpoint(1) / "model", tmp_path / "mine")
    planned = export.plan_export(str(run.path), tmp_path / "mine", runs_dir=tmp_path, step=None, dtype="float32", force=True)
    whole, before = save_model, (tmp_path / "mine" / "model.safetensors").read_bytes()

    def lossy(folder: Path, model: torch.nn.Module, tokenizer: object, **options: object) -> None:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_parameter("model.norm.weight").add_(1e-6)
        whole(folder, other, tokenizer, **options)

    monkeypatch.setattr("rolemesh.models.save_model", lossy)
    with pytest.raises(RolemeshError, match=r"is not the model of \S+step-2: model\.norm\.weight differs"):
        export.run_export(planned, lambda text: None)
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "nothing half-written is left"


def checkpoint_of(
    directory: RunDirectory, model: torch.nn.Module, config: dict[str, Any] | None = None, generation: Path | None = None
) -> None:
    """A checkpoint of step 1 as an actor's ranks write it, of any model, with or without an adapter."""
    engine = TrainEngine(model, optimizer=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=64)
    folder = checkpoint.new_folder(directory, 1)
    (folder / "model").mkdir()
    weights, optimizer = engine.files()
    weights.write(folder / "model" / "model.safetensors")
    optimizer.write(folder / "actor-optimizer.safetensors")
    names = [name for name, _ in engine.empty_weights()]
    save_description(folder / "model", engine.empty_model, load_tokenizer(ModelConfig()), names, generation=generation)
    if hasattr(model, "peft_config"):
        (folder / "adapter").mkdir()
        engine.adapter_file().write(folder / "adapter" / "adapter_model.safetensors")
        save_adapter_config(folder / "adapter", engine.skeleton)
    state = {"progress": {}, "prompts": {}, "roles": {}, "config": config or {"model": {"path": "gone"}}}
    checkpoint.publish(folder, directory.checkpoint(1), state)


@pytest.mark.parametrize("kind", ["tied", "G13 separated", "experts", "capped scores"])
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
    if kind == "capped scores":  # which one kernel of attention knows, and another leaves out
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        vocabulary = {"vocab_size": len(load_tokenizer(ModelConfig())), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model = Gemma2ForCausalLM(Gemma2Config(head_dim=16, initializer_range=0.5, query_pre_attn_scalar=16, **sizes, **vocabulary)).eval()
        model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(TOKENS).logits
    checkpoint_of(run, model)
    planned = export.plan_export(str(run.path), tmp_path / "out", runs_dir=tmp_path, step=None, dtype="float32", force=False)
    export.run_export(planned, lambda text: None)
    kernel = {"attn_implementation": "eager"} if kind == "capped scores" else {}
    assert torch.equal(logits(run.checkpoint(1) / "model", **kernel), expected)
    assert torch.equal(logits(tmp_path / "out", **kernel), expected)
    if kind in ("tied", "G13 separated"):
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is (kind == "tied")


# -- adapters -----------------------------------------------------------------------------------------------------------------


def adapter_checkpoint(directory: RunDirectory, base: Path | str, lora: LoraConfig, *, seed: int = 0) -> None:
    """A checkpoint of step 1 with an adapter that changes something, as an actor's rank writes it."""
    model = load_model(ModelConfig(path=str(base)), seed=seed)
    add_adapter(model, lora, seed=1, base=str(base))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    checkpoint_of(directory, model, config={"seed": seed, "model": {"path": str(base), "lora": lora.model_dump(mode="json")}})


def peft_logits(base: Path, folder: Path) -> torch.Tensor:
    """As a user of peft has them."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder)).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def test_an_exported_adapter_is_the_trained_module_for_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, lora, run = tmp_path / "base", LoraConfig(rank=3, alpha=6), RunDirectory.create(tmp_path / "runs", "made")
    save_model(base, load_model(ModelConfig(), seed=7), load_tokenizer(ModelConfig()))
    adapter_checkpoint(run, base, lora)
    code, shown = rolemesh(monkeypatch, capsys, "export", run.path, "--to", tmp_path / "out", "--adapter")
    assert code == 0, shown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    trained = load_model(ModelConfig(path=str(base)), seed=0)
    add_adapter(trained, lora, seed=9)
    load_adapter(trained, run.checkpoint(1) / "adapter" / "adapter_model.safetensors")
    with torch.no_grad():
        expected = trained(TOKENS).logits
    found = peft_logits(base, tmp_path / "out")
    assert torch.equal(found, expected)
    assert (logits(base) - expected).abs().max() > 0.1
    assert (logits(run.checkpoint(1) / "model") - expected).abs().max() < 1e-4

    def refused(code: int, *words: object) -> str:
        ended, shown = rolemesh(monkeypatch, capsys, "export", *words, "--adapter")
        assert ended == code, shown
        return shown

    assert "an adapter in" in refused(2, run.path, "--to", tmp_path / "out")
    assert rolemesh(monkeypatch, capsys, "export", run.path, "--to", tmp_path / "out", "--adapter", "--force")[0] == 0
    assert "the model that the run began with" in refused(2, run.path, "--to", base, "--force")
    assert "must be float32 with --adapter" in refused(2, run.path, "--to", tmp_path / "new", "--dtype", "bfloat16")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3  # another base of the same shape
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    assert "base is not the model any more" in refused(4, run.path, "--to", tmp_path / "new")
    base.rename(tmp_path / "elsewhere")
    assert "the model below the adapter must be there" in refused(2, run.path, "--to", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert rolemesh(monkeypatch, capsys, "export", run.path, "--to", tmp_path / "merged")[0] == 0, "needs no base"
    assert torch.equal(logits(tmp_path / "merged"), logits(run.checkpoint(1) / "model"))


def test_an_adapter_that_peft_reads_otherwise_is_not_exported(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "made")
    adapter_checkpoint(run, "tiny", LoraConfig(rank=2, alpha=4, target_modules=("q_proj", "down_proj")), seed=3)
    planned = export.plan_export(str(run.path), tmp_path / "out", runs_dir=tmp_path, adapter=True)
    told: list[str] = []
    export.run_export(planned, told.append)
    assert "its base is 'tiny', which only rolemesh makes" in told[-1]
    shutil.rmtree(tmp_path / "out")
    config = run.checkpoint(1) / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 5'))
    with pytest.raises(RolemeshError, match=r"is not the model of \S+: its logits differ"):
        export.run_export(planned, told.append)
    assert not (tmp_path / "out").exists()
    weights = run.checkpoint(1) / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"lora_A", b'lora"A', 1))  # of the same size
    with pytest.raises(RolemeshError, match=r"the weights in \S+ cannot be read: .*Export another step"):
        export.run_export(planned, told.append)
    config.write_text(config.read_text().replace("base_model_name_or_path", "base_model_name_or_poth"))
    with pytest.raises(ConfigError, match=r"adapter_config\.json must name the model below the adapter"):
        export.plan_export(str(run.path), tmp_path / "out", runs_dir=tmp_path, adapter=True)
    whole = RunDirectory.create(tmp_path / "runs", "whole")
    checkpoint_of(whole, load_model(ModelConfig(), seed=0))
    with pytest.raises(ConfigError, match="the run must have trained an adapter"):
        export.plan_export(str(whole.path), tmp_path / "out", runs_dir=tmp_path, adapter=True)
