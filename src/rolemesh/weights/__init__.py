"""Weights on their way from the trainer to the engines."""

from rolemesh.weights.buckets import Bucket, Buffer, Content, WeightManifest, Weights, pack, plan_buckets, unpack
from rolemesh.weights.intake import Intake
from rolemesh.weights.outlet import Outlet
from rolemesh.weights.shared import SharedFile, SharedWeights

__all__ = [
    "Bucket",
    "Buffer",
    "Content",
    "Intake",
    "Outlet",
    "SharedFile",
    "SharedWeights",
    "WeightManifest",
    "Weights",
    "pack",
    "plan_buckets",
    "unpack",
]
