"""A redis-server on a machine that can be bent: its wall clock steps, its disk is slow (see host.c)."""

from __future__ import annotations

import mmap
import shlex
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

from rolloutmq.ops.redis.embedded import EmbeddedRedis

SOURCE = Path(__file__).with_name("host.c")
FIELDS = struct.Struct("=qq")


class HostRedis(EmbeddedRedis):
    """An EmbeddedRedis whose clock and disk follow `clock_s` and `flush_s`. Needs a C compiler, as torch does."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory=directory, **settings)
        self._place = directory.parent
        self._control: mmap.mmap | None = None
        self._clock_s, self._flush_s = 0.0, 0.0

    @property
    def clock_s(self) -> float:
        """By how much the server's wall clock is off, in whole seconds."""
        return self._clock_s

    @clock_s.setter
    def clock_s(self, seconds: float) -> None:
        self._clock_s = seconds
        self._write()

    @property
    def flush_s(self) -> float:
        """How long each fsync takes at least."""
        return self._flush_s

    @flush_s.setter
    def flush_s(self, seconds: float) -> None:
        self._flush_s = seconds
        self._write()

    def _write(self) -> None:
        if self._control is None:
            path = self._place / "host"
            path.write_bytes(bytes(FIELDS.size))
            with path.open("r+b") as file:
                self._control = mmap.mmap(file.fileno(), FIELDS.size)
        FIELDS.pack_into(self._control, 0, round(self._clock_s * 1000), round(self._flush_s * 1000))

    def _launch(self, binary: str, port: int, deadline: float) -> None:
        self._write()
        super()._launch(str(self._wrapped(binary)), port, deadline)

    def _wrapped(self, binary: str) -> Path:
        """A command that runs the server with host.c before its C library."""
        library, script = self._place / "host.so", self._place / "redis-server.sh"
        if not library.exists():
            compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
            assert compiler is not None, "a bent host needs a C compiler: cc, gcc or clang"
            subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        preload, control = shlex.quote(str(library)), shlex.quote(str(self._place / "host"))
        command = f"LD_PRELOAD={preload} CHAOS_HOST={control} exec {shlex.quote(binary)}"
        script.write_text(f'#!/bin/sh\n{command} "$@"\n')
        script.chmod(0o700)
        return script
