"""Copies a version out of the trainer into flat buckets. Training continues meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ...messages.errors import ConfigError, InvalidField
from ...messages.model import BUCKET_BYTES, Keep, WeightManifest
from ..tensors import LONGEST_NAME, Place, PlacePlanner, Places, Snapshot, dtype_named, hex_of
from .buckets import Buckets
from .gather import gathered, is_sharded, plain

PAIRS = "(name, tensor) pairs, such as model.named_parameters()"


class PackedWeights:
    """A copy of (name, tensor) pairs. Its digests are computed later, by `snapshot`.

    When the constructor returns, every tensor is copied. On CUDA the copies are queued on the current stream, and
    training may change the originals by work that is queued there later. The host waits for the GPU only to copy
    tensors from the CPU to it. For a tensor on the GPU the host only prepares views.

    Memory beside the copy: at most one bucket and one gathered tensor, whatever the size of the model.

    Args:
        version: number of the version.
        tensors: (name, tensor) pairs. Tensors and parameters are on CPU or CUDA, of any strided layout and any dtype.
            FSDP2's and tensor-parallel DTensors are gathered one at a time. Gathering is a collective, so every rank of
            the trainer makes a PackedWeights with the same names in the same order and the same `rename`.
        bucket_bytes: most bytes in a bucket. A larger tensor has a bucket for itself.
        keep: where the copy is kept. "device": on the CUDA device of the first bucket's tensors, or the CPU if they are
            there. "host": in host memory, pinned if the tensors come from a GPU; the copy is queued on the current
            stream and takes as long as the GPU's bus needs. "auto": on the device if all CUDA tensors are on one and
            10% of its memory stay free, else on the host.
        rename: returns the name under which a tensor is sent, or None to leave it out; see `strip_wrappers`.
        dtype: torch's name of a dtype. Floats of 16 bits and more are rounded to it before they are digested and sent.
            None leaves every tensor as it is.
        leader: False on ranks that only take part in the gathers. They copy nothing and cannot call `snapshot`.
        like: `places` of an earlier version. Places that stay the same are not computed and checked again.

    Raises InvalidField for an item that is no pair, a name that is no string or comes twice, a tensor that is not dense
    or is a shard, and if there is no tensor. It is raised on every rank alike, after the last gather, so that no rank
    waits for another.
    """

    def __init__(
        self,
        version: int,
        tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        bucket_bytes: int = BUCKET_BYTES,
        *,
        keep: Keep = "auto",
        rename: Callable[[str], str | None] | None = None,
        dtype: str | None = None,
        leader: bool = True,
        like: Places | None = None,
    ) -> None:
        self.version = version
        self._dtype = None if dtype is None else dtype_named(dtype)
        planner = PlacePlanner(bucket_bytes, like)
        self._buckets = Buckets(keep, planner.expected()) if leader else None
        # Inference tensors could not be sent: a broadcast counts as a change of them.
        with torch.inference_mode(False), torch.no_grad():
            self._take(tensors, planner, rename)
            self.places = planner.done()
            if self._buckets is not None:
                self._buckets.close()

    def _take(
        self,
        tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        planner: PlacePlanner,
        rename: Callable[[str], str | None] | None,
    ) -> None:
        module = isinstance(tensors, torch.nn.Module)
        failure: Exception | None = InvalidField("tensors", _what(tensors), PAIRS) if module else None
        pending: list[tuple[Place, torch.Tensor]] = []
        for item in _items(tensors):
            if wrong := _no_pair(item):
                failure, pending = failure or wrong, []
                for part in item if isinstance(item, tuple | list) else (item,):
                    gathered(part)  # another rank may gather it, and would wait for this one
                continue
            given, tensor = item
            name = given if rename is None else rename(given)
            if name is None:
                continue
            whole = gathered(tensor)
            del item, tensor  # nothing of it lives while the next one is made
            try:
                if failure is None:  # kept for the end: the other ranks gather the rest, and need this one for it
                    pending = self._place(given, name, whole, planner, pending)
            except Exception as error:
                failure, pending = error, []
            del whole
        try:
            if failure is not None:
                raise failure
            if pending and self._buckets is not None:
                self._buckets.add(pending)
        finally:
            del failure

    def _place(
        self, given: str, name: str, tensor: Any, planner: PlacePlanner, pending: list[tuple[Place, torch.Tensor]]
    ) -> list[tuple[Place, torch.Tensor]]:
        """Add `tensor` to `pending`, which waits until its bucket is full. Returns what is pending now."""
        outside = is_sharded(tensor) and not tensor.is_meta  # of the mesh: nothing that only the lead needs
        if self._buckets is not None or not outside:
            tensor = plain(given, tensor)
            if self._dtype is not None and tensor.is_floating_point() and tensor.itemsize > 1:  # else it has scales
                tensor = tensor.to(self._dtype)
        place = planner.place(name, tensor)
        if self._buckets is None:
            return pending
        if pending and place.bucket != pending[0][0].bucket:
            self._buckets.add(pending)
            pending = []
        pending.append((place, tensor))
        return pending

    @property
    def buckets(self) -> tuple[torch.Tensor, ...]:
        """Flat uint8 tensors of `places.sizes` bytes. Empty if leader=False."""
        return tuple(self._buckets.full) if self._buckets is not None else ()

    @property
    def ready(self) -> Any:
        """A torch.cuda.Event after which the buckets are filled, or None if they are filled already."""
        return self._buckets.ready if self._buckets is not None else None

    def snapshot(self) -> Snapshot:
        """Compute the digests, and return the version as it is sent. Waits until the digests are there.

        Any thread may call it. On CUDA the digests are computed on that thread's current stream, after `ready`. NaN and
        Inf are counted, and not refused. Raises ConfigError if leader=False.
        """
        if self._buckets is None:
            raise ConfigError("leader=False: this rank has no copy to send")
        values, nonfinite = self._buckets.digests()
        sizes, buckets = self.places.sizes, self.buckets
        # The smallest comes last: while the last bucket is loaded, nothing else is on the wire.
        order = sorted(range(len(sizes)), key=lambda bucket: -sizes[bucket])
        number = {bucket: turn for turn, bucket in enumerate(order)}
        told = zip(self.places.tensors, hex_of(values), nonfinite.tolist(), strict=True)
        tensors = sorted(told, key=lambda one: number[one[0].bucket])
        specs = tuple(place.spec(value, number[place.bucket]) for place, value, _ in tensors)
        manifest = WeightManifest.build(
            version=self.version, bucket_nbytes=tuple(sizes[bucket] for bucket in order), tensors=specs
        )
        bad = tuple(place.name for place, _, count in tensors if count)
        return Snapshot(manifest, tuple(buckets[bucket] for bucket in order), bad)


def _items(tensors: Iterable[Any]) -> Iterable[Any]:
    """Return the items of `tensors`, which should be pairs. Raises InvalidField if it cannot be iterated over."""
    if isinstance(tensors, Mapping):
        return tensors.items()
    if isinstance(tensors, torch.nn.Module):
        parameters: Iterable[Any] = tensors.parameters()
        return parameters
    if isinstance(tensors, torch.Tensor | str | bytes) or not isinstance(tensors, Iterable):
        raise InvalidField("tensors", _what(tensors), PAIRS)
    return tensors


def _no_pair(item: Any) -> InvalidField | None:
    """Return the error for an item that is no pair of a name and something, else None."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return InvalidField("tensors", _what(item), PAIRS)
    if not isinstance(item[0], str):
        return InvalidField("tensors", _what(item[0]), f"names of 1 to {LONGEST_NAME} characters")
    return None


def _what(given: object) -> str:
    """Describe it by its type, because its contents may be large or on another device."""
    size = f" of {len(given)}" if isinstance(given, tuple | list) else ""
    return f"{type(given).__name__}{size}"
