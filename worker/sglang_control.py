"""A channel to each of SGLang's scheduler processes, beside SGLang's own: for what must not wait its turn there.

Receiving a version takes a thread of its own in the scheduler's process while that serves on; SGLang's requests are
answered between two batches by the one thread that runs the model. So every scheduler process listens on a unix socket
in a folder that only this user can enter. One connection is one question: a line of JSON there, a line of JSON back.

    {"prepare": <TransferOrder>}   the report of the first half, when it is over
    {"send": <TransferOrder>}      how it went, when the version that is held has been sent to others
    {"committed": <ticket>, "timeout_s": s}
                                   the report of the second half, which SGLang's own request with that ticket sets off
    {"commit": <ticket>, "loader": <name>, "told": <text>, "timeout_s": s}
                                   that report, of a commit that this question sets off: of an engine of one rank that
                                   nobody has sent a request
    {"operate": {"operation": <name>, …}}
                                   {"ok": true, "result": {…}} or {"ok": false, "kind": …, "error": …}; see
                                   sglang_ops_inside.py
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ..messages.errors import EngineError, MessageError
from ..sync.peer import send_held
from ..sync.receiver import Receiver
from ..sync.transfer import TransferOrder, TransferReport
from ..sync.turns import short_turns

logger = logging.getLogger(__name__)
LINE_LIMIT = 1 << 26
REMEMBERED = 8


def socket_path(folder: str, rank: int) -> str:
    """Where the scheduler of tensor-parallel rank `rank` listens."""
    return str(Path(folder) / f"rank{rank}")


async def ask(folder: str, rank: int, question: dict[str, Any]) -> TransferReport:
    """Put one question about a transfer to a scheduler process. Raises EngineError if it is not there or hangs up."""
    try:
        return TransferReport.from_json(await _ask(folder, rank, question))
    except MessageError as error:
        raise EngineError(f"the engine's rank {rank} does not answer: {error}") from error


async def operate(folder: str, rank: int, operation: str, **params: Any) -> dict[str, Any]:
    """Have a scheduler process do something else. Raises EngineError, also for what went wrong there."""
    text = await _ask(folder, rank, {"operate": {"operation": operation, **params}})
    try:
        answer: dict[str, Any] = json.loads(text)
        if answer["ok"]:
            return dict(answer["result"])
        raise EngineError(f"{operation}: {answer['kind']}: {answer['error']}")
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the engine's rank {rank} does not answer: {error}") from error


async def _ask(folder: str, rank: int, question: dict[str, Any]) -> str:
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path(folder, rank), limit=LINE_LIMIT)
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        finally:
            writer.close()
        return line.decode(errors="replace")
    except (OSError, ValueError) as error:
        raise EngineError(f"the engine's rank {rank} does not answer: {error}") from error


def refused(why: str, *told: TransferReport) -> TransferReport:
    """SGLang's word that an update did not happen; a loader that had begun (told: by loaders) says otherwise."""
    touched = any(report.ok or not report.intact for report in told)
    return TransferReport(ok=False, phase="load", error=f"SGLang refused the update: {why}", intact=not touched)


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
        """Answer whoever asks, or will ask, for the commit with this ticket."""
        with self._posted:
            self._reports.append((ticket, report))
            self._posted.notify_all()

    def _listen(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="rolloutmq-ask", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        nonsense = contextlib.suppress(OSError, ValueError, TypeError, KeyError)
        with short_turns(), connection, nonsense, connection.makefile("rwb") as stream:
            question = json.loads(stream.readline(LINE_LIMIT))
            if "operate" in question:
                from .sglang_ops_inside import Inside  # noqa: PLC0415 – what few engines are ever asked

                answer = Inside(self.receiver, self._model_dir).answer(dict(question["operate"]))
                stream.write(json.dumps(answer).encode() + b"\n")
                return
            if "prepare" in question:
                report = self.receiver.prepare(TransferOrder.from_dict(question["prepare"]))
            elif "send" in question:
                report = send_held(self.receiver, TransferOrder.from_dict(question["send"]))
            else:
                found = self._commit(question) if "commit" in question else self._committed(question)
                if found is None:  # who asked hears that from the silence
                    return
                report = found
            stream.write(report.to_json().encode() + b"\n")

    def _commit(self, question: dict[str, Any]) -> TransferReport | None:
        """Have SGLang call the loader; None if that is not over in time."""
        from . import sglang_scheduler  # noqa: PLC0415 – only in a scheduler's process

        over: SimpleQueue[str] = SimpleQueue()
        sglang_scheduler.set_off(str(question["loader"]), str(question["told"]), over.put)
        try:
            refusal = over.get(timeout=float(question["timeout_s"]))
        except Empty:
            return None
        if refusal == sglang_scheduler.BUSY:
            return TransferReport(ok=False, phase="ready", error=refusal)
        told = self._report_of(str(question["commit"]), 0.0)
        if told is not None and not refusal:
            return told
        return refused(refusal or "it did not call the loader", *([told] if told is not None else ()))

    def _committed(self, question: dict[str, Any]) -> TransferReport | None:
        return self._report_of(str(question["committed"]), float(question["timeout_s"]))

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
    """Start to listen in this process, the scheduler of one of so many ranks; gpu: its device, or None on a CPU."""
    global _server  # noqa: PLW0603 – one scheduler per process, and SGLang calls `commit` by name
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    receiver = Receiver(device, rank=rank, model_dir=model, staging=staging, alone=ranks == 1)
    _server = ControlServer(folder, rank, receiver, model)


def commit(model: Any, named_tensors: Any) -> None:
    """SGLang's weight-loader hook: the second half of a transfer, on the thread that runs the model.

    The one tensor's name is JSON: {"epoch", "mode", "version", "stock", "ticket"}. Never raises, because an exception
    here ends the engine; what happened goes through the channel.
    """
    from . import sglang_scheduler  # noqa: PLC0415 – only in a scheduler's process

    ((payload, _),) = list(named_tensors)
    told = json.loads(payload)
    assert _server is not None
    server, epoch, key, ticket = _server, int(told["epoch"]), str(told["version"]), str(told["ticket"])
    if stock := told.get("stock", ""):
        server.post(ticket, server.receiver.check_stock(epoch, model, loaded=stock == "check"))
        return
    try:
        if told["mode"] != "in_place":
            server.post(ticket, server.receiver.commit(epoch, model, idle=sglang_scheduler.idle()))
            return
        scheduler = sglang_scheduler.current()
        sglang_scheduler.check(scheduler, key)
    except Exception as error:
        logger.exception("version %s cannot be loaded", key)
        server.post(ticket, TransferReport(ok=False, phase="load", error=f"{type(error).__name__}: {error}"))
        return
    report = server.receiver.commit(epoch, model, idle=sglang_scheduler.idle())
    if not report.ok:
        server.post(ticket, report)
        return
    try:
        sglang_scheduler.switch(
            scheduler, key, lambda counts: server.post(ticket, dataclasses.replace(report, switched=counts))
        )
    except Exception as error:  # the weights are new, but which tokens they sampled cannot be told
        logger.exception("the switch to version %s could not be counted", key)
        failed = TransferReport(ok=False, phase="load", error=f"{type(error).__name__}: {error}", intact=False)
        server.post(ticket, failed)
