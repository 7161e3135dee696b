"""Both ends of SGLang's own weight update, which the benchmark compares RolloutMQ's transfers with.

SGLang's engines join a process group (`init_weights_update_group`). They are told, request by request, which tensors
the next broadcasts bring (`update_weights_from_distributed`). `StockGroup` is the rank that sends: its group is built
directly, in the key layout of the engine's `init_custom_process_group`. `StockReceiver` drives the engine.

An engine that waits in a broadcast cannot be interrupted. After a deadline it has to be restarted. Nothing that arrives
is checked. A success says that the copies were queued, not that they are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo

from rolloutmq.messages.errors import ConfigError, TransferTimeout, WeightSyncError
from rolloutmq.sync.wire import Queued, await_broadcasts, local_end, nccl_environment
from rolloutmq.worker.sglang.wire import sglang_request

IN_FLIGHT = 2
"""Broadcasts that are queued on a GPU at a time, beside the one that is being queued."""


StockRequest = dict[str, Any]
"""One `update_weights_from_distributed`, as JSON: names, dtypes (torch's, without the prefix) and shapes of its tensors
in the order of their bytes. bucketed: one broadcast of all their bytes ("flattened_bucket"), else one for each."""
Lot = list[tuple[str, torch.Tensor]]
"""The tensors of one request."""


def split(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int | None) -> Iterator[Lot]:
    """Divide tensors into lots of up to `bucket_bytes`, at least one tensor each. None: all of them in one lot.

    A new lot also begins where a tensor would not lie on a multiple of its own item size, which SGLang refuses.
    """
    lot: Lot = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        full = bucket_bytes is not None and filled + size > bucket_bytes
        if lot and (full or filled % tensor.element_size()):
            yield lot
            lot, filled = [], 0
        lot.append((name, tensor))
        filled += size
    if lot:
        yield lot


def request_of(lot: Sequence[tuple[str, torch.Tensor]], *, bucketed: bool) -> StockRequest:
    """Return the request that announces a lot to the engine."""
    return {
        "names": [name for name, _ in lot],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in lot],
        "shapes": [list(tensor.shape) for _, tensor in lot],
        "bucketed": bucketed,
    }


class StockGroup:
    """Rank 0 of a group whose other ranks are SGLang's tensor-parallel ranks, as `init_weights_update_group` joins it.

    One TCPStore serves any number of groups, under different names.
    """

    def __init__(self, store: Any, name: str, *, world: int, host: str, device: torch.device, timeout_s: float) -> None:
        """host: an address whose route leads to the engines.

        With gloo it blocks until all ranks are there, or raises TransferTimeout after `timeout_s`. With NCCL the first
        broadcast connects.
        """
        self.name = name
        self.device = device
        inner = PrefixStore(f"{name}/", PrefixStore(name, store))
        if device.type == "cuda":
            if not torch.distributed.is_nccl_available():
                raise ConfigError("device='cuda': this PyTorch has no NCCL; allowed: 'cpu'")
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(days=1)  # deadlines are kept by `send`
            with nccl_environment():
                self._group = ProcessGroupNCCL(PrefixStore("cuda/", inner), 0, world, nccl)
            return
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=local_end(host))]
        try:
            self._group = ProcessGroupGloo(PrefixStore("cpu/", inner), 0, world, options)
        except RuntimeError as error:
            raise TransferTimeout(f"{world - 1} engine ranks were not in group {name} in time: {error}") from error

    def send(self, buffers: Iterable[torch.Tensor], timeout_s: float) -> None:
        """Broadcast buffers in order, and wait until all are sent. Blocks. One call at a time.

        Raises TransferTimeout after `timeout_s` seconds, or when a peer is gone. Then the group cannot be used any
        more.
        """
        deadline = time.monotonic() + timeout_s
        aborting = threading.Timer(timeout_s, self.abort)  # ends a connect or a queue that blocks the host
        aborting.daemon = True
        aborting.start()
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                queued: list[Queued] = []
                for buffer in buffers:
                    queued.append(self.broadcast(buffer, deadline))
                    if self.device.type == "cuda" and len(queued) >= IN_FLIGHT:
                        queued[-IN_FLIGHT].wait()
                if self.device.type == "cuda":
                    for broadcast in queued:
                        broadcast.wait()
                    done = torch.cuda.Event()
                    done.record()
                    await_broadcasts(self, done, deadline, lambda: "")
        except RuntimeError as error:
            raise TransferTimeout(f"broadcast in group {self.name} broke off: {error}") from error
        finally:
            aborting.cancel()

    def broadcast(self, buffer: torch.Tensor, deadline: float) -> Queued:
        """Queue one (NCCL, behind the current stream) or send it (gloo). Raises RuntimeError."""
        if self.device.type == "cpu":
            left = max(0.001, deadline - time.monotonic())
            work = self._group.broadcast(buffer, 0)
            work.wait(timedelta(seconds=left))
            over: Queued = work
            return over
        options = BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        queued: Queued = self._group.broadcast([buffer], options)
        return queued

    def abort(self) -> None:
        """End what is under way here. With gloo the engines' connections close. With NCCL the engines wait on and have
        to be restarted."""
        with contextlib.suppress(RuntimeError, AttributeError):
            self._group.abort()


class StockReceiver:
    """One engine's part in one update group. Its methods are called one at a time."""

    def __init__(self, manager: Any, name: str) -> None:
        """manager: SGLang's tokenizer manager. name: the group's, the same at the sender."""
        self.name = name
        self._manager = manager

    async def join(
        self, *, host: str, port: int, rank_offset: int, world: int, backend: Literal["gloo", "nccl"], timeout_s: float
    ) -> None:
        """Join. Tensor-parallel rank r becomes rank `rank_offset + r`. The sender must make its group meanwhile.

        Raises TransferTimeout, after which the engine has to be restarted, or WeightSyncError if SGLang refuses.
        """
        request = sglang_request(
            "InitWeightsUpdateGroupReqInput",
            master_address=host,
            master_port=port,
            rank_offset=rank_offset,
            world_size=world,
            group_name=self.name,
            backend=backend,
        )
        async with _deadline(timeout_s, "the update group was not full"):
            _expect(await self._manager.init_weights_update_group(request, None))

    async def receive(
        self, requests: Sequence[StockRequest], *, timeout_s: float, after: Callable[[], Awaitable[None]]
    ) -> None:
        """Receive one version: every request in turn, then `after()` within the same update session.

        Unless the engine is paused no request may run, because SGLang waits for all. Prefixes cached under older
        weights stay. Success means that the copies are queued, and `after` waits for the rest.

        Raises TransferTimeout or WeightSyncError. Then the weights are partly written.
        """
        async with _deadline(timeout_s, "the update did not come through"), _session(self._manager):
            for request in requests:
                update = sglang_request(
                    "UpdateWeightsFromDistributedReqInput",
                    names=request["names"],
                    dtypes=request["dtypes"],
                    shapes=request["shapes"],
                    group_name=self.name,
                    flush_cache=False,
                    load_format="flattened_bucket" if request["bucketed"] else None,
                )
                _expect(await self._manager.update_weights_from_distributed(update, None))
            await after()


@contextlib.asynccontextmanager
async def _session(manager: Any) -> AsyncIterator[None]:
    """Open SGLang's weight-update session, if the release has one. It is closed in any case."""
    if not hasattr(manager, "begin_weight_update"):
        yield
        return
    _expect(await manager.begin_weight_update(sglang_request("BeginWeightUpdateReqInput"), None))
    try:
        yield
    except asyncio.CancelledError:  # the engine is gone, and would not answer
        raise
    except BaseException:
        await manager.end_weight_update(sglang_request("EndWeightUpdateReqInput"), None)
        raise
    _expect(await manager.end_weight_update(sglang_request("EndWeightUpdateReqInput"), None))


@contextlib.asynccontextmanager
async def _deadline(timeout_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise TransferTimeout(f"{what} within {timeout_s:.1f} s; the engine has to be restarted") from error


def _expect(answer: Any) -> None:
    success, message = (answer[0], answer[1]) if isinstance(answer, tuple) else (answer.success, answer.message)
    if not success:
        raise WeightSyncError(f"SGLang refused: {message}")
