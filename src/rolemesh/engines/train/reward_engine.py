"""`RewardEngine`: scores of whole rows by a model with one output that is never trained. Called by the reward role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rolemesh.batch import Batch, token_chunks
from rolemesh.config.schema import ModelConfig
from rolemesh.engines.train.microbatch import MicroBatch, Passes
from rolemesh.engines.train.packing import use_packed_attention
from rolemesh.engines.train.probe import near, probe_tokens, try_rows
from rolemesh.engines.train.value_model import ValueModel, classifies, read_classifier, read_head
from rolemesh.errors import ConfigError
from rolemesh.models import load_model
from rolemesh.models.load import LOAD_ERRORS

Rows = Sequence[Sequence[int]]


def load_reward_model(model: ModelConfig, *, option: str) -> nn.Module:
    """The model of a folder, in `model.dtype`: a sequence classifier, or a `ValueModel` of a causal model with its stored head. Raises
    ConfigError naming `option`."""
    try:
        if classifies(model):
            return read_classifier(model)
        head = read_head(model)
        if head is None:
            raise ValueError("no head with one output")
        return ValueModel.of_causal(load_model(model, seed=0), seed=0, stored=head)
    except (ConfigError, *LOAD_ERRORS) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError.one(option, f"{model.path} must be a whole reward model", found, "Copy or download it again") from error


class RewardEngine:
    """One whole copy of a reward model, forward only.

    A row's score is what transformers computes for it alone: of a causal model, the head's output at the last token that is not the one
    for padding. Bodies of causal models run on packed rows, without what follows that token. Any other classifier (encoders, heads of
    several layers) runs as it is, on padded rows under a mask, or without a token for padding on each row by itself.
    """

    def __init__(self, model: nn.Module, *, micro_batch_tokens: int, device: str | torch.device = "cpu", packing: bool = True) -> None:
        """`micro_batch_tokens` bounds the tokens of one forward pass; a longer row is a pass of its own. It changes no score."""
        self._device, self._max_tokens = torch.device(device), micro_batch_tokens
        self._model = model.requires_grad_(False).eval().to(self._device)
        config = cast(Any, model.backbone if isinstance(model, ValueModel) else model).config.get_text_config()
        self._padding: int | None = config.pad_token_id
        with torch.no_grad():
            self._value = model if isinstance(model, ValueModel) else self._by_position(model)
            packed = self._value is not None and self._packs(self._value.backbone, packing)
        self._passes = Passes(micro_batch_tokens, self._device, packed)

    @property
    def packed(self) -> bool:
        """Whether rows lie one behind the other."""
        return self._passes.packed

    def memory(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()))

    @torch.no_grad()
    def scores(self, rows: Rows) -> npt.NDArray[np.float32]:
        """One number for each row of token ids, none of them empty, in their order: float32 [N]."""
        if not rows:
            return np.empty(0, dtype=np.float32)
        return self._scores_of_rows(rows) if self._value is None else self._scores_at_ends(rows)

    # -- bodies of causal models ----------------------------------------------------------------------------------------------

    def _by_position(self, classifier: nn.Module) -> ValueModel | None:
        """Body and head, if that is all there is: trying is more reliable than a list of architectures."""
        try:
            value = ValueModel.of_classifier(classifier)
            probe = probe_tokens(value.backbone, self._device)
            try_rows(value.backbone, value.hidden, probe, packing=False)
        except ValueError:
            return None
        row = probe[0].tolist()
        last = torch.tensor([self._end(row) - 1], device=self._device)
        own = cast(Any, classifier)(input_ids=probe).logits[:, 0]
        return value if near(value(last, input_ids=probe).to(own.dtype), own) else None

    def _packs(self, backbone: nn.Module, packing: bool) -> bool:
        """Raises ValueError for a body that is not causal."""
        packing = packing and use_packed_attention(backbone)
        return try_rows(backbone, cast(ValueModel, self._value).hidden, probe_tokens(backbone, self._device), packing=packing)

    def _end(self, row: Sequence[int]) -> int:
        """Length of a row up to the token whose output counts."""
        return next((end for end in range(len(row), 0, -1) if row[end - 1] != self._padding), 1)

    def _scores_at_ends(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The value before one more token."""
        columns = {"draw": range(len(rows)), "sample": [0] * len(rows), "response_ids": [[0]] * len(rows)}
        batch = Batch.from_columns(columns | {"prompt_ids": [list(row[: self._end(row)]) for row in rows]})
        return np.concatenate(self._passes.by_row(batch, self._forward))

    def _forward(self, micro: MicroBatch) -> Tensor:
        return cast(Tensor, cast(ValueModel, self._value)(micro.positions, **micro.inputs))

    # -- any other classifier -------------------------------------------------------------------------------------------------

    def _scores_of_rows(self, rows: Rows) -> npt.NDArray[np.float32]:
        found = np.empty(len(rows), dtype=np.float32)
        together = token_chunks([len(row) for row in rows], self._max_tokens)
        for chunk in together if self._padding is not None else [[row] for row in range(len(rows))]:
            longest = max(len(rows[row]) for row in chunk)
            ids = np.full((len(chunk), longest), self._padding or 0, dtype=np.int64)  # without one no place is left over
            mask = np.zeros_like(ids)
            for place, row in enumerate(chunk):
                ids[place, : len(rows[row])], mask[place, : len(rows[row])] = rows[row], 1
            inputs = (torch.from_numpy(array).to(self._device) for array in (ids, mask))
            found[chunk] = self._logits(*inputs).float()[:, 0].cpu().numpy()
        return found

    def _logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        return cast(Tensor, self._model(input_ids=ids, attention_mask=mask).logits)
