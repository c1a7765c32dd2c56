"""Weights on their way from the trainer to the engines."""

from rolemesh.weights.bundle import Buffer, WeightManifest, pack, unpack, verify

__all__ = ["Buffer", "WeightManifest", "pack", "unpack", "verify"]
