"""The memory in which a trainer keeps a copy of a version: on its GPU, or in pinned host memory."""

from __future__ import annotations

from typing import Any, get_args

import torch

from ...messages.errors import InvalidField
from ...messages.model import Keep
from ..tensors import ALIGN, Copies, Place, look, padded

MARGIN = 0.1
"""Share of a GPU's memory that "auto" leaves free for the trainer."""
_WORD = 8
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Buckets:
    """The buckets of one version, filled one after the other on one device. They stay there, or move to the host.

    Everything is queued on the current stream of that device.
    full: flat uint8 tensors. ready: a torch.cuda.Event after which they are filled. It is None before `close`, and for
    buckets that are on the CPU from the start.
    """

    def __init__(self, keep: Keep, expected: int = 0) -> None:
        """keep: see PackedWeights. expected: bytes of the whole version, 0 if they are not known.

        Raises InvalidField for another `keep`.
        """
        if keep not in get_args(Keep):
            raise InvalidField("keep", keep, "'auto', 'device' or 'host'")
        self.full: list[torch.Tensor] = []
        self.ready: Any = None
        self._places: list[list[Place]] = []
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._keep = keep
        self._expected = expected
        self._granted = 0
        self._device: torch.device | None = None

    def add(self, tensors: list[tuple[Place, torch.Tensor]]) -> None:
        """Copy tensors into a new bucket. They come in the order of their places."""
        devices = [tensor.device for _, tensor in tensors if tensor.is_cuda]
        if self._device is None:
            self._device = devices[0] if devices else torch.device("cpu")
        last = tensors[-1][0]
        size = last.offset + padded(last.nbytes)
        if self._device.type == "cuda" and self._keep == "auto":
            alone = all(device == self._device for device in devices)
            if not alone or not self._room(self._device, size):
                self._keep = "host"
                self._move()
        bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        fill(bucket, tensors)
        self.full.append(bucket)
        self._places.append([place for place, _ in tensors])
        if self._keep == "host":
            self._move()

    def _room(self, device: torch.device, size: int) -> bool:
        """Whether another bucket leaves MARGIN of the GPU's memory free. If the total is known, it is asked once."""
        if self._granted < size:
            wanted = max(size, self._expected)
            free, total = torch.cuda.mem_get_info(device)
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch has it for us
            if free + unused - wanted <= MARGIN * total:
                return False
            self._granted = wanted
        self._granted -= size
        return True

    def _move(self) -> None:
        """Move buckets on the GPU to the host. Their digests are made first, because they cost little on the GPU."""
        for index, bucket in enumerate(self.full):
            if bucket.is_cuda:
                self._found.append(_digests([self._places[index]], [bucket]))
                host = torch.empty(bucket.numel(), dtype=torch.uint8, pin_memory=True)
                self.full[index] = host.copy_(bucket, non_blocking=True)

    def close(self) -> None:
        """Say that nothing more is added. Sets `ready`."""
        if self._device is not None and self._device.type == "cuda":
            self.ready = torch.cuda.current_stream(self._device).record_event()

    def digests(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return digests, (n,) int64, and counts of NaN and Inf, (n,) int32, of the n tensors, on the CPU.

        Waits for them. For buckets on a GPU they are computed on the calling thread's current stream.
        """
        if self.ready is not None and self.full[0].is_cuda:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self.ready)
            for bucket in self.full:
                bucket.record_stream(stream)
        elif self.ready is not None:
            self.ready.synchronize()
        with torch.inference_mode(False), torch.no_grad():
            found = self._found or [_digests(self._places, self.full)]
            return torch.cat([values for values, _ in found]).cpu(), torch.cat([counts for _, counts in found]).cpu()


def release_host_memory() -> None:
    """Give pinned memory back that no version uses any more.

    Without this call torch keeps it for the next version, because pinning 16 GB takes seconds.
    """
    if torch.cuda.is_initialized():
        torch._C._host_emptyCache()


def _digests(places: list[list[Place]], buckets: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return digests, (n,) int64, and counts of NaN and Inf, (n,) int32, of the buckets' tensors, on their device."""
    views = [place.view(bucket) for bucket, inside in zip(buckets, places, strict=True) for place in inside]
    return look(views)


def fill(bucket: torch.Tensor, tensors: list[tuple[Place, torch.Tensor]]) -> None:
    """Copy tensors bit by bit to their places in a flat uint8 bucket. The gaps between them become zero.

    If everything is on one CUDA device, the copies are queued on its current stream and the host does not wait.
    """
    words = bucket.view(torch.int64)
    gaps: list[torch.Tensor] = []
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for place, tensor in tensors:
        start, end = place.offset, place.offset + place.nbytes
        if place.nbytes % ALIGN:
            gaps.append(bucket[end : start + padded(place.nbytes)])
        if not place.nbytes:
            continue
        if place.dtype.is_complex or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()  # noqa: PLW2901
        if place.nbytes % _WORD == 0 and _in_words(tensor):
            pairs.append((words[start // _WORD : end // _WORD], tensor.view(-1).view(torch.int64)))
        else:
            size = place.dtype.itemsize
            same = _SAME_SIZE[size]  # a copy of integers keeps every bit, and torch has it for every size
            pairs.append((bucket[start:end].view(same).view(place.shape), tensor.view(same)))
    Copies(pairs).run()
    if gaps:
        torch._foreach_zero_(gaps)


def _in_words(tensor: torch.Tensor) -> bool:
    """Whether the bytes are in row-major order and can be copied eight at a time."""
    offset = tensor.storage_offset() * tensor.element_size()
    return bool(tensor.is_contiguous() and offset % _WORD == 0 and tensor.data_ptr() % _WORD == 0)
