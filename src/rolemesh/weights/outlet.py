"""The trainer's side of a publication: packs bucket after bucket as they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import torch

from rolemesh.weights.buckets import Buffer, WeightManifest, Weights, pack, plan_buckets
from rolemesh.weights.ring import Ring


class Outlet:
    """Publications of one rank. The first packs into a `Ring`; the others only give their parts of weights that are spread over ranks.

    `bucket_bytes` bounds a bucket, unless a single weight is larger. `path` is where a ring that other processes read has its file.
    """

    def __init__(self, *, bucket_bytes: int, path: str, leads: bool) -> None:
        self._bucket_bytes, self._path, self._leads = bucket_bytes, path, leads
        self._ring: Ring | None = None
        self._manifest: WeightManifest | None = None
        self._weights: Weights = iter(())

    def begin(self, version: int, forms: Iterable[tuple[str, torch.Tensor]], weights: Weights, *, shared: bool) -> WeightManifest:
        """Start with a version, in shared memory or not. `forms` are names, shapes and formats of the `weights`, in their order."""
        path = self._path if shared else ""
        self._weights = weights
        self._manifest = manifest = WeightManifest(version=version, buckets=plan_buckets(forms, self._bucket_bytes), shared=path)
        if not self._leads:
            return manifest
        ring = self._ring
        if ring is None or (ring.slot_bytes, ring.path) != (manifest.largest, path) or (path and not ring.is_current):
            self.close()
            self._ring = Ring(manifest.largest, path)
        return manifest

    def pack(self, version: int, number: int) -> Buffer | None:
        """Bucket `number` of the version that was begun, after the one before it; None on a rank that does not lead. Raises ValueError
        when it is not the version under way, or there are more or other weights than the manifest says."""
        manifest = self._manifest
        if manifest is None or manifest.version != version:
            under_way = "none" if manifest is None else f"version {manifest.version}"
            raise ValueError(f"bucket {number + 1} of weight version {version} was asked for, but {under_way} is being published")
        buffer = None
        if self._ring is not None:
            buffer = pack(manifest, number, self._weights, self._ring.slot(number))
        else:
            deque(islice(self._weights, len(manifest.buckets[number].names)), maxlen=0)
        if number == len(manifest.buckets) - 1 and (more := next(self._weights, None)) is not None:
            raise ValueError(f"there are more weights than the manifest of version {version} says, first {more[0]}")
        return buffer

    def close(self) -> None:
        """Give the memory back."""
        if self._ring is not None:
            self._ring.remove()
            self._ring = None
