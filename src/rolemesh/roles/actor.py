"""The actor: trains the policy, data-parallel over its ranks, and publishes its weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from rolemesh.algorithms import create_algorithm
from rolemesh.batch import Batch
from rolemesh.config.model_files import BUILTIN_MODELS, model_files
from rolemesh.config.schema import Config
from rolemesh.engines.train import OptimizerSettings, TrainEngine
from rolemesh.engines.train.tensor_file import TensorFile
from rolemesh.models import load_model, load_tokenizer, open_weights, save_description
from rolemesh.models.lora import adapted_names, add_adapter, save_adapter_config
from rolemesh.observe import Metrics
from rolemesh.roles.saving import GATHERED
from rolemesh.roles.trained import BY_MINIBATCH, TrainedWorker, engine_options, passes, reads_parts
from rolemesh.runtime import WorkerContext, register, shared_file
from rolemesh.weights import Buffer, Content, Outlet, WeightManifest, Weights, leave_token

if TYPE_CHECKING:
    from rolemesh.protocols.algorithm import StepTerms, TokenBatch


def actor_reads(*, config: Config) -> tuple[str, ...]:
    return create_algorithm(config).actor_reads


class ActorWorker(TrainedWorker):
    """One rank of the actor."""

    weights_file: ClassVar[str] = "model/model.safetensors"
    optimizer_file: ClassVar[str] = "actor-optimizer.safetensors"
    adapter_file: ClassVar[str] = "adapter/adapter_model.safetensors"
    """Where an adapter lies, by itself: what is trained. The model below it is that of `model.path`."""
    engine: TrainEngine

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context)
        self.config = config
        self.algorithm = create_algorithm(config)
        trainer = config.trainer
        self._outlet = Outlet(
            bucket_bytes=trainer.bucket_mib * 2**20,
            path=shared_file("weights"),
            leads=context.rank == 0,
            full=trainer.verify_weights == "full",
        )
        self._nonces: dict[tuple[int, Content, str], int] = {}
        """Of publications of the weights as they are, by version, content and format: repeated for those that come later, they are the
        same to those that have them."""

    def load(self) -> None:
        """Build the model: the same weights on every rank, from the folder or from the seed."""
        torch.set_num_threads(1)
        model, weights = self._model()
        self.engine = TrainEngine(
            model,
            weights=weights,
            optimizer=OptimizerSettings.of_trainer(self.config.trainer),
            entropy_gradient=self.config.algorithm.entropy_coefficient > 0,
            **engine_options(self.config, self.context.device),
        )

    def _model(self) -> tuple[nn.Module, Mapping[str, Any] | None]:
        """The model with float32 weights; or without contents, and weights that each rank reads its part of when the ranks have met."""
        chosen, seed = self.config.model.model_copy(update={"dtype": "float32"}), self.config.seed
        opened = open_weights(chosen) if reads_parts(self.config, self.context) else None
        model, weights = opened if opened is not None else (load_model(chosen, seed=seed), None)
        if chosen.lora is not None:
            base = chosen.path if chosen.path in BUILTIN_MODELS else str(model_files(chosen.path).main.absolute())
            add_adapter(model, chosen.lora, seed=seed, base=base)
            weights = None if weights is None else adapted_names(model, weights)
        return model, weights

    # -- policy ---------------------------------------------------------------------------------------------------------------

    @register(dispatch=BY_MINIBATCH, reads=actor_reads, mutates=True)
    def update(self, batch: Batch, *, count: int, temperature: float, terms: StepTerms) -> int:
        """All epochs and mini-batches of one step: `count` mini-batches, each one optimizer step, on this rank's rows of them.

        Before the first weight change, in the first mini-batch that has a token to train, `policy/ratio_first_minibatch_max_deviation`
        is the largest |ratio - 1|, `policy/ratio_first_minibatch_mean_deviation` its mean, and `rollout/logprob_gap_max` the largest
        difference between the log-probabilities of trainer and engine. Returns the optimizer steps done so far.
        """
        self._nonces.clear()
        before = self.engine.step
        for epoch, number, rows in passes(batch, epochs=self.config.trainer.epochs, count=count):
            loss = partial(self._loss, terms=terms, compare=self.engine.step == before)
            with self.spans.span("minibatch", number=number, epoch=epoch, rows=len(rows)):
                self.engine.update(rows, loss, temperature=temperature, metrics=self.metrics)
        self.record_memory()
        return self.engine.step

    def _loss(self, tokens: TokenBatch, metrics: Metrics, *, terms: StepTerms, compare: bool) -> torch.Tensor:
        kept = tokens.weights != 0
        if compare and kept.any():
            gap = (tokens.logprobs.detach() - tokens.old_logprobs)[kept]
            metrics.max("rollout/logprob_gap_max", gap.abs().max())
            off = gap.expm1().abs()
            metrics.max("policy/ratio_first_minibatch_max_deviation", off.max())
            metrics.mean("policy/ratio_first_minibatch_mean_deviation", off.mean(), weight=len(off))
        return self.algorithm.loss(tokens, metrics, terms)

    @register(dispatch=BY_MINIBATCH, reads=actor_reads)
    def gradients(self, batch: Batch, *, temperature: float, terms: StepTerms) -> dict[str, np.ndarray]:
        """Gradients of the rows as one mini-batch, summed over ranks, without a step: for checks of equality."""
        loss = partial(self._loss, terms=terms, compare=False)
        found = self.engine.compute_gradients(batch, loss, temperature=temperature, metrics=Metrics())
        return {name: gradient.float().numpy() for name, gradient in found.items()}

    # -- supervised ----------------------------------------------------------------------------------------------------------

    @register(dispatch="all", mutates=True)
    def start_sft(self) -> None:
        """Use the optimizer of the `sft` section from here on."""
        sft = self.config.sft
        assert sft is not None
        self.engine.reset_optimizer(OptimizerSettings.of_sft(sft, self.config.trainer))

    @register(dispatch="balanced", reads=("prompt_ids", "response_ids", "token_weight"), mutates=True)
    def sft_update(self, batch: Batch) -> None:
        """One optimizer step of cross-entropy on the response tokens."""
        self._nonces.clear()
        self.engine.sft_update(batch, self.metrics)

    @register(dispatch="all", mutates=True)
    def end_sft(self) -> None:
        """Back to the policy's optimizer, with fresh moments."""
        self.engine.reset_optimizer(OptimizerSettings.of_trainer(self.config.trainer))

    # -- weights and checkpoints ---------------------------------------------------------------------------------------------

    @register(dispatch=GATHERED)
    def publish(self, version: int, *, content: Content, dtype: str, shared: bool, folder: str = "") -> WeightManifest:
        """Begin to publish a version: returns the manifest of what `pack` answers bucket by bucket, or writes to files in a `folder`, or
        `fill` writes into the node's shared memory, in number format `dtype`. Other ranks than the first only give their parts."""
        if content == "merged":
            forms, weights = self.engine.empty_weights(), self.named_weights()
        else:
            only = content == "adapter"
            forms, weights = self.engine.empty_parts(adapter_only=only), self.engine.parts(adapter_only=only)
        nonce, form = self._nonces.get((version, content, dtype)), getattr(torch, dtype)
        manifest = self._outlet.begin(version, forms, weights, shared=shared, folder=folder, dtype=form, content=content, nonce=nonce)
        self._nonces[version, content, dtype] = manifest.nonce
        if self.context.rank == 0:
            self.metrics.sum("weights/bytes", manifest.nbytes)
        return manifest

    @register(dispatch=GATHERED, stores=True)
    def pack(self, version: int, number: int) -> tuple[None, Buffer | None]:
        """Bucket `number` of the version that was begun, one after the other, as a stored object; None of one that is in a file then."""
        return None, self._outlet.pack(version, number)

    @register(dispatch=GATHERED)
    def fill(self, version: int) -> None:
        """All buckets of the version that was begun, into the node's shared memory."""
        self._outlet.fill(version)

    @register(dispatch="all")
    def leave_token(self, folder: str) -> tuple[str, str]:
        """(token, "") once it lies in the folder for others to find, or ("", what is wrong)."""
        return leave_token(folder)

    @register(dispatch="all")
    def give_parts(self) -> None:
        """Take part where other ranks read all weights."""
        deque(self.named_weights(), maxlen=0)

    def named_weights(self) -> Weights:
        """All weights, whole, an adapter merged into them: for this process, and on all ranks at once where they are spread over these."""
        return self.engine.merged_weights()

    @property
    def restored_file(self) -> str:
        return self.adapter_file if self.config.model.lora is not None else self.weights_file

    @register(dispatch="all", mutates=True)
    def restore(self, folder: str, saved: dict[str, Any]) -> None:
        """See `TrainedWorker`; raises ValueError too when an adapter is restored on another model than it was trained on."""
        self._nonces.clear()
        super().restore(folder, saved)
        if self.config.model.lora is not None:
            self.engine.check_below_adapter(Path(folder) / self.weights_file)

    def files(self) -> dict[str, TensorFile]:
        """With an adapter also that; the weights are merged then."""
        adapter = {} if self.config.model.lora is None else {self.adapter_file: self.engine.adapter_file()}
        return super().files() | adapter

    def describe(self, folder: Path) -> None:
        """With config and tokenizer the weights are a Hugging Face folder, and the adapter's folder is one of peft."""
        model, names = self.config.model, [name for name, _ in self.engine.empty_weights()]
        generation = model_files(model.path).generation
        save_description((folder / self.weights_file).parent, self.engine.empty_model, load_tokenizer(model), names, generation=generation)
        if model.lora is not None:
            save_adapter_config((folder / self.adapter_file).parent, self.engine.skeleton)
