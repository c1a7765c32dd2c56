"""Weights on their way from the trainer to the engines."""

from rolemesh.weights.buckets import Bucket, Buffer, Content, WeightManifest, Weights, pack, plan_buckets, unpack
from rolemesh.weights.disk import FileReader, find_token, leave_token
from rolemesh.weights.intake import Intake
from rolemesh.weights.outlet import Outlet
from rolemesh.weights.shared import SharedFile, SharedWeights

__all__ = [
    "Bucket",
    "Buffer",
    "Content",
    "FileReader",
    "Intake",
    "Outlet",
    "SharedFile",
    "SharedWeights",
    "WeightManifest",
    "Weights",
    "find_token",
    "leave_token",
    "pack",
    "plan_buckets",
    "unpack",
]
