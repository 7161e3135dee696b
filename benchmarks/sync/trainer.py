"""The trainer's process of `python -m benchmarks sync`: random weights of a shape, and every path to send them by."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from rolloutmq.sync.wire import serve_store

from .child import serve
from .ours import OursSender
from .raw import Raw
from .shapes import SHAPES
from .stock import StockGroup, StockRequest, request_of, split

HOST = "127.0.0.1"


class Trainer:
    """State of the process. Every public method is a call of the parent's."""

    _device: str
    _store: Any
    _flat: torch.Tensor
    _tensors: list[tuple[str, torch.Tensor]]
    raw: Raw
    _stock: StockGroup
    ours: OursSender
    publisher: Any

    def open(self, shape: str, device: str) -> dict[str, Any]:
        """Make the weights, all in one piece of memory, and the rendezvous store."""
        self._device = device
        if device != "cpu":
            torch.cuda.set_device(device)
        self._store = serve_store(HOST)
        names = list(SHAPES[shape].tensors())
        counts = [math.prod(extents) for _, extents in names]
        values = torch.empty(sum(counts), dtype=torch.bfloat16, device=device)
        values.normal_(0.0, 0.02)
        pieces = values.split(counts)
        self._tensors = [(name, piece.view(size)) for (name, size), piece in zip(names, pieces, strict=True)]
        self._flat = values.view(torch.uint8)
        return {"host": HOST, "port": self._store.port, "nbytes": self._flat.numel(), "tensors": len(names)}

    def raw_open(self, **where: Any) -> None:
        """Join the group of raw broadcasts."""
        self.raw = Raw(rank=0, host=HOST, port=0, device=self._device, store=self._store, **where)

    def stock_open(self, **where: Any) -> None:
        """Make the update group. The engines join meanwhile."""
        self._stock = StockGroup(self._store, host=HOST, device=torch.device(self._device), **where)

    def stock_requests(self, bucket_bytes: int | None) -> list[StockRequest]:
        """Return the requests for the engines. bucket_bytes: size of a bucket; None for tensor by tensor."""
        bucketed = bucket_bytes is not None
        return [request_of(lot, bucketed=bucketed) for lot in split(self._tensors, bucket_bytes)]

    def stock_send(self, bucket_bytes: int | None, timeout_s: float) -> None:
        """Send one version."""
        self._stock.send(list(self._stock_buffers(bucket_bytes)), timeout_s)

    def _stock_buffers(self, bucket_bytes: int | None) -> Iterator[torch.Tensor]:
        """Yield flattened buckets.

        They are slices of the weights' memory, so SGLang's path need not copy to make them.
        """
        if bucket_bytes is None:
            yield from (tensor for _, tensor in self._tensors)
            return
        place = 0
        for lot in split(self._tensors, bucket_bytes):
            size = sum(tensor.nbytes for _, tensor in lot)
            yield self._flat[place : place + size]
            place += size

    def ours_open(self, timeout_s: float) -> dict[str, Any]:
        """Pack and digest."""

        def flipped(negate: bool) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._tensors:
                yield name, -tensor if negate else tensor

        self.ours = OursSender(flipped, host=HOST, device=self._device, timeout_s=timeout_s)
        return {"pack_s": self.ours.pack_s, "digest_s": self.ours.digest_s, "buckets": self.ours.buckets}

    def publisher_open(self, redis_url: str, pool: str, timeout_s: float) -> int:
        """Make a WeightPublisher. Returns the last version that it knows."""
        from rolloutmq.sync.publish import WeightPublisher

        self.ours.close()
        self.publisher = WeightPublisher(redis_url, pool, host=HOST, transfer_timeout_s=timeout_s)
        return int(self.publisher.last_version)

    def publish(self, version: int, timeout_s: float) -> dict[str, Any]:
        """Publish and wait for the commit. Returns milliseconds until the call returned, and until the commit."""
        if self._device != "cpu":
            torch.cuda.synchronize()
        began = time.monotonic()
        handle = self.publisher.publish(version, iter(self._tensors))
        returned = time.monotonic()
        report = handle.wait(timeout_s)
        ended = time.monotonic()
        return {
            "state": report.state,
            "workers": len(report.workers),
            "failures": dict(report.failures),
            "call_ms": (returned - began) * 1e3,
            "ms": (ended - began) * 1e3,
        }


if __name__ == "__main__":
    serve(Trainer())
