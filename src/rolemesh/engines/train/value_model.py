"""`ValueModel`: a language model's body with one number for each position, and where it comes from. Loaded by the critic role."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rolemesh.config.model_files import model_files, weight_files
from rolemesh.config.reward_heads import stored_head
from rolemesh.config.schema import ModelConfig
from rolemesh.engines.train.forward import last_hidden
from rolemesh.engines.train.layout import Sliceable
from rolemesh.errors import ConfigError
from rolemesh.models import load_config, load_model, open_weights
from rolemesh.models.load import LOAD_ERRORS, read_model

T = TypeVar("T")
HEAD_SCALE: Final = 0.01
"""Spread of the values of a fresh head, for a body whose last layer normalises: near 0, so that the first advantages are the rewards,
but not 0, so that the body has a gradient from the first step."""


class ValueModel(nn.Module):
    """A causal body, which gives hidden states [B, W, hidden], and a linear head, which maps each of them to one number."""

    def __init__(self, backbone: nn.Module, head: nn.Linear, prefix: str) -> None:
        """`prefix` is the name of the body inside the language model that it belongs to, such as `model`."""
        super().__init__()
        self.backbone, self.head = backbone, head
        self.prefix = f"{prefix}."

    def forward(self, positions: Tensor, **inputs: Any) -> Tensor:
        """Values [T], float32, of the states that end with the tokens at `positions` [T] of the flattened inputs."""
        hidden = self.hidden(inputs).flatten(0, 1)[positions]
        return cast(Tensor, self.head(hidden)).float().sum(dim=-1)  # the sum of one: no view

    def float32_values(self, positions: Tensor, **inputs: Any) -> Tensor:
        """As `forward`, but with the product of the head in float32 whatever the format of the body's: values of about 10 would have steps
        of 1/16 in bfloat16."""
        hidden, bias = self.hidden(inputs).flatten(0, 1)[positions], self.head.bias
        with torch.autocast(hidden.device.type, enabled=False):
            found = nn.functional.linear(hidden.float(), self.head.weight.float(), None if bias is None else bias.float())
        return found.sum(dim=-1)

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        return last_hidden(self.backbone, inputs)

    @classmethod
    def of_causal(cls, model: nn.Module, *, seed: int, stored: nn.Linear | None = None) -> ValueModel:
        """On the body of a language model, which is not copied, with the head that was stored beside it, or a fresh one drawn from `seed`
        alone, as wide as the output layer."""
        backbone, prefix = _body(model)
        if stored is not None:
            return cls(backbone, stored, prefix)
        width = cast(Any, model).get_output_embeddings().weight.shape[1]
        with torch.no_grad():
            head = nn.Linear(width, 1, device="meta").to_empty(device="cpu")  # its own start would draw from the caller's random state
            head.weight.normal_(std=HEAD_SCALE / math.sqrt(head.in_features), generator=torch.Generator().manual_seed(seed))
            head.bias.zero_()
        return cls(backbone, head, prefix)

    @classmethod
    def of_classifier(cls, model: nn.Module) -> ValueModel:
        """On body and head of a sequence classifier with one label, such as a reward model. Raises ValueError for any other."""
        backbone, prefix = _body(model)
        heads = [child for child in model.children() if child is not backbone]
        if len(heads) != 1 or not isinstance(heads[0], nn.Linear) or heads[0].out_features != 1:
            found = ", ".join(map(str, heads)) or "nothing"
            raise ValueError(f"a value needs one linear layer with one output after the body, found {found} in {type(model).__name__}")
        return cls(backbone, heads[0], prefix)


def read_head(model: ModelConfig) -> nn.Linear | None:
    """The head with one output that the files of a causal model hold beside it (`stored_head`), in `model.dtype`."""
    name = stored_head(model.path)
    if name is None:
        return None
    wanted, found = (name, f"{name.removesuffix('weight')}bias"), dict[str, Tensor]()
    for file in weight_files(model_files(model.path).folder):
        with safe_open(file, framework="pt") as weights:
            found |= {key: weights.get_tensor(key) for key in wanted if key in weights.keys()}  # noqa: SIM118 - no mapping
    head = nn.Linear(found[name].shape[1], 1, bias=len(found) == 2, device="meta")
    head.load_state_dict({key.rpartition(".")[2]: tensor for key, tensor in found.items()}, assign=True)
    return head.to(getattr(torch, model.dtype))


def load_value_model(model: ModelConfig, *, path: str | None, seed: int) -> ValueModel:
    """The critic's model in float32, from `path` (a folder or built-in model), or from that of the policy, `model`.

    A sequence classifier brings its head, a language model may have one stored beside it or gets a fresh one. The weights depend on the
    folder and the seed alone.
    Raises ConfigError naming the option when there is no model that can be used.
    """

    def load(chosen: ModelConfig) -> ValueModel:
        if classifies(chosen):
            return ValueModel.of_classifier(read_classifier(chosen))
        return ValueModel.of_causal(load_model(chosen, seed=seed), seed=seed, stored=read_head(chosen))

    return _chosen(model, path, load)


def open_value_model(model: ModelConfig, *, path: str | None, seed: int) -> tuple[ValueModel, Mapping[str, Sliceable]] | None:
    """As `load_value_model`, but without contents, and the weights by name as they lie in the files, to be read in parts; None where
    loading does more than reading (see `open_weights`)."""

    def open_(chosen: ModelConfig) -> tuple[ValueModel, Mapping[str, Sliceable]] | None:
        has_head = classifies(chosen)
        opened = open_weights(chosen, AutoModelForSequenceClassification if has_head else AutoModelForCausalLM)
        if opened is None:
            return None
        empty, weights = opened
        value = ValueModel.of_classifier(empty) if has_head else ValueModel.of_causal(empty, seed=seed, stored=read_head(chosen))
        body = {name.removeprefix(value.prefix): weight for name, weight in weights.items() if name.startswith(value.prefix)}
        head = {name.rpartition(".")[2]: weight for name, weight in weights.items() if not name.startswith(value.prefix)}
        head = head if has_head else {name: parameter.detach() for name, parameter in value.head.named_parameters()}
        return value, {f"backbone.{name}": weight for name, weight in body.items()} | {f"head.{name}": head[name] for name in head}

    return _chosen(model, path, open_)


def classifies(model: ModelConfig) -> bool:
    """Whether a folder says that it is a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in load_config(model).architectures or ())


def _chosen(model: ModelConfig, path: str | None, load: Callable[[ModelConfig], T]) -> T:
    """What `load` makes of the critic's model, its errors said of the option that names it."""
    option = "model.path" if path is None else "algorithm.critic_path"
    try:
        return load(model.model_copy(update={"dtype": "float32", "path": model.path if path is None else path}))
    except ConfigError as error:
        raise ConfigError(problems=[replace(problem, subject=option) for problem in error.problems]) from error
    except LOAD_ERRORS as error:
        raise ConfigError.one(
            option, "the critic needs a causal model in Hugging Face format", f"{type(error).__name__}: {error}"
        ) from error


def read_classifier(model: ModelConfig) -> nn.Module:
    """A sequence classifier in `model.dtype`. Raises ValueError when the folder does not hold every weight, which would then be random, and
    what transformers raises (`LOAD_ERRORS`)."""
    files, config, dtype = model_files(model.path), load_config(model), getattr(torch, model.dtype)
    loaded, info = read_model(AutoModelForSequenceClassification, files, config, dtype, model.trust_remote_code)
    if info["missing_keys"]:
        raise ValueError(f"weights are missing in its files: {', '.join(sorted(info['missing_keys']))}")
    return cast(nn.Module, loaded.eval())


def _body(model: nn.Module) -> tuple[nn.Module, str]:
    """(body, its name inside the model). Raises ValueError for a model that is not made of a body and a head."""
    body, prefix = getattr(model, "base_model", None), getattr(model, "base_model_prefix", "")
    if not isinstance(body, nn.Module) or body is model:
        raise ValueError(f"{type(model).__name__} is not made of a body and a head")
    return body, str(prefix)
