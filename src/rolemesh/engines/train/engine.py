"""`TrainEngine`: log-probabilities, gradients and optimizer steps of one worker's replica of the model. Called by the actor role.

Data-parallel: every worker holds the whole model and gets its own rows of each mini-batch. Because loss weights are normalised over
the whole mini-batch beforehand, a worker adds up the gradients of its micro-batches, the workers add up theirs, and the sum is the
gradient of the mini-batch whatever the cut.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.batch import Batch
from rolemesh.batch.balance import token_chunks
from rolemesh.engines.train.collective import all_reduce
from rolemesh.engines.train.forward import TokenScorer
from rolemesh.engines.train.gradients import FlatGradients
from rolemesh.engines.train.microbatch import MicroBatch, per_token, policy_columns
from rolemesh.engines.train.optimizer import OptimizerSettings
from rolemesh.engines.train.sft import sft_loss
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import TokenBatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

LossFunction = Callable[[TokenBatch, Metrics], torch.Tensor]


class TrainEngine:
    """One replica. The model must be a causal language model in float32; it stays in eval mode, so there is no dropout.

    With a `process_group` (may be set later, and to None), `update`, `sft_update`, `compute_gradients` and `check_replicas` are
    collective: every worker calls them, also one that has no rows. After an exception inside a collective call the engine and its
    model must not be used again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizer: OptimizerSettings,
        micro_batch_tokens: int,
        process_group: ProcessGroup | None = None,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`micro_batch_tokens` bounds rows * longest row of one forward pass; a longer row is a pass of its own. `compute_dtype`
        bfloat16 runs matrix products in it, on float32 weights. Raises ValueError for weights in another format, or none to train."""
        self.model = model.to(device)
        self.settings = optimizer
        self.step = 0
        self._device = torch.device(device)
        self._micro_batch_tokens = micro_batch_tokens
        self.process_group = process_group
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        _check_parameters(self._parameters)
        self._scorer = TokenScorer(model, compute_dtype)
        self._gradients = FlatGradients(list(self._parameters.values()))
        self._optimizer = optimizer.build(self._parameters.values())

    # -- log-probabilities --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> list[npt.NDArray[np.float32]]:
        """Log-probability of each token of `response_ids` given what stands before it, after temperature; one array a row, in order."""
        _check_temperature(temperature)
        found = [np.empty(0, dtype=np.float32)] * batch.num_rows
        for chunk in self._micro_batches(batch):
            rows = batch.take(chunk)
            logprobs, _ = self._scorer(MicroBatch.of(rows, self._device), temperature)
            ends = np.cumsum(rows.lengths("response_ids"))[:-1]
            for index, row in zip(chunk, np.split(logprobs.cpu().numpy(), ends), strict=True):
                found[index] = row
        return found

    # -- training -----------------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, loss_fn: LossFunction, *, temperature: float, metrics: Metrics) -> None:
        """One optimizer step on one mini-batch, of which `batch` holds this worker's rows (possibly none).

        Reads prompt_ids, response_ids, rollout_logprobs, advantage and token_weight. A step whose loss or gradient is not finite, or
        in which no worker has a token with a weight, is left out, counted and logged; all workers decide alike. Records
        `actor/grad_norm` (before clipping), `actor/learning_rate`, `actor/tokens_trained` and the steps left out.
        """
        self._accumulate(batch, loss_fn, temperature, metrics, policy=True)
        self._apply(metrics, "actor")

    def sft_update(self, batch: Batch, metrics: Metrics) -> None:
        """The same with the cross-entropy of the response tokens, each weighted by its row's `token_weight`; records `sft/...`.

        Reads prompt_ids, response_ids and token_weight, which must be normalised over the whole mini-batch (token mean: 1 / all its
        response tokens)."""
        self._accumulate(batch, sft_loss, 1.0, metrics, policy=False)
        self._apply(metrics, "sft")

    def compute_gradients(self, batch: Batch, loss_fn: LossFunction, *, temperature: float, metrics: Metrics) -> dict[str, torch.Tensor]:
        """Gradient of the mini-batch over all workers by parameter name, before clipping, as copies; nothing is changed."""
        self._accumulate(batch, loss_fn, temperature, metrics, policy=True)
        return {name: parameter.grad.clone() for name, parameter in self._parameters.items() if parameter.grad is not None}

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """Start again at step 0 with other settings and without moments; the weights stay."""
        self.settings, self.step = settings, 0
        self._optimizer = settings.build(self._parameters.values())

    def _accumulate(self, batch: Batch, loss_fn: LossFunction, temperature: float, metrics: Metrics, *, policy: bool) -> None:
        """Gradients of this worker's rows, then the sum over the workers."""
        _check_temperature(temperature)
        self._gradients.zero()
        rows = batch.sort_by_id()  # so that the order of the rows changes nothing, to the last bit
        rows = rows.take(np.flatnonzero(rows.scalars("token_weight")))
        for chunk in self._micro_batches(rows):
            tokens = self._tokens(rows.take(chunk), temperature, policy=policy)
            self._gradients.backward(loss_fn(tokens, metrics), int(tokens.weights.count_nonzero()))
        self._gradients.all_reduce(self.process_group)

    def _tokens(self, rows: Batch, temperature: float, *, policy: bool) -> TokenBatch:
        micro = MicroBatch.of(rows, self._device)
        logprobs, entropy = self._scorer(micro, temperature)
        old, advantages = policy_columns(rows, micro.row) if policy else (logprobs.detach(), torch.zeros_like(entropy))
        weights = per_token(rows, "token_weight", micro.row)
        return TokenBatch(logprobs=logprobs, entropy=entropy, old_logprobs=old, advantages=advantages, weights=weights, row=micro.row)

    def _micro_batches(self, batch: Batch) -> list[list[int]]:
        """Positions of rows with response tokens, cut by the token budget."""
        rows = np.flatnonzero(batch.lengths("response_ids"))
        return [rows[chunk].tolist() for chunk in token_chunks(batch.token_counts[rows], self._micro_batch_tokens)]

    def _apply(self, metrics: Metrics, prefix: str) -> None:
        """Clip and step, or leave the step out. Numbers that are equal on all workers are recorded by the first alone."""
        norm, loss, trained = self._gradients.norm(), self._gradients.loss, self._gradients.trained_tokens
        # the loss too: a clamp stops the gradient of a nan, which would leave the norm finite and the fault unseen
        finite, empty = math.isfinite(norm) and math.isfinite(loss), trained == 0
        learning_rate = self.settings.learning_rate_at(self.step)
        if not finite:
            logger.warning("optimizer step %d left out: gradient norm %s, loss %s over %d tokens", self.step, norm, loss, trained)
        elif empty:
            logger.warning("optimizer step %d left out: no token of the mini-batch has a weight", self.step)
        else:
            self._step(norm, learning_rate)
        if self.process_group is None or self.process_group.rank() == 0:
            metrics.sum(f"{prefix}/steps_skipped_nonfinite", not finite)
            metrics.sum(f"{prefix}/steps_skipped_empty", finite and empty)
            metrics.sum(f"{prefix}/tokens_trained", trained)
            metrics.last(f"{prefix}/learning_rate", learning_rate)
            if finite:
                metrics.mean(f"{prefix}/grad_norm", norm)

    def _step(self, norm: float, learning_rate: float) -> None:
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            self._gradients.scale(limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.step += 1

    # -- state --------------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers, as they are (no copies), tensors that are tied once under their first name."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach()

    def state(self) -> dict[str, Any]:
        """Everything that the next update depends on, as copies: {"step", "model", "optimizer"}, loadable with `weights_only`.

        Nothing here draws random numbers, and the learning rate is a function of the step."""
        parameters = zip(self._parameters, self._optimizer.param_groups[0]["params"], strict=True)
        moments = {name: dict(self._optimizer.state[parameter]) for name, parameter in parameters if parameter in self._optimizer.state}
        return {
            "step": self.step,
            "model": {name: tensor.clone() for name, tensor in self.named_weights()},
            "optimizer": {name: {key: value.clone() for key, value in entry.items()} for name, entry in moments.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave, by copying. Optimizer settings stay those of this engine. Raises ValueError, and changes nothing,
        when names or shapes do not fit the model."""
        weights = dict(self.named_weights())
        _check_fit(
            {name: tensor.shape for name, tensor in weights.items()}, {name: tensor.shape for name, tensor in state["model"].items()}
        )
        if state["optimizer"]:
            moments = {name: entry["exp_avg"].shape for name, entry in state["optimizer"].items()}
            _check_fit({name: parameter.shape for name, parameter in self._parameters.items()}, moments)
        for name, tensor in weights.items():
            tensor.copy_(state["model"][name])
        self._optimizer.state.clear()
        for name, entry in state["optimizer"].items():
            self._optimizer.state[self._parameters[name]] = {key: value.to(self._device, copy=True) for key, value in entry.items()}
        self.step = int(state["step"])

    def check_replicas(self) -> None:
        """Raise ValueError unless all workers hold the same weights and step. Call it after loading: different replicas would train on
        without a sign."""
        if self.process_group is None:
            return
        checksum = self.step
        for _, tensor in self.named_weights():
            checksum = zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data, checksum)
        low, high = (torch.tensor([checksum], device=self._device) for _ in range(2))
        all_reduce(self.process_group, low, "min")
        all_reduce(self.process_group, high, "max")
        if not torch.equal(low, high):
            raise ValueError(
                f"the workers hold different weights (checksums from {int(low):#010x} to {int(high):#010x}, here {checksum:#010x}); "
                "load the same model folder, seed or state in all of them"
            )


def _check_parameters(parameters: dict[str, torch.nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("the model has no parameter that requires a gradient; there is nothing to train")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameters must be float32, found {parameter.dtype} in {name}: small updates would be rounded away. "
                "Load the model in float32 and set compute_dtype"
            )


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"the temperature of training must be above 0, found {temperature}; 0 (greedy) is for evaluation only")


def _check_fit(expected: dict[str, torch.Size], found: dict[str, torch.Size]) -> None:
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} is unknown" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} has shape {tuple(found[name])}, expected {tuple(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    if problems:
        raise ValueError(f"state does not fit the model: {'; '.join(sorted(problems))}. Load the state of the same model")
