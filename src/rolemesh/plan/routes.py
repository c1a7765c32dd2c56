"""By which way published weights reach a worker. The plan shows it, and a publication asks again with where the workers are by then."""

from __future__ import annotations

from collections.abc import Container, Hashable
from typing import Final, Literal, NamedTuple

from rolemesh.config.schema import Config
from rolemesh.names import CRITIC, REF

Route = Literal["process", "shared_memory", "object_store", "disk"]

ROUTE_WORDS: Final[dict[Route, str]] = {
    "process": "in the actor's process",
    "shared_memory": "through shared memory",
    "object_store": "through the object store",
    "disk": "through files",
}


def weight_format(config: Config, route: Route) -> str | None:
    """Number format in which rollout workers are sent weights: that in which they hold them, half the bytes in bfloat16, unless they merge
    an adapter themselves. None in the actor's process, where nothing is sent."""
    if route == "process":
        return None
    return "float32" if config.trainer.publish == "adapter" else config.model.dtype


def handed_on(config: Config) -> tuple[str, ...]:
    """Roles that get the policy's float32 weights, once, after a warm start: the reference, and a critic without a model of its own."""
    critic = (CRITIC,) if config.algorithm.critic_path is None else ()
    return tuple(role for role in (REF, *critic) if role in config.roles and config.sft is not None)


class Place(NamedTuple):
    """Where a worker is: what identifies its process, and its node."""

    process: Hashable
    node: Hashable


def weight_route(taker: Place, packer: Place, processes: Container[Hashable], *, shared_memory: bool, disk: bool) -> Route:
    """In one of the actor's `processes` its weights are read where they lie. Everybody else reads them from `disk` if there is a folder for
    that. Without one they come, on the node of the `packer`, the actor's first worker, through shared memory if there may be any; elsewhere
    through the object store, which brings them to a node once."""
    if taker.process in processes:
        return "process"
    if disk:
        return "disk"
    return "shared_memory" if shared_memory and taker.node == packer.node else "object_store"


def why(route: Route, *, same_node: bool) -> str:
    """The reason for a route that does not go without saying, for a taker on the node of the actor's first worker or elsewhere."""
    if route == "disk":
        return "trainer.publish_folder"
    if route == "object_store":
        return "backend local" if same_node else "another node than the actor's"
    return "the actor's node" if route == "shared_memory" else ""
