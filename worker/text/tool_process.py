"""Reads calls of tools in a process of its own, so that no text keeps the worker from renewing its lease.

A parser may take any time on what a model wrote, and Python's own (`ast`, `re`) let no other thread run meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

from ...messages.model import GenerateJob, ToolCall
from .tool_calls import calls_in, unread

log = logging.getLogger(__name__)
READ_S = 10.0
"""Seconds that a text may take. Then the process is ended, and the sample has one invalid call that says so."""
START_S = 120.0
"""Seconds that the process may take to start and to import SGLang, if a parser of SGLang is asked for."""
LONGEST = 256 << 20
"""Bytes of an answer."""


class ToolReader:
    """Reads the tool calls of one worker's samples.

    The process starts with the first job that has tools. It is replaced after a text that took too long.
    """

    def __init__(self) -> None:
        self._process: Process | None = None
        self._ready: set[str] = set()  # parsers that the process has imported
        self._turn = asyncio.Lock()
        self._warming: asyncio.Task[tuple[ToolCall, ...]] | None = None

    def warm(self, job: GenerateJob) -> None:
        """Start the process, and its imports, before there is a text of this job."""
        if job.tool_parser not in self._ready and (self._warming is None or self._warming.done()):
            self._warming = asyncio.create_task(self.calls_in("", job, 0))

    async def calls_in(self, text: str, job: GenerateJob, sample: int) -> tuple[ToolCall, ...]:
        """See `tool_calls.calls_in`. What cannot be read in time is one invalid call."""
        asked = {
            "text": text,
            "sample": sample,
            "job": job.model_dump(include={"id", "tools", "tool_parser"}, mode="json"),
        }
        async with self._turn:
            try:
                if job.tool_parser not in self._ready:
                    async with asyncio.timeout(START_S):
                        await self._ask({**asked, "text": ""})
                    self._ready.add(job.tool_parser)
                async with asyncio.timeout(READ_S):
                    found = await self._ask(asked)
                return tuple(ToolCall(**call) for call in found)
            except (TimeoutError, OSError, EOFError, ValueError) as error:
                await self.close()
                why = "it took too long" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
                log.warning("calls in sample %d of job %s cannot be read: %s", sample, job.id, why)
                return unread(why, text, job, sample)
            except BaseException:  # cancelled: an answer that nobody awaits would be taken for the next one's
                await self.close()
                raise

    async def _ask(self, asked: dict[str, Any]) -> Any:
        if self._process is None:
            environment = {
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            command = (sys.executable, "-c", f"from {__name__} import serve; serve()")
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        message = json.dumps(asked).encode()
        stdin.write(len(message).to_bytes(4, "little") + message)
        await stdin.drain()
        size = int.from_bytes(await stdout.readexactly(4), "little")
        if size > LONGEST:
            raise ValueError(f"an answer of {size} bytes")
        return json.loads(await stdout.readexactly(size))

    async def close(self) -> None:
        """End the process. The next text starts another one."""
        process, self._process = self._process, None
        self._ready.clear()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def serve() -> None:
    """The process: answers until its worker is gone."""
    answers, questions = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # what a library prints is no answer
    while len(header := questions.read(4)) == 4:
        asked = json.loads(questions.read(int.from_bytes(header, "little")))
        job = GenerateJob(token_ids=[0], **asked["job"])
        _import_parser(job.tool_parser)
        message = json.dumps(
            [call.model_dump(mode="json") for call in calls_in(asked["text"], job, asked["sample"])]
        ).encode()
        answers.write(len(message).to_bytes(4, "little") + message)
        answers.flush()


def _import_parser(name: str) -> None:
    if name != "function":
        from ..cpu_support import prepare_engine  # noqa: PLC0415 – torch

        prepare_engine()
