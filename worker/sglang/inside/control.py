"""The scheduler process's end of the socket between the two halves, and the loaders that SGLang calls here.

A thread of its own in the scheduler's process receives a version while the process serves. SGLang's own requests are
answered between two batches, by the one thread that runs the model. So every scheduler process also listens on a unix
socket. The questions are in :mod:`..wire`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections import deque
from typing import Any

import torch

from ....sync.receive import Receiver
from ....sync.tensors import short_turns
from ....sync.transfer import TransferOrder, TransferReport
from ..wire import LINE_LIMIT, refused, socket_path
from . import scheduler, switches

logger = logging.getLogger(__name__)
REMEMBERED = 8
LONGEST_ERROR = 4000
"""Most characters of an error in an answer. The thread that runs the model must not wait for its reader."""


class _Asked:
    """A question that any thread may answer, as long as the asker waits."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock, self._over = threading.Lock(), threading.Event()

    def answer(self, text: str) -> bool:
        """Send the answer. Returns False if nobody waits any more.

        Raises OSError or ValueError if the asker is gone.
        """
        with self._lock:
            if self._over.is_set():
                return False
            self._over.set()
            self._stream.write(text.encode() + b"\n")
            self._stream.flush()
            return True

    def answered(self, timeout_s: float) -> bool:
        """Return whether it is answered within `timeout_s`. If not, no answer is accepted later."""
        if self._over.wait(timeout_s):
            return True
        with self._lock:
            late = not self._over.is_set()
            self._over.set()
            return not late


class ControlServer:
    """The scheduler's end of the channel."""

    def __init__(self, folder: str, rank: int, receiver: Receiver, model_dir: str = "") -> None:
        self.receiver = receiver
        self._model_dir = model_dir
        self._reports: deque[tuple[str, TransferReport]] = deque(maxlen=REMEMBERED)
        self._posted = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_path(folder, rank))
        self._listener.listen()
        threading.Thread(target=self._listen, name="rolloutmq-control", daemon=True).start()

    def post(self, ticket: str, report: TransferReport) -> None:
        """Answer the question about the commit with this ticket, which may come before or after this call."""
        with self._posted:
            self._reports.append((ticket, report))
            self._posted.notify_all()

    def _listen(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="rolloutmq-ask", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer questions until the other end closes. A bad question, or no answer in time, closes the connection."""
        nonsense = contextlib.suppress(OSError, ValueError, TypeError, KeyError)
        with connection, nonsense, connection.makefile("rwb") as stream:
            while line := stream.readline(LINE_LIMIT):
                with short_turns():
                    try:
                        if not self._answer(json.loads(line), _Asked(stream)):
                            return
                    finally:
                        self.receiver.clear_away()

    def _answer(self, question: dict[str, Any], asked: _Asked) -> bool:
        """Answer one question. Returns whether there was an answer in time."""
        if "operate" in question:
            from .operations import Inside  # noqa: PLC0415 – what few engines are ever asked

            return asked.answer(json.dumps(Inside(self.receiver, self._model_dir).answer(dict(question["operate"]))))
        if "commit" in question:
            return self._commit(question, asked)
        if "prepare" in question:
            report: TransferReport | None = self.receiver.prepare(TransferOrder.from_dict(question["prepare"]))
        else:
            report = self._report_of(str(question["committed"]), float(question["timeout_s"]))
        return report is not None and asked.answer(report.to_json())

    def _commit(self, question: dict[str, Any], asked: _Asked) -> bool:
        """Let SGLang call the loader. The thread that calls it also answers, so this one need not be woken."""

        def over(refusal: str) -> None:
            told = self._report_of(str(question["commit"]), 0.0)
            if refusal == scheduler.BUSY:
                report = TransferReport(ok=False, phase="ready", error=refusal)
            elif told is not None and not refusal:
                report = told
            else:
                report = refused(refusal or "it did not call the loader", *([told] if told is not None else ()))
            report = dataclasses.replace(report, error=report.error[:LONGEST_ERROR])
            with contextlib.suppress(OSError, ValueError):  # who asked may be gone
                asked.answer(report.to_json())

        scheduler.set_off(str(question["loader"]), str(question["told"]), over)
        return asked.answered(float(question["timeout_s"]))

    def _report_of(self, ticket: str, timeout_s: float) -> TransferReport | None:
        deadline = time.monotonic() + timeout_s
        with self._posted:
            while True:
                for posted, report in self._reports:
                    if posted == ticket:
                        return report
                if not self._posted.wait(max(0.0, deadline - time.monotonic())):
                    return None


_server: ControlServer | None = None


def listen(folder: str, *, rank: int, ranks: int, gpu: int | None, model: str, staging: Any) -> None:
    """Listen in this process, the scheduler of rank `rank` of `ranks`. gpu: index of its device, None on a CPU."""
    global _server  # noqa: PLW0603 – one scheduler per process, and SGLang calls `commit` by name
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    receiver = Receiver(device, rank=rank, model_dir=model, staging=staging, ranks=ranks)
    _server = ControlServer(folder, rank, receiver, model)


def commit(model: Any, named_tensors: Any) -> None:
    """The second half of a transfer, on the thread that runs the model: `wire.COMMIT_LOADER`.

    Never raises, because an exception here ends the engine. The report goes through the socket.
    """
    ((payload, _),) = list(named_tensors)
    told = json.loads(payload)
    assert _server is not None
    server, epoch, key, ticket = _server, int(told["epoch"]), str(told["version"]), str(told["ticket"])
    try:
        if told["mode"] != "in_place":
            server.post(ticket, server.receiver.commit(epoch, model, idle=scheduler.idle()))
            return
        current = scheduler.current()
        switches.check(current, key)
    except Exception as error:
        logger.exception("version %s cannot be loaded", key)
        server.post(ticket, TransferReport(ok=False, phase="load", error=f"{type(error).__name__}: {error}"))
        return
    report = server.receiver.commit(epoch, model, idle=scheduler.idle())
    if not report.ok:
        server.post(ticket, report)
        return
    try:
        switches.switch(
            current,
            key,
            lambda counts, anew: server.post(ticket, dataclasses.replace(report, switched=counts, anew=tuple(anew))),
        )
    except Exception as error:  # the weights are new, but nobody knows which tokens they sampled
        logger.exception("the switch to version %s could not be counted", key)
        failed = TransferReport(ok=False, phase="load", error=f"{type(error).__name__}: {error}", intact=False)
        server.post(ticket, failed)


def clear_bias(model: Any, named_tensors: Any) -> None:
    """Set the bias of a layer to zero if it has one: `wire.HEAD_LOADER`. Never raises."""
    ((name, _),) = list(named_tensors)
    bias = getattr(getattr(model, name, None), "bias", None)
    if bias is not None:
        bias.data.zero_()
