"""Whether a folder holds the model or the adapter that it should, as plain transformers and peft read it. Called by `export`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rolemesh.models.load import LOAD_ERRORS, attention
from rolemesh.models.lora import read_by_peft

PROBE_TOKENS = 16


def differences(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False) -> list[str]:
    """What is wrong with a folder that was written from these two; empty when files, every weight, chat template and token ids are the same
    to the last bit, and in float32 logits too (in bfloat16 `load_model` rounds the tables of rotary positions as well)."""
    needed = ["config.json", "tokenizer_config.json", *(["generation_config.json"] if model.can_generate() else [])]
    missing = [f"{name} is missing" for name in needed if not (folder / name).is_file()]
    if missing:
        return missing
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        kernel = attention(model.config)
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, attn_implementation=kernel, **options).eval()
        words = AutoTokenizer.from_pretrained(folder, **options)
    except LOAD_ERRORS as error:
        return [f"transformers cannot load it: {type(error).__name__}: {error}"]
    wrong = _other_weights(model.state_dict(), found.state_dict())
    if wrong:
        return wrong
    if model.dtype == torch.float32 and not _same_logits(found, model):
        wrong.append("its logits differ")
    if words.chat_template != tokenizer.chat_template:
        wrong.append("its chat template differs")
    if words.get_vocab() != tokenizer.get_vocab():
        wrong.append("its tokens have other ids")
    return wrong


def adapter_differences(folder: Path, base: PreTrainedModel, model: PreTrainedModel) -> list[str]:
    """What is wrong with peft's folder of the adapter of `model`; empty when with it `base`, which is changed, has every weight and the
    logits of `model`, to the last bit."""
    try:
        found = read_by_peft(base, folder)
    except LOAD_ERRORS as error:
        return [f"peft cannot load it: {type(error).__name__}: {error}"]
    wrong = _other_weights(model.state_dict(), found.state_dict())
    return wrong or ([] if _same_logits(found, model) else ["its logits differ"])


@torch.no_grad()
def _same_logits(found: PreTrainedModel, expected: PreTrainedModel) -> bool:
    probe = torch.arange(PROBE_TOKENS).reshape(2, -1) % expected.config.get_text_config().vocab_size
    return torch.equal(found(probe).logits, expected(probe).logits)


def _other_weights(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
    return sorted(wrong) or [f"{name} differs" for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
