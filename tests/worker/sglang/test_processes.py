"""The processes of an engine, as `multiprocessing` starts them."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection

from rolloutmq.worker.sglang.processes import EngineProcesses


def survive(connection: Connection) -> None:
    signal.raise_signal(signal.SIGINT)
    connection.send("went on")


def test_what_a_terminal_sends_at_ctrl_c_is_the_workers_alone() -> None:
    spawning = multiprocessing.get_context("spawn")
    reader, writer = spawning.Pipe(duplex=False)
    process, processes = spawning.Process(target=survive, args=(writer,)), EngineProcesses()
    try:
        processes.launch(process.start).result()
        writer.close()
        assert reader.recv() == "went on"
    finally:
        processes.close()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in before, "the worker hears it"
