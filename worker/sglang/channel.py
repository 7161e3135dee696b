"""The worker's end of the sockets to SGLang's scheduler processes. The questions are in :mod:`.wire`.

Connections are kept open. A new connection, and a thread to serve it, takes a millisecond on hosts where processes wake
slowly, and an update asks twice.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ...messages.errors import EngineError, InvalidField, MessageError
from ...sync.transfer import TransferReport
from .wire import LINE_LIMIT, socket_path


class Channel:
    """Asks the schedulers that listen in `folder`, any number of questions at a time. For one event loop."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._idle: dict[int, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._closed = False

    async def ask(self, rank: int, question: dict[str, Any]) -> TransferReport:
        """Put one question about a transfer. Raises EngineError if the scheduler is not there or hangs up."""
        try:
            return TransferReport.from_json(await self._ask(rank, question))
        except MessageError as error:
            raise EngineError(f"the engine's rank {rank} does not answer: {error}") from error

    async def operate(self, rank: int, operation: str, **params: Any) -> dict[str, Any]:
        """Have a scheduler process run an operation, and return its result. Raises EngineError, also for its errors,
        and InvalidField for a parameter that the process refuses."""
        text = await self._ask(rank, {"operate": {"operation": operation, **params}})
        try:
            answer: dict[str, Any] = json.loads(text)
            if answer["ok"]:
                return dict(answer["result"])
            if "invalid" in answer:
                raise InvalidField(*answer["invalid"])
            raise EngineError(f"{operation}: {answer['kind']}: {answer['error']}")
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"the engine's rank {rank} does not answer: {error}") from error

    def close(self) -> None:
        """Close idle connections. Questions under way are still answered."""
        self._closed = True
        for _, writer in [each for idle in self._idle.values() for each in idle]:
            writer.close()
        self._idle.clear()

    async def _ask(self, rank: int, question: dict[str, Any]) -> str:
        idle = self._idle.setdefault(rank, [])
        writer = None
        try:
            if idle:
                reader, writer = idle.pop()
            else:
                reader, writer = await asyncio.open_unix_connection(socket_path(self.folder, rank), limit=LINE_LIMIT)
            writer.write(json.dumps(question).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
            if line.endswith(b"\n") and not self._closed:
                idle.append((reader, writer))
                writer = None
            return line.decode(errors="replace")
        except (OSError, ValueError) as error:
            raise EngineError(f"the engine's rank {rank} does not answer: {error}") from error
        finally:
            if writer is not None:  # closed, or nobody waits for its answer any more
                writer.close()
