"""Taking a version out of the trainer: copies of its tensors in flat buckets, while training goes on."""

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
    """A copy of (name, tensor) pairs; digests are computed later, by whoever has the time.

    When the constructor returns every tensor is copied, on CUDA as far as work queued on the current stream sees it:
    training may go on changing the originals there. The host does not wait for the GPU unless tensors on the CPU are to
    be copied to it, and does no work per tensor on the GPU besides preparing views.

    Memory beside the copy: at most one bucket and one gathered tensor, whatever the size of the model.

    Args:
        version: number of the version.
        tensors: (name, tensor) pairs: tensors and parameters on CPU or CUDA, of any strided layout and any dtype, also
            FSDP2's and tensor parallel DTensors, which are gathered one at a time. Gathering is a collective: every
            rank of the trainer makes a PackedWeights, with the same names in the same order and the same `rename`.
        bucket_bytes: a bucket is no larger, unless for a single tensor.
        keep: where the copy lives. "device": on the CUDA device of the first bucket's tensors (CPU, if they are there).
            "host": in host memory, pinned where the tensors come from a GPU; takes the GPU's copy engine as long as its
            bus needs, on the current stream. "auto": on the device as long as 10% of its memory stay free and all
            CUDA tensors are on one; else on the host.
        rename: the name under which a tensor is sent, or None for one that is not; see `strip_wrappers`.
        dtype: torch's name of the dtype that floats of 16 bits and more are rounded to before they are digested and
            sent; None leaves every tensor as it is.
        leader: False on ranks that only take part in the gathers: nothing is copied, `snapshot` is not for them.
        like: `places` of an earlier version, so that what is the same is not worked out and checked again.

    Raises InvalidField, on every rank alike and after the last gather, so that no rank waits for another: for what is
    no pair, a name that is no string or comes twice, a tensor that is not dense or is a shard, and if there is nothing
    to take.
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
                    gathered(part)  # as another rank may do, which then waits for this one
                continue
            given, tensor = item
            name = given if rename is None else rename(given)
            if name is None:
                continue
            whole = gathered(tensor)
            del item, tensor  # nothing of it lives while the next one is made
            try:
                if failure is None:  # else: the other ranks gather what is left, and cannot without this one
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
        """What waits for its bucket to be full, now with `tensor`."""
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
        """Flat uint8 tensors, each as large as `places.sizes` says; none where leader=False."""
        return tuple(self._buckets.full) if self._buckets is not None else ()

    @property
    def ready(self) -> Any:
        """A torch.cuda.Event after which the buckets are filled; None if they are already."""
        return self._buckets.ready if self._buckets is not None else None

    def snapshot(self) -> Snapshot:
        """With the digests: what is sent, and what receivers compare with. Waits until they are there.

        May be called in any thread; on CUDA the digests are computed on that thread's current stream, after `ready`.
        NaN and Inf are counted, not judged. Raises ConfigError where leader=False.
        """
        if self._buckets is None:
            raise ConfigError("leader=False: this rank has no copy to send")
        values, nonfinite = self._buckets.digests()
        sizes, buckets = self.places.sizes, self.buckets
        # The smallest comes last: what is done with the last bucket to arrive is done while nothing else is on its way.
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
    """What should be pairs. Raises InvalidField for what has nothing in it that another rank might gather."""
    if isinstance(tensors, Mapping):
        return tensors.items()
    if isinstance(tensors, torch.nn.Module):
        parameters: Iterable[Any] = tensors.parameters()
        return parameters
    if isinstance(tensors, torch.Tensor | str | bytes) or not isinstance(tensors, Iterable):
        raise InvalidField("tensors", _what(tensors), PAIRS)
    return tensors


def _no_pair(item: Any) -> InvalidField | None:
    """What is wrong with it, if it is no pair of a name and something."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return InvalidField("tensors", _what(item), PAIRS)
    if not isinstance(item[0], str):
        return InvalidField("tensors", _what(item[0]), f"names of 1 to {LONGEST_NAME} characters")
    return None


def _what(given: object) -> str:
    """Its kind: what it holds may be large, or on another device."""
    size = f" of {len(given)}" if isinstance(given, tuple | list) else ""
    return f"{type(given).__name__}{size}"
