"""The Ray backend, and the only place that imports Ray."""

from rolemesh.runtime.ray.backend import RayBackend

__all__ = ["RayBackend"]
