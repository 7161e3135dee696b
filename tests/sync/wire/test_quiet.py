"""torch's own log, which prints a stack for each connection that breaks."""

from __future__ import annotations

import contextlib
import ctypes
import socket
from datetime import timedelta
from threading import Timer
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore

from rolloutmq.sync.wire import quiet


def level() -> int:
    return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level").value


def trouble() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        TCPStore("127.0.0.1", closed.getsockname()[1], is_master=False, timeout=timedelta(seconds=0.1))


def test_torch_prints_nothing_inside(capfd: pytest.CaptureFixture[str]) -> None:
    before = level()
    with contextlib.suppress(DistNetworkError), quiet.quiet_torch():
        with quiet.quiet_torch():
            assert level() == quiet.FATAL
        assert level() == quiet.FATAL
        trouble()
    assert level() == before
    assert capfd.readouterr().err == ""
    with pytest.raises(DistNetworkError):
        trouble()
    assert "frame #" in capfd.readouterr().err  # so that it is `quiet_torch` that kept it away


def test_torch_prints_nothing_until_the_time_is_over(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[Timer] = []

    def made(*args: Any) -> Timer:
        timers.append(Timer(*args))
        timers[0].start = lambda: None  # type: ignore[method-assign]  # its time is over when this test says so
        return timers[0]

    monkeypatch.setattr(quiet, "Timer", made)
    before = level()
    quiet.quiet_torch_for_a_while()
    with pytest.raises(DistNetworkError):
        trouble()
    assert level() == quiet.FATAL
    timers[0].function(*timers[0].args)
    assert level() == before
    assert capfd.readouterr().err == ""
