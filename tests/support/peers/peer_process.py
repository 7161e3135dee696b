"""An engine rank without an engine, in a process of its own: receives versions, and fails where a test says.

Questions and answers are dicts over a pipe:
    {"prepare": order}, {"commit": epoch}   the receiver's report, as a dict
    {"digests": True}                       name -> digest of what the model holds
    {"fault": {"at": "broadcast", "number": 2, "how": "SIGKILL"}}   at that call of that function, once

Points, in the order in which they are passed: rendezvous, ready, broadcast, arrived, verify, load, readback. how: a
signal to itself, "raise", or "flip", which changes one bit of what `arrived`, or of what is about to be `readback`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch

from rolloutmq.sync.receive import loading, verify
from rolloutmq.sync.receive.pending import Pending, warm_up
from rolloutmq.sync.receive.receiver import Receiver
from rolloutmq.sync.tensors.digester import digest
from rolloutmq.sync.transfer.order import TransferOrder
from rolloutmq.sync.wire import group, sender_connection

PR_SET_PDEATHSIG = 1


class Linear(torch.nn.Module):
    """Parameters as the checkpoint has them, but that pairs named `x.left`, `x.right` are halves of one `x`."""

    def __init__(self, shapes: dict[str, list[int]], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.at: dict[str, tuple[str, int, int]] = {}
        sizes: dict[str, list[int]] = {}
        for name, shape in shapes.items():
            base = name.removesuffix(".left").removesuffix(".right")
            start = sizes[base][0] if base in sizes else 0
            self.at[name] = base, start, start + shape[0]
            sizes[base] = [start + shape[0], *shape[1:]]
        for base, shape in sizes.items():
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
            self.register_parameter(base.replace(".", "/"), parameter)

    def tensor(self, name: str) -> torch.Tensor:
        """What the model holds of a tensor of the checkpoint."""
        base, start, end = self.at[name]
        return dict(self.named_parameters())[base.replace(".", "/")].data[start:end]

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.tensor(name).copy_(tensor)

    def digests(self) -> dict[str, str]:
        return {name: digest(self.tensor(name)) for name in self.at}


class Fault:
    """Fails this process in the midst of something, once."""

    def __init__(self, model: Linear | None = None) -> None:
        self.at, self.number, self.how, self.calls = "", 0, "SIGKILL", 0
        self._model = model

    def set(self, at: str, number: int, how: str) -> None:
        self.at, self.number, self.how, self.calls = at, number, how, 0

    def here(self, at: str, args: tuple[Any, ...] = ()) -> None:
        if at != self.at:
            return
        self.calls += 1
        if self.calls == self.number:
            self.at = ""
            self._happen(at, args)

    def _happen(self, at: str, args: tuple[Any, ...]) -> None:
        if self.how == "raise":
            raise RuntimeError("CUDA error: an injected failure")
        if self.how != "flip":
            os.kill(os.getpid(), signal.Signals[self.how])
        elif at == "arrived":
            arrival, bucket = args
            flip(next(view for spec, view in arrival.views if spec.bucket == bucket and spec.nbytes))
        else:
            loading, bucket = args
            assert self._model is not None
            flip(self._model.tensor(loading._by_bucket[bucket][0][0]))


def flip(tensor: torch.Tensor) -> None:
    """Change its very last bit, or its first one where bytes are in the other order."""
    tensor.view(-1).view(torch.uint8)[-1:].bitwise_xor_(1)


def watched(fault: Fault, owner: Any, name: str, at: str) -> None:
    """Pass by `fault` before each call of this function."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        fault.here(at, args)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def watch(fault: Fault) -> None:
    """Pass by `fault` at every point of a receiver."""
    watched(fault, sender_connection, "open_group", "rendezvous")
    watched(fault, Pending, "say_ready", "ready")
    watched(fault, group.GlooGroup, "broadcast", "broadcast")
    watched(fault, group.NcclGroup, "broadcast", "broadcast")
    watched(fault, verify.Arrival, "queue", "arrived")
    watched(fault, verify.Arrival, "check", "verify")
    watched(fault, loading.Loading, "load", "load")
    watched(fault, loading.Loading, "queue_readback", "readback")


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(pipe: Connection, told: dict[str, Any]) -> None:
    """Serve until the other end is closed. Ends with its parent."""
    end_with_parent()
    torch.set_num_threads(1)
    device = torch.device(told["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = Linear(told["shapes"], getattr(torch, told["dtype"]), device)
    mine = Receiver(device, staging=told["staging"])
    fault = Fault(model)
    watch(fault)
    warm_up(device)  # seconds on a GPU, and no part of what is examined here
    pipe.send("up")
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            os._exit(0)
        answer: Any = None
        if "prepare" in question:
            answer = dataclasses.asdict(mine.prepare(TransferOrder.from_dict(question["prepare"])))
        elif "commit" in question:
            answer = dataclasses.asdict(mine.commit(question["commit"], model))
        elif "digests" in question:
            answer = model.digests()
        elif "fault" in question:
            fault.set(**question["fault"])
        pipe.send(answer)
