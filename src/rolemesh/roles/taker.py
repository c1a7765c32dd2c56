"""What rollout, reference and critic share: how the actor's weights get into them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from rolemesh.config.schema import Config
from rolemesh.models.lora import AdapterMerge
from rolemesh.names import ACTOR
from rolemesh.runtime import Worker, register
from rolemesh.weights import Buffer, FileReader, Intake, SharedFile, SharedWeights, WeightManifest, Weights, find_token

if TYPE_CHECKING:
    from rolemesh.roles.actor import ActorWorker


class WeightTaker(Worker):
    """Base of workers that take over published weights."""

    config: Config
    _intake: Intake | None = None
    _files: FileReader | None = None
    """Of the version that is being taken over, if it lies on disk."""
    _file: SharedFile | None = None
    _shared: SharedWeights | None = None
    """What it was given last, if that lies in shared memory."""
    _merge: AdapterMerge | None = None

    def take_weights(self, weights: Weights, version: int) -> int:
        """Take over all weights of a version and return the version held then. Raises what refuses them."""
        raise NotImplementedError(f"{type(self).__name__} must define take_weights(weights, version)")

    @property
    def overwritten(self) -> bool:
        """The engine serves weights in shared memory where by now others are, or are being written: it must not be used."""
        return self._shared is not None and self._shared.kept and not self._shared.intact

    @register(dispatch="all", mutates=True)
    def load_weights(
        self, version: int, number: int | None = None, manifest: WeightManifest | None = None, bucket: Buffer | None = None
    ) -> int | None:
        """Take over the weights of a version. Without manifest and number these are those of the actor in this process; with a manifest
        alone, those that appear in the node's shared memory. Else this is bucket `number`, of which the first comes with the manifest of
        all; one that is not given lies on disk. Returns the version held once all is there."""
        if manifest is not None or number is None:
            self._give_up()
        if number is None:
            return self._read_actor(version) if manifest is None else self._read_shared(manifest)
        if manifest is not None:
            self._files = FileReader(manifest, waiter=self._name) if manifest.folder else None
            self._intake = Intake(manifest, partial(self._take_content, manifest), waiter=self._name, deadline=self.config.deadlines.call)
        intake = self._intake
        if intake is None or intake.version != version:
            under_way = "none" if intake is None else f"version {intake.version}"
            raise ValueError(f"bucket {number + 1} of weight version {version} came, but {under_way} is being taken over; publish again")
        if bucket is None:
            assert self._files is not None
            bucket = self._files.read(number)
        held = intake.take(number, bucket)
        if held is not None:
            self._intake = self._files = None
        return held

    @register(dispatch="all")
    def find_token(self, folder: str, token: str) -> str:
        """Empty where this process sees in the folder what the actor has left there; else what is wrong."""
        return find_token(folder, token)

    @property
    def _name(self) -> str:
        return f"{self.context.group} rank {self.context.rank}"

    def _take_content(self, manifest: WeightManifest, weights: Weights) -> int:
        if manifest.content != "merged":
            self._merge = self._merge or AdapterMerge(self.config.model)
            weights = self._merge(weights)
        return self.take_weights(weights, manifest.version)

    def _give_up(self) -> None:
        if self._intake is not None:
            self._intake.close()
            self._intake = self._files = None

    def _read_actor(self, version: int) -> int:
        weights = cast("ActorWorker", self.peers[ACTOR]).named_weights()
        try:
            return self.take_weights(weights, version)
        finally:
            for _ in weights:  # other ranks wait for this one's parts, also when it has no use for them
                pass

    def _read_shared(self, manifest: WeightManifest) -> int:
        if self._file is None or self._file.path != manifest.shared or not self._file.is_current:
            self._file = SharedFile.open(manifest.shared)
        self._shared = SharedWeights(self._file, manifest, waiter=self._name, deadline=self.config.deadlines.call)
        return self._take_content(manifest, self._shared)
