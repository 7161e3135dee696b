"""The tool `python`: a program of the model's in a process of its own, with limits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from ...messages.errors import ConfigError, InvalidField

MAX_CODE = 1 << 16
WORK, PROGRAM, PRINTED = "work", "program", "printed"
_LAUNCHER = Path(__file__).with_name("launcher.py")


class PythonTool:
    """Runs `code` with the standard library of this Python, and returns what it printed.

    The program has limits of CPU time, wall-clock time, memory, open files, and of the size of a file that it writes,
    its output included. It cannot start processes or threads, except where the trainer runs as root. Its folder is new
    and empty, and is deleted afterwards. It inherits no environment variables. Its process group is killed at the end.

    With `namespaces` it has a network and processes of its own: it reaches no other host and no process outside. That
    needs a Linux that permits user namespaces, which many containers do not; ConfigError says so. Without them it has
    this host's network, and a process of it that leaves its group outlives it.

    It is no sandbox against an attacker: it reads every file that this user may read. Put secrets elsewhere, or run the
    trainer in a container.

    timeout: seconds. cpu_s: CPU seconds. memory: bytes of address space. file_size: bytes. output: characters returned.
    """

    SCHEMA: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs a Python program and returns what it prints.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The program; print what you want to know"}},
                "required": ["code"],
            },
        },
    }

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        cpu_s: int = 5,
        memory: int = 512 << 20,
        file_size: int = 1 << 20,
        output: int = 4000,
        namespaces: bool = True,
    ) -> None:
        for name, value in (("timeout", timeout), ("cpu_s", cpu_s), ("memory", memory), ("file_size", file_size)):
            if value <= 0:
                raise InvalidField(name, value, "above 0")
        if namespaces and not namespaces_permitted():
            raise ConfigError(
                "namespaces=True: this host permits no user namespaces, so a program cannot be kept from the network; "
                "namespaces=False runs it with this host's network"
            )
        self._timeout, self._output = timeout, output
        self._limits = [str(int(it)) for it in (cpu_s, memory, file_size, namespaces)]

    async def __call__(self, code: str) -> str:
        """What it printed, errors included. Raises ValueError."""
        if not isinstance(code, str) or len(code) > MAX_CODE:
            raise ValueError(f"code: a text of at most {MAX_CODE} characters")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as outer:
            with _files(Path(outer), code) as (program, printed):
                process = await asyncio.create_subprocess_exec(
                    *_command(self._limits), stdin=program, stdout=printed, stderr=printed, env={},
                    cwd=Path(outer, WORK), start_new_session=True,
                )  # fmt: skip
            try:
                async with asyncio.timeout(self._timeout):
                    await process.wait()
            except TimeoutError:
                raise ValueError(f"it did not end within {self._timeout:g} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            text = _start_of(Path(outer, PRINTED), 4 * self._output)
        if process.returncode:
            text += f"\n[ended with {process.returncode}]"
        return text if len(text) <= self._output else f"{text[: self._output]}\n[cut]"


@contextlib.contextmanager
def _files(folder: Path, code: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The program's standard input and its output."""
    (folder / WORK).mkdir()
    (folder / PROGRAM).write_bytes(code.encode(errors="replace"))
    with (folder / PROGRAM).open("rb") as program, (folder / PRINTED).open("wb") as printed:
        yield program, printed


def _start_of(file: Path, nbytes: int) -> str:
    with file.open("rb") as opened:
        return opened.read(nbytes).decode(errors="replace")


def _command(limits: list[str]) -> list[str]:
    return [sys.executable, "-I", "-S", str(_LAUNCHER), *limits]


@functools.cache
def namespaces_permitted() -> bool:
    """Whether a process of this user may have namespaces of its own. Asked once: it starts a process."""
    ran = subprocess.run(
        _command(["5", str(1 << 30), "1000", "1"]), input=b"", capture_output=True, check=False, env={}
    )
    return ran.returncode == 0
