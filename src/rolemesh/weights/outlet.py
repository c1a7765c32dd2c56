"""The trainer's side of a publication: packs bucket after bucket as they are asked for, or all of them into the node's shared memory.
Those that go by disk are packed one by one too, and written to a file each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from rolemesh.weights.buckets import Buffer, Content, WeightManifest, Weights, give_up, new_nonce, pack, plan_buckets, wipe
from rolemesh.weights.disk import WrittenVersion, new_name
from rolemesh.weights.shared import SharedFile

SLOTS = 2


class Outlet:
    """Publications of one rank. The first packs; the others only give their parts of weights that are spread over ranks.

    `bucket_bytes` bounds a bucket, unless a single weight is larger. `path` is where a file that other processes read is. With `full`,
    checksums are of every word.
    """

    def __init__(self, *, bucket_bytes: int, path: str, leads: bool, full: bool = False) -> None:
        self._bucket_bytes, self._path, self._leads, self._full = bucket_bytes, path, leads, full
        self._file: SharedFile | None = None
        self._files: WrittenVersion | None = None
        """The version under way, if it goes by disk."""
        self._whole = ""
        """Name of the last version that is on disk."""
        self._own = np.empty(0, dtype=np.uint8)
        """Two buckets that do not go through shared memory: one is written while the other is read."""
        self._places: list[Buffer] = []
        """Where each bucket of the version goes."""
        self._manifest: WeightManifest | None = None
        self._weights: Weights = iter(())

    def begin(
        self,
        version: int,
        forms: Iterable[tuple[str, torch.Tensor]],
        weights: Weights,
        *,
        shared: bool,
        folder: str = "",
        dtype: torch.dtype | None = None,
        content: Content = "merged",
        nonce: int | None = None,
    ) -> WeightManifest:
        """Start with a version, in shared memory, in files in a `folder`, or in turn: from here on nothing else is there to be read.
        `forms` are names, shapes and formats of the `weights`, in their order; those in a floating-point format are published in `dtype`,
        if given. Without a `nonce` it is another publication than all before; with that of one whose contents are the same, who has read
        those has this one too. Raises RolemeshError where there is no room for it."""
        self._weights = weights
        cast = ((name, form.to(dtype) if dtype is not None and form.is_floating_point() else form) for name, form in forms)
        buckets, path = plan_buckets(cast, self._bucket_bytes), self._path if shared else ""
        where = str(Path(folder) / new_name(version)) if folder else ""
        manifest = WeightManifest(
            version=version, buckets=buckets, content=content, shared=path, folder=where, full=self._full,
            nonce=new_nonce() if nonce is None else nonce,
        )  # fmt: skip
        self._manifest, self._files = None, None
        if self._leads:
            self._files = WrittenVersion(manifest, keep=[self._whole]) if folder else None
            self._places = self._shared(manifest) if shared else self._in_turn(manifest, 1 if folder else SLOTS)
        self._manifest = manifest
        return manifest

    def _shared(self, manifest: WeightManifest) -> list[Buffer]:
        if self._file is None or self._file.size < manifest.nbytes or not self._file.is_current:
            self.close()
            self._file = SharedFile(self._path, manifest.nbytes)
        places = self._file.buckets(manifest)
        for place in places:
            wipe(place)
        return places

    def _in_turn(self, manifest: WeightManifest, count: int) -> list[Buffer]:
        if self._own.nbytes != count * manifest.largest:
            self._own = np.empty(count * manifest.largest, dtype=np.uint8)
        slots = np.split(self._own, count)
        return [slots[number % count] for number in range(len(manifest.buckets))]

    def pack(self, version: int, number: int) -> Buffer | None:
        """Bucket `number` of the version that was begun, after the one before it; None on a rank that does not lead, and where it is in a
        file then. Raises ValueError when it is not the version under way, or there are more or other weights than the manifest says, and
        RolemeshError when the file cannot be written."""
        manifest = self._under_way(version, f"bucket {number + 1} of ")
        buffer = None
        if self._leads:
            buffer = pack(manifest, number, self._weights, self._places[number])
        else:
            deque(islice(self._weights, len(manifest.buckets[number].names)), maxlen=0)
        if number == len(manifest.buckets) - 1 and (more := next(self._weights, None)) is not None:
            raise ValueError(f"there are more weights than the manifest of version {version} says, first {more[0]}")
        if self._files is None or buffer is None:
            return buffer
        self._files.write(number, buffer)
        if number == len(manifest.buckets) - 1:
            self._whole = self._files.folder.name
        return None

    def fill(self, version: int) -> WeightManifest:
        """Pack all buckets of the version that was begun, for those that read them in shared memory. Raises as `pack`; readers are told."""
        manifest, number = self._under_way(version, ""), 0
        try:
            for number in range(len(manifest.buckets)):
                self.pack(version, number)
        except BaseException:
            if self._leads:
                give_up(manifest, self._places[number])
            raise
        return manifest

    def _under_way(self, version: int, what: str) -> WeightManifest:
        manifest = self._manifest
        if manifest is None or manifest.version != version:
            under_way = "none" if manifest is None else f"version {manifest.version}"
            raise ValueError(f"{what}weight version {version} was asked for, but {under_way} is being published")
        return manifest

    def close(self) -> None:
        """Give the shared memory back."""
        if self._file is not None:
            self._file.remove()
            self._file = None
