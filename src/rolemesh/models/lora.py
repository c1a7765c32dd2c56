"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): put into a model, switched off, merged, saved. The home of `peft`.

Called by the actor and its engine. An adapted layer computes W x + s B (A x) with W frozen; A begins random and B at 0, so that the model
is at first what it was. s is alpha / rank. There is no dropout: it would make the trainer's probabilities differ from the engine's.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rolemesh.config.schema import LoraConfig, ModelConfig
from rolemesh.errors import ConfigError
from rolemesh.models.load import load_model
from rolemesh.registry import nearest

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

T = TypeVar("T")
NAME: Final = "default"
"""Of the adapter, as peft calls the only one."""
BASE: Final = "base_layer"
"""Under which an adapted layer keeps its own weights."""
ROUNDING: Final = 1e-5
"""Of the largest weight: another device or number of threads may sum up a product in another order."""


def check_lora(model: ModelConfig) -> None:
    """Raise ConfigError when the model has no layer that `model.lora` names. Builds it without contents."""
    if model.lora is not None:
        target_modules(load_model(model, seed=0, device="meta"), model.lora)


def target_modules(model: nn.Module, lora: LoraConfig) -> list[str]:
    """Names, or last parts of names, of the layers that get an adapter: those of `lora`, or of every linear layer but the output layer.
    Raises ConfigError for a name that no linear layer has."""
    head = cast(Any, model).get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]
    known = sorted({name.rpartition(".")[2] for name in linear})
    if lora.target_modules == "all-linear":
        others = {name.rpartition(".")[2] for name, module in model.named_modules() if name not in linear}
        return linear if others & set(known) else known
    for target in lora.target_modules:
        named = {name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")}
        if not named or not named <= set(linear):
            hint = nearest(target, known)
            raise ConfigError.one(
                "model.lora.target_modules",
                f"must name linear layers of {type(model).__name__}, other than the output layer: {', '.join(known)}",
                repr(target),
                f"Did you mean {hint!r}?" if hint else "Take all of them: model.lora.target_modules=all-linear",
            )
    return list(lora.target_modules)


def add_adapter(model: nn.Module, lora: LoraConfig, *, seed: int, base: str = "") -> None:
    """Put an adapter into `model`, which may be without contents, and freeze everything else. Its weights are in float32 and depend on the
    shapes and the seed alone. `base` says where a saved adapter finds the model. Raises ConfigError as `target_modules`."""
    import peft

    targets = target_modules(model, lora)
    config = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM, r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, base_model_name_or_path=base
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")  # by peft itself, for layers that keep their weights transposed
        peft.inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted(model).values():
        a, b = (torch.zeros(parts[NAME].weight.shape) for parts in (layer.lora_A, layer.lora_B))
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        layer.lora_A[NAME].weight, layer.lora_B[NAME].weight = nn.Parameter(a), nn.Parameter(b)


def adapted_names(model: nn.Module, weights: Mapping[str, T]) -> dict[str, T | Tensor]:
    """`weights`, which go by the names of the model without adapter, by those of `model`; and those of its adapter."""
    layers = _adapted(model)
    return {_inside(layers, name): weight for name, weight in weights.items()} | {
        name: parameter.detach() for name, parameter in model.named_parameters() if is_adapter(name)
    }


def is_adapter(name: str) -> bool:
    """Whether a weight of this name belongs to an adapter."""
    return f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name


def without_adapter(model: nn.Module) -> nn.Module:
    """A copy of a model without contents that has no adapter; `model` itself when it has none."""
    layers = _adapted(model)
    if not layers:
        return model
    found = copy.deepcopy(model)
    for path in layers:
        found.set_submodule(path, cast(nn.Module, found.get_submodule(path).base_layer))
    del found.peft_config
    return found.requires_grad_(True)


def merged_weights(
    model: nn.Module,
    names: Iterable[str],
    *,
    weight: Callable[[str], Tensor],
    whole: Callable[[str], Tensor],
    cut: Callable[[str, Tensor], Tensor] = lambda inside, product: product,
) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """What a model without adapter needs to compute the same: (name, name in `model`, what gives W + s B A) for each of `names`, those of
    that model.

    By names in `model`, `weight` gives W or a part of it, `whole` all of B or A, in the same order everywhere, and `cut` of an s B A
    what belongs to that part. They are merged when that is called, and none is changed."""
    layers = _adapted(model)
    for name in names:
        inside, (path, _, leaf) = _inside(layers, name), name.rpartition(".")
        if leaf == "weight" and path in layers:
            b, a = whole(f"{path}.lora_B.{NAME}.weight"), whole(f"{path}.lora_A.{NAME}.weight")
            yield name, inside, partial(_merge, layers[path], weight(inside), b, a, partial(cut, inside))
        else:
            yield name, inside, partial(weight, inside)


def _merge(layer: LoraLayer, weight: Tensor, b: Tensor, a: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
    product = b.float() @ a.float()
    return weight + cut((product.T if layer.fan_in_fan_out else product) * layer.scaling[NAME])


def other_weights(merged: Iterable[tuple[str, str, Callable[[], Tensor]]], stored: Callable[[str, str], Tensor | None]) -> Iterator[str]:
    """Names of weights that `merged_weights` makes otherwise than they were saved, by more than rounding: the model below the adapter is
    another one then. `stored` gives what was saved by both names, None of what was not."""
    for name, inside, merge in merged:
        found, expected = stored(name, inside), merge().cpu()
        if found is None or found.shape != expected.shape or _apart(found, expected):
            yield name


def _apart(found: Tensor, expected: Tensor) -> bool:
    return bool(found.numel()) and bool((found - expected).abs().max() > ROUNDING * expected.abs().max())


class AdapterMerge:
    """Merges adapters into the weights of a model, as `merged_weights` does where they are trained: equal ones to equal bits. The model's
    own weights come with the first adapter and are kept as they are: every later one is merged into these, never into an earlier result."""

    def __init__(self, model: ModelConfig) -> None:
        assert model.lora is not None
        self._skeleton = load_model(model, seed=0, device="meta")
        add_adapter(self._skeleton, model.lora, seed=0)
        self._base: dict[str, Tensor] = {}

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Merged weights by the names that they have without an adapter. `weights` are those of an adapter, the first time with the
        model's own, by their names in a model with an adapter. Raises ValueError without the model's own."""
        given = {name: weight.to("cpu", copy=True) for name, weight in weights}
        adapter = {name: given.pop(name) for name in list(given) if is_adapter(name)}
        self._base = given or self._base
        if not self._base:
            raise ValueError("an adapter was published to a worker that does not have the model's own weights; publish these with it")
        names = [name.replace(f".{BASE}.", ".") for name in self._base]
        for name, _, merge in merged_weights(self._skeleton, names, weight=self._base.__getitem__, whole=adapter.__getitem__):
            yield name, merge()


def saved_name(name: str) -> str:
    """The name that peft gives a weight of an adapter in a file."""
    return f"base_model.model.{name.replace(f'.{NAME}.', '.')}"


def save_adapter_config(folder: Path, model: nn.Module) -> None:
    """Write what makes of a folder with the adapter's weights (`adapter_model.safetensors`, by their `saved_name`) one that peft reads:
    `PeftModel.from_pretrained(base, folder)`. `model` has the adapter."""
    config = copy.copy(cast(Any, model).peft_config[NAME])
    config.inference_mode = True
    config.save_pretrained(str(folder))


def load_adapter(model: nn.Module, file: Path) -> None:
    """Give the adapter of `model` the weights in a file of peft's. Raises ValueError for names or shapes that do not fit, and OSError and
    SafetensorError for a file that cannot be read."""
    own = {saved_name(name): parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    found = load_file(file)
    fit = {name: tensor.shape for name, tensor in found.items()} == {name: parameter.shape for name, parameter in own.items()}
    if not fit:
        raise ValueError(f"{file} is an adapter of other layers, another rank or another model")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])


def read_by_peft(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """`base`, changed in place: with the adapter in peft's folder. Raises what peft does."""
    import peft

    return cast(PreTrainedModel, peft.PeftModel.from_pretrained(base, str(folder)).eval().get_base_model())


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Meanwhile `model` computes what it does without its adapter, to the last bit."""
    layers = _adapted(model).values()
    for layer in layers:
        layer.forward = layer.base_layer.forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _adapted(model: nn.Module) -> dict[str, LoraLayer]:
    """Layers with an adapter by the names that they have without one."""
    return {name: cast("LoraLayer", module) for name, module in model.named_modules() if hasattr(module, BASE)}


def _inside(layers: Mapping[str, LoraLayer], name: str) -> str:
    """The name that a weight of the model without adapter has in the one with it."""
    path, _, leaf = name.rpartition(".")
    return f"{path}.{BASE}.{leaf}" if path in layers else name
