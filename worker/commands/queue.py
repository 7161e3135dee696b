"""Commands to a worker: each is taken once, in order, done beside the jobs, and answered whatever happens.

Most are done one after the other. Commands that must not wait behind the save of a large model have lanes of their own:
one for pause, resume, abort and stop, one for profiles, one for the journal. Questions wait for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from importlib import metadata
from typing import Any, Literal, get_args

from redis.exceptions import RedisError

from ...messages.broker import CommandBox
from ...messages.errors import MessageError, RolloutMQError
from ...messages.model import ACTIONS, Command, CommandReply, check_params
from .parts import Handler, WorkerParts

log = logging.getLogger(__name__)
Lane = Literal["now", "gate", "profile", "journal", "work"]
LANES: Mapping[str, Lane] = {
    "version": "now",
    "adapters": "now",
    "pause": "gate",
    "resume": "gate",
    "abort": "gate",
    "stop": "gate",
    "start_profile": "profile",
    "stop_profile": "profile",
    "journal": "journal",
}
"""All others are "work"."""
GOODBYE_S = 2.0


class UnknownAction(RolloutMQError):
    """This worker's release does not have the action."""


class CommandTimeout(RolloutMQError):
    """The command is not done yet; the worker goes on with it."""


class WorkerLeaves(RolloutMQError):
    """The worker was drained before the command was done."""


def own_version() -> str:
    """The version of this package, or "unknown" if it is not installed."""
    try:
        return metadata.version("rolloutmq")
    except metadata.PackageNotFoundError:
        return "unknown"


@contextlib.asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """`work` runs as long as the block does."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Commands:
    """Takes, does and answers the commands of one worker, over all its incarnations."""

    def __init__(
        self, handlers: Mapping[str, Handler], parts: WorkerParts, on_done: Callable[[Command, CommandReply], None]
    ) -> None:
        """handlers: one for each action of `messages.model.ACTIONS`. on_done: called when one was done, or refused."""
        self._handlers, self._parts, self._on_done = handlers, parts, on_done
        self._heard: asyncio.Queue[tuple[CommandBox, str]] = asyncio.Queue()
        self._lanes: dict[Lane, asyncio.Queue[tuple[CommandBox, Command, float]]] = {
            lane: asyncio.Queue() for lane in get_args(Lane) if lane != "now"
        }
        self._beside: set[asyncio.Task[None]] = set()
        self._begun: dict[str, tuple[CommandBox, Command]] = {}  # and not answered

    def hear(self, box: CommandBox, command_id: str) -> None:
        """The bell rang for this command; it may ring more than once."""
        self._heard.put_nowait((box, command_id))

    async def run(self) -> None:
        """Run until cancelled. Commands that were not begun by then are answered with WorkerLeaves."""
        lanes = [asyncio.create_task(self._lane(queue)) for queue in self._lanes.values()]
        try:
            while True:
                box, command_id = await self._heard.get()
                await self._take(box, command_id)
        finally:
            for task in (*lanes, *self._beside):
                task.cancel()
            await asyncio.gather(*lanes, *self._beside, return_exceptions=True)
            await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        left = [(box, command, "broken off") for box, command in self._begun.values()]
        for queue in self._lanes.values():
            while not queue.empty():
                box, command, _ = queue.get_nowait()
                left.append((box, command, "not begun"))
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                for box, command, what in left:
                    await box.answer(box.failure(command.id, WorkerLeaves(f"{command.action}: {what}")))

    async def _take(self, box: CommandBox, command_id: str) -> None:
        try:
            command = await box.take(command_id)
        except MessageError as error:
            log.warning("a command cannot be read: %s", error)
            await self._answer(box, box.failure(command_id, error))
            return
        except (RedisError, OSError) as error:  # not begun: who asked hears nothing, in time
            log.warning("a command could not be taken: %s", error)
            return
        if command is None:
            return
        work = box, command, time.monotonic() + command.timeout_s
        lane = LANES.get(command.action, "work")
        if lane == "now" or command.action not in ACTIONS:
            self._aside(self._do(*work))
        else:
            self._lanes[lane].put_nowait(work)

    async def _lane(self, queue: asyncio.Queue[tuple[CommandBox, Command, float]]) -> None:
        while True:
            work = await queue.get()
            try:
                await self._do(*work)
            except Exception:  # the commands behind it are done all the same
                log.exception("command %s could not be answered", work[1].id)

    async def _do(self, box: CommandBox, command: Command, deadline: float) -> None:
        """Do the command to its end. If its deadline comes first, the answer is CommandTimeout."""
        log.info("command %s: %s %s", command.id, command.action, command.params or "")
        doing = asyncio.create_task(self._reply(box, command, deadline))
        self._begun[command.id] = box, command
        try:
            done, _ = await asyncio.wait({doing}, timeout=max(0.0, deadline - time.monotonic()))
            if done:
                await self._answer(box, doing.result())
                return
            late = CommandTimeout(f"{command.action}: not done in {command.timeout_s:g} s; it goes on in the worker")
            await self._answer(box, box.failure(command.id, late))
            reply = await doing
            log.info("command %s, after its deadline: %s", command.id, reply.error or "done")
        except asyncio.CancelledError:
            doing.cancel()
            raise

    async def _reply(self, box: CommandBox, command: Command, deadline: float) -> CommandReply:
        reply = await self._outcome(box, command, deadline)
        self._on_done(command, reply)
        return reply

    async def _outcome(self, box: CommandBox, command: Command, deadline: float) -> CommandReply:
        action = command.action
        try:
            if action not in ACTIONS or action not in self._handlers:
                known = ", ".join(sorted(self._handlers))
                raise UnknownAction(f"{action}: this worker (rolloutmq {own_version()}) knows {known}")
            if time.monotonic() >= deadline:
                raise CommandTimeout(f"{action}: others went first until its time was over; it was not begun")
            result = await self._handlers[action](self._parts, check_params(action, command.params), deadline)
        except RolloutMQError as error:
            reply = box.failure(command.id, error)  # its text can be encoded; the error's own need not be
            log.warning("command %s: %s: %s", command.id, reply.kind, reply.error)
            return reply
        except Exception as error:  # whatever it is, it ends this command and nothing else
            log.exception("command %s failed", command.id)
            return box.failure(command.id, error)
        return CommandReply(id=command.id, worker_id=box.worker_id, ok=True, result=dict(result))

    async def _answer(self, box: CommandBox, reply: CommandReply) -> None:
        self._begun.pop(reply.id, None)
        try:
            await box.answer(reply)
        except (RedisError, OSError) as error:
            log.warning("command %s could not be answered: %s", reply.id, error)

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
