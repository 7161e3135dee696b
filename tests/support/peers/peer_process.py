"""An engine rank without an engine, in a process of its own: receives versions, and fails where a test says.

Questions and answers are dicts over a pipe:
    {"prepare": order}, {"commit": epoch}   the receiver's report, as a dict
    {"digests": True}                       name -> digest of what the model holds
    {"address": True}                       where others may take its version, "" if nowhere
    {"group": True}, {"leave": True}        name of the cell's group that it is in, "" for none; leaves it
    {"fault": {"at": "broadcast", "number": 2, "how": "SIGKILL"}}   at that call of that function, once

Points: join, then rendezvous, connect, ready and broadcast in a cell or fetch of each bucket, arrived, verify, load,
readback; and serve and amid, the beginning and the middle of a bucket that others take from here. how: a signal to
itself, "raise", "hold" until it is let go, "flip", which changes one bit of what `arrived`, or of what is about to be
`readback`, or "lie" to `serve` other bytes from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from threading import Event
from typing import Any

import torch

from rolloutmq.sync.receive import loading, verify
from rolloutmq.sync.receive.receiver import Receiver
from rolloutmq.sync.receive.state import RankState, warm_up
from rolloutmq.sync.receive.ways import Way
from rolloutmq.sync.tensors.digester import digest
from rolloutmq.sync.transfer.order import TransferOrder
from rolloutmq.sync.wire import frames, group, lines, pull, shelf

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


class Stream:
    """Everything is over at once, as the host's work is."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return True


def without_streams(patch: Any = setattr) -> None:
    """Let an engine on a CPU be in a cell: gloo's work is over when a call returns, on no stream."""
    patch(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    patch(RankState, "streams", lambda _: (Stream(), Stream()))


class Fault:
    """Fails this process in the midst of something, once. holds: it does so at this moment, until `free`."""

    def __init__(self, model: Linear | None = None) -> None:
        self.at, self.number, self.how, self.calls = "", 0, "SIGKILL", 0
        self.holds, self.free = Event(), Event()
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
        if self.how == "hold":
            self.holds.set()
            self.free.wait()
        elif self.how == "lie":
            offer, honest = args[0], args[0]._bucket
            offer._bucket = lambda index: flipped(honest(index))
        elif self.how != "flip":
            # To this thread: a signal to the process stops another one first, and this one goes on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.Signals[self.how])
        elif at == "arrived":
            arrival, bucket = args
            flip(next(view for spec, view in arrival.views if spec.bucket == bucket and spec.nbytes))
        else:
            loading, bucket = args
            flip(self._model.tensor(loading._by_bucket[bucket][0][0]))


def flip(tensor: torch.Tensor) -> None:
    """Change its very last bit, or its first one where bytes are in the other order."""
    tensor.view(-1).view(torch.uint8)[-1:].bitwise_xor_(1)


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    flip(copy)
    return copy


def watched(fault: Fault, owner: Any, name: str, at: str) -> None:
    """Pass by `fault` before each call of this function."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        fault.here(at, args)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def watch(fault: Fault) -> None:
    """Pass by `fault` at every point of a receiver."""
    watched(fault, lines.Lines, "join", "join")
    watched(fault, lines, "open_group", "rendezvous")
    watched(fault, group.GlooGroup, "__init__", "connect")
    watched(fault, group.NcclGroup, "__init__", "connect")
    watched(fault, Way, "say_ready", "ready")
    watched(fault, group.GlooGroup, "broadcast", "broadcast")
    watched(fault, group.NcclGroup, "broadcast", "broadcast")
    watched(fault, pull.SourceConnection, "fetch", "fetch")
    watched(fault, verify.Arrival, "queue", "arrived")
    watched(fault, verify.Arrival, "check", "verify")
    watched(fault, verify.Arrival, "check_bucket", "verify")
    watched(fault, loading.Loading, "load", "load")
    watched(fault, loading.Loading, "queue_readback", "readback")
    watch_sender(fault)


def watch_sender(fault: Fault) -> None:
    """Do the same for what is sent to those who take it."""
    watched(fault, shelf.Offer, "send", "serve")
    say = frames.Talk.say_bucket

    def in_halves(self: frames.Talk, nbytes: int, pieces: Iterable[memoryview]) -> None:
        def halves() -> Iterator[memoryview]:
            for piece in pieces:
                half = len(piece) // 2
                yield piece[:half]
                fault.here("amid")
                yield piece[half:]

        say(self, nbytes, halves())

    frames.Talk.say_bucket = in_halves  # type: ignore[method-assign]


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(pipe: Connection, told: dict[str, Any]) -> None:
    """Serve until the other end is closed. Ends with its parent."""
    end_with_parent()
    torch.set_num_threads(1)
    device = torch.device(told["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        without_streams()
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
        elif "address" in question:
            answer = mine.state.lines.address
        elif "group" in question:
            answer = mine.state.lines.group.name if mine.state.lines.group is not None else ""
        elif "leave" in question:
            mine.state.lines.drop_group()
        elif "fault" in question:
            fault.set(**question["fault"])
        pipe.send(answer)
        mine.clear_away()
