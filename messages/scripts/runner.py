"""Runs the Lua scripts. Every change to a pool's state is one script, so it happens whole or not at all.

Every script is idempotent. redis-py re-sends a command whose reply was lost, and the second run must change nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import cache
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from ..errors import NotOnDisk, NotReplicated, RedisRefused
from ..redis import RETRY_BUDGET_S, Durability, Flush, Keys, how_to_flush, told_as_ours
from .calls import Arg, Call
from .source import script_source

WAITS = frozenset(
    {
        "enqueue", "complete", "close", "cancel", "cancel_client", "stop", "release", "dead", "expire", "reserve",
        "begin_request", "finish_request", "record_turn", "take_session", "forget_session",
    }
)  # fmt: skip
"""Writes whose answer is a promise. With `min_replicas` these scripts return once that many replicas have them, with
`durable=disk` once they are on the server's disk. Losing another write costs work, and is found out by itself: a claim,
a heartbeat, a checkpoint, an acknowledgement (the outcome comes again), an announcement (its `close` counts), the end
of a job that is overdue or has lost its last worker (it ends again in the same way)."""

GROWS = frozenset({"enqueue", "checkpoint", "announce", "begin_request", "record_turn"})
"""Scripts that a Redis at its memory limit refuses. All others go on, because they are about work that it has accepted:
else no lease could be renewed, no result published, and no memory freed."""

LOADS = 3
"""How often a script is loaded for one call. The server may change, or forget it, between the loading and the call."""

# Redis refuses the first command of a script that may need memory, and only if the script has written nothing yet
# (measured on 6.2 and 7.0; 7's `#!lua flags=allow-oom` is a syntax error to 6.2). Deleting nothing counts as a write.
_PAST_THE_LIMIT = "redis.call('DEL', prefix .. 'none')\n"

# While a slot moves to another node, a key that is not there any more, or not yet, is an error in the middle of a
# script, when half of it is done. This key is never there: the whole script is refused before it has begun.
_SLOT_IS_HERE = "redis.call('EXISTS', prefix .. 'none')\n"

# From 7.2 on WAIT and WAITAOF are about what *this connection* wrote last. After a re-sent script that had nothing left
# to do, or on a new connection, that is nothing, and they would answer at once. So something is written. (Up to 7.0 it
# is what anybody has written by then.)
_MARK = "redis.call('DEL', KEYS[1]) redis.call('SET', KEYS[1], 1, 'EX', 60)"


@cache
def _sha(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class Scripts:
    """The scripts of one pool over one connection pool. Loaded by SHA, sent whole again after a Redis restart.

    The client that `connect` made from the URL says what has to confirm (`Durability`).
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis: Any = redis
        self._keys = keys
        self._durability: Durability = getattr(redis, "durability", Durability())
        self._flush: Flush | None = None
        self._preamble = (_SLOT_IS_HERE,) if getattr(redis, "clustered", False) else ()
        self._address = getattr(redis, "where", "its address")

    async def run(self, call: Call) -> Any:
        """Run a script with the pool's prefix before the call's arguments.

        Raises RedisUnavailable, RedisRefused (nothing was written), NotReplicated or NotOnDisk; it may be run again
        after any.
        """
        name, args = call
        try:
            return await self._run(name, script_source(name, *self._preamble), args)
        except RedisRefused as refused:
            if refused.reason != "memory" or name in GROWS:
                raise
        return await self._run(name, script_source(name, *self._preamble, _PAST_THE_LIMIT), args)

    async def _run(self, name: str, source: str, args: tuple[Arg, ...]) -> Any:
        call = ("EVALSHA", _sha(source), 1, self._keys.load, self._keys.prefix, *args)
        wait = self._durability.waits and name in WAITS
        for _ in range(LOADS):
            try:
                return await (self._confirmed(name, call) if wait else self._redis.execute_command(*call))
            except NoScriptError:  # a new server, a restarted one, or a new owner of the slot
                await self._redis.script_load(source)
        return await (self._confirmed(name, call) if wait else self._redis.execute_command(*call))

    async def _confirmed(self, name: str, call: tuple[Any, ...]) -> Any:
        """The script's answer once enough replicas, and the disk, have its writes.

        All on one connection: WAIT and WAITAOF are about one.
        """
        wanted = self._durability
        clock = asyncio.get_running_loop().time
        deadline = clock() + RETRY_BUDGET_S
        while True:
            with told_as_ours(self._address):
                flush = await self._how_to_flush() if wanted.disk else None
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.execute_command(*call)
                    pipe.execute_command("EVAL", _MARK, 1, self._keys.mark)
                    if wanted.min_replicas:
                        pipe.execute_command("WAIT", wanted.min_replicas, wanted.timeout_ms)
                    if flush:
                        pipe.execute_command(*flush.command)
                    try:
                        answer, _, *confirmed = await pipe.execute()
                    except ResponseError as error:
                        # redis-py names the command that failed. Another server may have taken the place of the first.
                        if type(error) is ResponseError and flush and str(flush.command[0]) in str(error):
                            raise self._not_on_disk(name, str(error)) from error
                        raise
            replicas = confirmed[0] if wanted.min_replicas else 0
            on_disk = flush is None or flush.done(confirmed[-1])
            if replicas >= wanted.min_replicas and on_disk:
                return answer
            if flush is not None and not on_disk and (clock() >= deadline or not flush.waits):
                why = "waits for its disk" if flush.waits else "does not flush before it answers any more"
                raise self._not_on_disk(name, f"it {why}")
            if clock() >= deadline:
                raise NotReplicated(
                    f"{name}: {replicas} of {wanted.min_replicas} replicas confirmed it within {RETRY_BUDGET_S:g} s. "
                    "The primary has it, and loses it if it is lost itself before they do. Doing the same again "
                    "(the same jobs, with their ids) is safe"
                )

    async def _how_to_flush(self) -> Flush:
        if self._flush is None:
            self._flush = await how_to_flush(self._redis)
        return self._flush

    def _not_on_disk(self, name: str, why: str) -> NotOnDisk:
        self._flush = None  # the next call asks again what this server can do
        return NotOnDisk(
            f"{name}: the server has it in memory, but not on its disk for certain: {why}. Doing the same again (the "
            "same jobs, with their ids) is safe"
        )
