"""Verifies received bytes: on arrival, and again in the engine's parameters after the load.

Both checks are set up once for a layout of buckets. An update then queues one call per bucket for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...messages.errors import DigestMismatch
from ...messages.model import WeightManifest
from ..plan import Bound
from ..tensors import Digester, digests, hex_of, look, unpack


class Arrival:
    """Checks tensors as they arrive in buckets that stay at their addresses."""

    def __init__(self, manifest: WeightManifest, buckets: Sequence[torch.Tensor]) -> None:
        """buckets: one for every bucket of the manifest. Several may be the same memory, used in turn."""
        self.buckets = list(buckets)
        self.views = list(unpack(manifest, self.buckets))
        count, device = len(self.views), buckets[0].device if buckets else torch.device("cpu")
        self._found = torch.zeros(count, dtype=torch.int64, device=device)
        self._nonfinite = torch.zeros(count, dtype=torch.int32, device=device)
        self._ranges = _ranges([spec.bucket for spec, _ in self.views], len(buckets))
        self._digesters = [
            Digester([tensor for _, tensor in self.views[first:last]]) if last > first else None
            for first, last in self._ranges
        ]

    def queue(self, bucket: int) -> None:
        """Queue the digests of a bucket that has arrived, on the current stream."""
        first, last = self._ranges[bucket]
        digester = self._digesters[bucket]
        if digester is not None:
            digester.run(self._found[first:last], self._nonfinite[first:last])

    def check(self, expected: torch.Tensor, *, finite: bool) -> None:
        """Wait for the queued digests and compare them. Raises DigestMismatch with the first wrong tensor's name.

        expected: (tensors,) int64 on the CPU, the version's digests. finite: refuse NaN and Inf, too.
        """
        self._check(0, len(self.views), expected, finite=finite)

    def check_bucket(self, bucket: int, expected: torch.Tensor, *, finite: bool) -> None:
        """Do the same for one bucket whose digests are queued."""
        first, last = self._ranges[bucket]
        self._check(first, last, expected[first:last], finite=finite)

    def _check(self, first: int, last: int, expected: torch.Tensor, *, finite: bool) -> None:
        found, nonfinite = self._found[first:last].cpu(), self._nonfinite[first:last].cpu()
        wrong = (found != expected).nonzero().flatten()
        if len(wrong):
            index = int(wrong[0])
            arrived, sent = (hex_of(values[index : index + 1])[0] for values in (found, expected))
            name = self.views[first + index][0].name
            raise DigestMismatch(f"tensor {name}: digest {arrived}, the trainer sent {sent}{_more(wrong)}")
        if finite and len(bad := nonfinite.nonzero().flatten()):
            raise DigestMismatch(f"tensor {self.views[first + int(bad[0])][0].name}: has NaN or Inf in it{_more(bad)}")


def _more(indices: torch.Tensor) -> str:
    return f" (and {len(indices) - 1} more tensors)" if len(indices) > 1 else ""


def _ranges(buckets: list[int], count: int) -> list[tuple[int, int]]:
    """Return [first, last) of each bucket's tensors, which follow one another in the manifest."""
    ranges, place = [], 0
    for bucket in range(count):
        first = place
        while place < len(buckets) and buckets[place] == bucket:
            place += 1
        ranges.append((first, place))
    if place != len(buckets):
        raise DigestMismatch("the manifest's tensors are not in the order of their buckets")
    return ranges


class Readback:
    """Checks the engine's parameters after the load, bucket by bucket. `Loading` describes its methods."""

    def __init__(self, bounds: Sequence[Bound], arrival: Arrival) -> None:
        index = {spec.name: number for number, (spec, _) in enumerate(arrival.views)}
        whole = [(name, view) for bound in bounds for name, view in bound.whole]
        self._names = [name for name, _ in whole]
        self._order = torch.tensor([index[name] for name in self._names], dtype=torch.int64)
        device = whole[0][1].device if whole else torch.device("cpu")
        self._found = torch.zeros(len(whole), dtype=torch.int64, device=device)
        self._nonfinite = torch.zeros(len(whole), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._fetched = torch.zeros(len(whole), dtype=torch.int64, pin_memory=pinned)
        self._fetched_nonfinite = torch.zeros(len(whole), dtype=torch.int32, pin_memory=pinned)
        self._there: Any = None
        self._digesters: list[tuple[Digester, torch.Tensor, torch.Tensor] | None] = []
        place = 0
        for bound in bounds:
            views = [view for _, view in bound.whole]
            place, first = place + len(views), place
            rows = self._found[first:place], self._nonfinite[first:place]
            self._digesters.append((Digester(views), *rows) if views else None)
        # The manifest has no digest of a slice. It is compared with the slice that arrived and was verified.
        self._partial = [list(bound.partial) for bound in bounds]
        self._slices: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.all_whole = len(set(self._names)) == len(arrival.views) and not any(self._partial)

    def queue(self, bucket: int, count: bool) -> None:
        mine = self._digesters[bucket]
        if mine is not None:
            mine[0].run(mine[1], mine[2] if count else None)
        if partial := self._partial[bucket]:
            held = digests([target for _, _, target in partial])
            came = look([source.to(target.device, target.dtype).contiguous() for _, source, target in partial])
            self._slices.append((bucket, held, *came))
        if bucket == len(self._digesters) - 1:  # the last one
            self._fetched.copy_(self._found, non_blocking=True)
            self._fetched_nonfinite.copy_(self._nonfinite, non_blocking=True)
            if self._found.is_cuda:
                self._there = torch.cuda.current_stream(self._found.device).record_event()

    def check(self, expected: torch.Tensor, *, finite: bool, converted: bool) -> None:
        slices, self._slices = self._slices, []
        if self._there is not None and not self._there.query():  # a wait takes long, even for what is there
            self._there.synchronize()
        self._compare(self._names, self._fetched, expected[self._order])
        if finite and self._fetched_nonfinite.any():
            bad = self._fetched_nonfinite.nonzero().flatten()
            raise DigestMismatch(f"tensor {self._names[int(bad[0])]}: has NaN or Inf in it{_more(bad)}")
        for bucket, held, came, nonfinite in slices:
            names = [name for name, _, _ in self._partial[bucket]]
            self._compare(names, held.cpu(), came.cpu())
            if converted and len(bad := nonfinite.cpu().nonzero().flatten()):
                raise DigestMismatch(
                    f"tensor {names[int(bad[0])]}: has NaN or Inf in it after its conversion{_more(bad)}"
                )

    @staticmethod
    def _compare(names: Sequence[str], held: torch.Tensor, wanted: torch.Tensor) -> None:
        if torch.equal(held, wanted):
            return
        wrong = (held != wanted).nonzero().flatten()
        index = int(wrong[0])
        raise DigestMismatch(
            f"tensor {names[index]}: the engine holds {hex_of(held[index : index + 1])[0]} after the load, "
            f"not {hex_of(wanted[index : index + 1])[0]}{_more(wrong)}"
        )
