"""Commands to workers, and an answer from each.

A command is a record in Redis. Its time to live is its deadline, and it names the workers that were alive when it was
sent. The bell announces it. A worker takes a command once, however often it hears of it, and only before the deadline:
nobody carries out a command that nobody waits for. Answers are fields of a second record.
"""

from __future__ import annotations

import asyncio
import getpass
import itertools
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from ..codec import decode, encode
from ..errors import InvalidField, MessageError
from ..ids import new_id
from ..model import Command, CommandReply
from ..redis import Keys, text
from ..scripts import Scripts, calls
from .clock import living_workers

ANSWERS_TTL_S = 600
"""How long answers are kept after the first one."""
MAX_ANSWER_BYTES = 16 << 20
MOST_ANSWERS_BYTES = 256 << 20
"""Bytes of all answers of ANSWERS_TTL_S. So Redis has twice as many of them at most."""
FIRST_LOOK_S = 0.005
SLOWEST_LOOK_S = 0.2
LOOK_FOR_THEM_S = 1.0
GONE_S = 3.0
"""How long to wait for a worker that has gone: one that lost its connection to Redis may come back."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A command that was sent. workers: those that were alive then. They, and no others, answer."""

    command: Command
    workers: tuple[str, ...]
    deadline: float  # of time.monotonic


def _whoami() -> str:
    """User and host of this process, for people."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:128]


class CommandSender:
    """The sender's side."""

    def __init__(self, redis: Redis, pool: str) -> None:
        # redis-py types a reply as the union of what every mode and protocol could give; ours are RESP2 and bytes.
        self._redis: Any = redis
        self.keys = Keys(pool)
        self._scripts = Scripts(redis, self.keys)

    async def send(
        self, action: str, params: dict[str, Any] | None = None, *, worker_id: str = "", timeout_s: float = 30.0
    ) -> Sent:
        """Send it to the workers that are alive now. Raises InvalidField, RedisUnavailable or RedisRefused."""
        command = Command.build(
            id=new_id(),
            action=action,
            timeout_s=timeout_s,
            sender=_whoami(),
            **({"worker_id": worker_id} if worker_id else {}),
            **({"params": params} if params else {}),
        )
        deadline = time.monotonic() + timeout_s
        lasts_ms = max(1, round(timeout_s * 1000))
        roster = await self._scripts.run(calls.command(command.id, worker_id, encode(command), lasts_ms))
        return Sent(command, tuple(sorted(text(worker) for worker in roster)), deadline)

    async def answers(self, sent: Sent) -> dict[str, CommandReply]:
        """Answers by worker. Returns when all have answered, at the deadline, or when the others have been gone for a
        while."""
        key, look_s, gone_since = self.keys.answers(sent.command.id), FIRST_LOOK_S, 0.0
        found: dict[str, CommandReply] = {}
        looked = time.monotonic()
        while True:
            count, now = await self._redis.hlen(key), time.monotonic()
            if count >= len(sent.workers) or now >= sent.deadline:
                break
            if now - looked > LOOK_FOR_THEM_S:
                looked = now
                await self._read(key, sent, found)
                silent = set(sent.workers) - found.keys()
                gone_since = (gone_since or now) if silent == await self.gone(sorted(silent)) else 0.0
                if gone_since and now - gone_since > GONE_S:
                    break
            await asyncio.sleep(min(look_s, sent.deadline - now))
            look_s = min(SLOWEST_LOOK_S, look_s * 1.5)
        await self._read(key, sent, found)
        return {worker: found[worker] for worker in sent.workers if worker in found}

    async def _read(self, key: str, sent: Sent, found: dict[str, CommandReply]) -> None:
        """Add the answers that have come since. They may be large, so each is read by itself."""
        silent = [worker for worker in sent.workers if worker not in found]
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker in silent:
                pipe.hexists(key, worker)
            there = await pipe.execute()
        for worker in itertools.compress(silent, there):
            if (frame := await self._redis.hget(key, worker)) is not None:
                found[worker] = _reply(sent.command.id, worker, frame)

    async def gone(self, workers: Sequence[str]) -> set[str]:
        """Which of these workers have left or lost their lease."""
        return set(workers) - await living_workers(self._redis, self.keys)


class CommandBox:
    """The side of one incarnation of a worker."""

    def __init__(self, redis: Redis, pool: str, worker_id: str) -> None:
        self.worker_id = worker_id
        self._scripts = Scripts(redis, Keys(pool))

    async def take(self, command_id: str) -> Command | None:
        """The command, or None if it is for others, over, or was taken before. Its timeout_s is the time that is left.

        Raises MessageError for a command that cannot be decoded.
        """
        # The same token gets the command again, because redis-py repeats a call whose reply was lost.
        answer = await self._scripts.run(calls.take_command(command_id, self.worker_id, secrets.token_hex(8)))
        if not answer:
            return None
        command = decode(answer[0], Command)
        return command.model_copy(update={"timeout_s": max(0.001, int(answer[1]) / 1000)})

    async def answer(self, reply: CommandReply) -> None:
        """Answer the sender. An answer that is too large, or that finds no room, becomes an error that says so."""
        try:
            frame = encode(reply)
            if len(frame) > MAX_ANSWER_BYTES:
                raise InvalidField("result", f"{len(frame)} bytes", f"at most {MAX_ANSWER_BYTES} bytes encoded")
            if await self._store(reply.id, frame) == b"full":
                allowed = f"at most {MOST_ANSWERS_BYTES} bytes of answers in {ANSWERS_TTL_S} s, of the whole pool"
                raise InvalidField("result", f"{len(frame)} bytes", allowed)
        except InvalidField as error:
            await self._store(reply.id, encode(self.failure(reply.id, error)))

    async def _store(self, command_id: str, frame: bytes) -> bytes:
        call = calls.answer_command(command_id, self.worker_id, frame, ANSWERS_TTL_S, MOST_ANSWERS_BYTES)
        stored: bytes = await self._scripts.run(call)
        return stored

    def failure(self, command_id: str, error: BaseException) -> CommandReply:
        """The answer that reports an error."""
        said = (str(error) or type(error).__name__).encode(errors="replace").decode()  # names of files can be any bytes
        return CommandReply(
            id=command_id, worker_id=self.worker_id, ok=False, kind=type(error).__name__[:64], error=said[:8192]
        )


def _reply(command_id: str, worker_id: str, frame: bytes) -> CommandReply:
    try:
        return decode(frame, CommandReply)
    except MessageError as error:
        said = f"its answer cannot be read: {error}"
        return CommandReply(id=command_id, worker_id=worker_id, ok=False, kind=type(error).__name__, error=said)
