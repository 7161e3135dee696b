"""A trainer's broadcast as vLLM's servers receive it: one rank, here, for the whole pool.

From: vllm 0.33, distributed/{utils,device_communicators/pynccl,weight_transfer}. The trainer is rank 0 of a TCPStore of
its own, where it puts NCCL's unique id; everybody takes part in one all-reduce; then buffers are broadcast. It imports
torch, so it has no door.
"""

from __future__ import annotations

import base64
import ctypes
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from ....messages.errors import ConfigError, InvalidField, TransferTimeout
from ....producer.skyrl.incoming import Update, read_update

ID_BYTES, ID_KEY = 128, "broadcast_from/0/0"
ID_CLASS = ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
MOST_ID_BYTES = 4096
PACKED_BYTES = 1 << 30
"""vLLM's default of packed_buffer_size_bytes."""
TIMEOUT_S = 120.0


class _IdOnly(pickle.Unpickler):
    """Reads a pickled ncclUniqueId as its bytes. It calls nothing but the function below, whatever is in the pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ID_CLASS:
            return ID_CLASS
        if (module, name) == ("_ctypes", "_unpickle"):
            return _bytes_of
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a unique id")


def _bytes_of(kind: Any, state: Any) -> bytes:
    if kind != ID_CLASS or not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[1], bytes):
        raise pickle.UnpicklingError("this is no unique id")
    return state[1]


def unique_id(pickled: bytes) -> bytes:
    """The 128 bytes of NCCL's unique id in a pickle of vLLM's. Raises InvalidField; nothing of the pickle is run."""
    try:
        if len(pickled) > MOST_ID_BYTES:
            raise pickle.UnpicklingError(f"more than {MOST_ID_BYTES} bytes")
        found = _IdOnly(io.BytesIO(pickled)).load()
    except Exception as error:  # a made-up pickle ends in anything
        raise InvalidField("unique id", f"{len(pickled)} bytes", f"vLLM's pickle of an ncclUniqueId: {error}") from None
    if not isinstance(found, bytes) or len(found) != ID_BYTES:
        raise InvalidField("unique id", type(found).__name__, f"{ID_BYTES} bytes")
    return found


@dataclass(frozen=True, slots=True)
class InitInfo:
    """How to join. encoded: the unique id itself, for trainers that make no store."""

    address: str
    port: int
    rank: int
    world: int
    packed: bool
    encoded: str


def read_init(info: Any) -> InitInfo:
    """Reads the `init_info` of /init_weight_transfer_engine. Raises InvalidField."""
    if not isinstance(info, Mapping):
        raise InvalidField("init_info", info, "an object")
    encoded, address = info.get("nccl_unique_id_b64") or "", info.get("master_address") or ""
    for name, value in (("nccl_unique_id_b64", encoded), ("master_address", address)):
        if not isinstance(value, str) or bool(encoded) == bool(address):
            raise InvalidField(name, value, "a text; exactly one of nccl_unique_id_b64 and master_address")
    numbers = [("rank_offset", 1, 1 << 16), ("world_size", 2, 1 << 16)]
    for name, least, most in numbers + ([] if encoded else [("master_port", 1, 65535)]):
        if type(info.get(name)) is not int or not least <= info[name] <= most:
            raise InvalidField(name, info.get(name), f"a whole number from {least} to {most}")
    if info["rank_offset"] >= info["world_size"]:
        raise InvalidField("rank_offset", info["rank_offset"], f"below world_size={info['world_size']}")
    port = 0 if encoded else info["master_port"]
    return InitInfo(address, port, info["rank_offset"], info["world_size"], bool(info.get("packed")), encoded)


class Receiver:
    """Joined to a trainer's group. All calls block: make them from a thread, one after the other."""

    def __init__(self, info: InitInfo, device: str) -> None:
        """Joins. Raises InvalidField, ConfigError without a GPU or NCCL, TransferTimeout."""
        self.packed, self._device, timeout = info.packed, torch.device(device), timedelta(seconds=TIMEOUT_S)
        try:
            store = None
            if not info.encoded:
                store = TCPStore(info.address, info.port, None, False, timeout, wait_for_workers=False, use_libuv=False)
            if self._device.type == "cpu":
                self._group: Any = _Gloo(store, info, timeout)
            else:
                given = base64.b64decode(info.encoded, validate=True) if store is None else unique_id(store.get(ID_KEY))
                self._group = _Nccl(given, info, self._device)
            self._group.all_reduce(torch.zeros(1, device=self._device))  # all ranks, or all hang
        except ValueError as error:
            raise InvalidField("nccl_unique_id_b64", info.encoded, f"base64: {error}") from None
        except RuntimeError as error:
            where = f"{info.address}:{info.port}" if info.address else "the given id"
            raise TransferTimeout(f"the trainer's group at {where} was not complete: {error}") from error

    def receive(self, info: Any) -> dict[str, Any]:
        """One update's tensors, as SkyRL's request with tensors in it. Raises InvalidField, TransferTimeout."""
        update, packed, most = read_info(info, self.packed)
        shapes = zip(update.dtypes, update.shapes, strict=True)
        try:
            like = [torch.empty(shape, dtype=_dtype(name), device="meta") for name, shape in shapes]
            tensors = list(self._packed(like, most) if packed else map(self._one, like))
        except RuntimeError as error:
            raise TransferTimeout(f"an update of {len(update.names)} tensors did not come: {error}") from error
        named = {"names": list(update.names), "dtypes": list(update.dtypes), "shapes": [*map(list, update.shapes)]}
        return named | {"tensors": tensors}

    def _one(self, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(like, device=self._device)
        if made.numel():
            self._group.broadcast(made)
        return made

    def _packed(self, like: Sequence[torch.Tensor], most: int) -> Iterator[torch.Tensor]:
        for some in flushed([it.nbytes for it in like], most):
            chunk = like[some.start : some.stop]
            buffer = self._one(torch.empty(sum(it.nbytes for it in chunk), dtype=torch.uint8, device="meta"))
            for place, part in zip(chunk, buffer.split([it.nbytes for it in chunk]), strict=True):
                yield part.clone().view(place.dtype).view(place.shape)  # a clone is aligned for its dtype


def read_info(info: Any, packed: bool) -> tuple[Update, bool, int]:
    """The tensors of an `update_info`, whether they are packed, and the bytes of a buffer. Raises InvalidField."""
    if not isinstance(info, Mapping):
        raise InvalidField("update_info", info, "an object with names, dtype_names and shapes")
    update = read_update({"names": info.get("names"), "dtypes": info.get("dtype_names"), "shapes": info.get("shapes")})
    size = info.get("packed_buffer_size_bytes", PACKED_BYTES)
    if type(size) is not int or size < 1:
        raise InvalidField("packed_buffer_size_bytes", size, "a whole number of bytes")
    return update, bool(info.get("packed", packed)), size


def flushed(sizes: Sequence[int], most: int) -> Iterator[range]:
    """The tensors of each buffer: it is flushed after the one that makes it larger than `most` bytes."""
    start = total = 0
    for place, size in enumerate(sizes, 1):
        total += size
        if total > most or place == len(sizes):
            yield range(start, place)
            start, total = place, 0


def _dtype(name: str) -> torch.dtype:
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise InvalidField("dtype_names", name, "names of torch's dtypes, as bfloat16")
    return found


class _Gloo:
    """In host memory, for tests and trainers without GPUs: the group is beside the keys in the trainer's store."""

    def __init__(self, store: Any, info: InitInfo, timeout: timedelta) -> None:
        if store is None:
            raise ConfigError("nccl_unique_id_b64 needs a GPU here: start the gateway with --receiver-device cuda:0")
        self._group = ProcessGroupGloo(PrefixStore("gloo/", store), info.rank, info.world, timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor], AllreduceOptions()).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast([tensor], BroadcastOptions()).wait()


class _Nccl:
    """NCCL itself, by its C interface: torch's groups exchange ids in another way than vLLM's."""

    UINT8, FLOAT32, SUM = 1, 7, 0

    def __init__(self, given: bytes, info: InitInfo, device: torch.device) -> None:
        class Id(ctypes.Structure):
            _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)

        if len(given) != ID_BYTES:
            raise InvalidField("nccl_unique_id_b64", f"{len(given)} bytes", f"{ID_BYTES} bytes")
        try:
            self._nccl = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise ConfigError(f"a broadcast needs NCCL: {error}") from None
        self._comm, self._device = ctypes.c_void_p(), device
        with torch.cuda.device(device):
            self._check(
                self._nccl.ncclCommInitRank(ctypes.byref(self._comm), info.world, Id.from_buffer_copy(given), info.rank)
            )

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"NCCL's error {code}")

    def _pointers(self, tensor: torch.Tensor) -> tuple[Any, Any, Any]:
        at = ctypes.c_void_p(tensor.data_ptr())
        return at, at, ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        one, other, stream = self._pointers(tensor)
        count = ctypes.c_size_t(tensor.numel())
        self._check(self._nccl.ncclAllReduce(one, other, count, self.FLOAT32, self.SUM, self._comm, stream))
        torch.cuda.synchronize(self._device)

    def broadcast(self, tensor: torch.Tensor) -> None:
        one, other, stream = self._pointers(tensor)
        count = ctypes.c_size_t(tensor.nbytes)
        self._check(self._nccl.ncclBroadcast(one, other, count, self.UINT8, 0, self._comm, stream))
        torch.cuda.synchronize(self._device)
