"""What rollout, reference and critic share: how the actor's weights get into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rolemesh.config.schema import Config
from rolemesh.names import ACTOR
from rolemesh.runtime import Worker, register
from rolemesh.weights import Buffer, Intake, Ring, WeightManifest, Weights

if TYPE_CHECKING:
    from rolemesh.roles.actor import ActorWorker


class WeightTaker(Worker):
    """Base of workers that take over published weights."""

    config: Config
    _intake: Intake | None = None
    _ring: Ring | None = None

    def take_weights(self, weights: Weights, version: int) -> int:
        """Take over all weights of a version and return the version held then. Raises what refuses them."""
        raise NotImplementedError(f"{type(self).__name__} must define take_weights(weights, version)")

    @register(dispatch="all", mutates=True)
    def load_weights(
        self, version: int, number: int | None = None, manifest: WeightManifest | None = None, bucket: Buffer | None = None
    ) -> int | None:
        """Take over bucket `number` of a version: the one given, or the one in the node's shared memory. The first comes with the
        manifest of all. Without a number, read the weights of the actor in this process. Returns the version held once all is there."""
        if number is None or manifest is not None:
            self._give_up()
        if number is None:
            return self._read_actor(version)
        if manifest is not None:
            waiter, deadline = f"{self.context.group} rank {self.context.rank}", self.config.deadlines.call
            self._intake = Intake(manifest, lambda weights: self.take_weights(weights, version), waiter=waiter, deadline=deadline)
        intake = self._intake
        if intake is None or intake.version != version:
            under_way = "none" if intake is None else f"version {intake.version}"
            raise ValueError(f"bucket {number + 1} of weight version {version} came, but {under_way} is being taken over; publish again")
        held = intake.take(number, bucket if bucket is not None else self._shared(intake.shared, number))
        if held is not None:
            self._intake = None
        return held

    def _give_up(self) -> None:
        if self._intake is not None:
            self._intake.close()
            self._intake = None

    def _read_actor(self, version: int) -> int:
        weights = cast("ActorWorker", self.peers[ACTOR]).named_weights()
        try:
            return self.take_weights(weights, version)
        finally:
            for _ in weights:  # other ranks wait for this one's parts, also when it has no use for them
                pass

    def _shared(self, path: str, number: int) -> Buffer:
        if self._ring is None or self._ring.path != path or not self._ring.is_current:
            self._ring = Ring.open(path)
        return self._ring.slot(number)
