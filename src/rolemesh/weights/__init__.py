"""Weights on their way from the trainer to the engines."""

from rolemesh.weights.buckets import Bucket, Buffer, WeightManifest, Weights, pack, plan_buckets, unpack
from rolemesh.weights.intake import Intake
from rolemesh.weights.outlet import Outlet
from rolemesh.weights.ring import Ring

__all__ = ["Bucket", "Buffer", "Intake", "Outlet", "Ring", "WeightManifest", "Weights", "pack", "plan_buckets", "unpack"]
