"""Commands to a pool's workers, and what each of them answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from ..messages.arguments import checks_arguments
from ..messages.broker import Broker, CommandSender
from ..messages.errors import RolloutMQError
from ..messages.model import MemoryTag, PauseMode, ProfileActivity, check_params
from ..messages.redis import connect, default_url, ping

NO_ANSWER = "NoAnswer"
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """One worker's answer to a command.

    result: what the worker returned, if `ok`. kind, error: otherwise the name of the error, or NoAnswer, and its text.
    """

    worker_id: str
    ok: bool
    result: Mapping[str, Any]
    kind: str = ""
    error: str = ""


class CommandFailed(RolloutMQError):
    """Not every worker has done a command. answers: those of all workers."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers.told())
        self.answers = answers


class Answers(Mapping[str, Answer]):
    """The answers to a command, by worker id: one for each worker that was alive when it was sent."""

    def __init__(self, action: str, answers: Iterable[Answer]) -> None:
        self.action = action
        self._answers = {answer.worker_id: answer for answer in answers}

    def __getitem__(self, worker_id: str) -> Answer:
        return self._answers[worker_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def ok(self) -> bool:
        """Whether there was a worker, and every worker has done the command."""
        return bool(self._answers) and not self.failed

    @property
    def failed(self) -> list[Answer]:
        """The answers of workers that have not done it."""
        return [answer for answer in self._answers.values() if not answer.ok]

    @property
    def results(self) -> dict[str, Mapping[str, Any]]:
        """Worker id -> result, of workers that have done it."""
        return {worker: answer.result for worker, answer in self._answers.items() if answer.ok}

    def check(self) -> Self:
        """Returns itself. Raises CommandFailed unless every worker has done it."""
        if not self.ok:
            raise CommandFailed(self)
        return self

    def told(self) -> str:
        """What went wrong, in words."""
        if not self._answers:
            return f"{self.action}: no worker of that name is alive in this pool"
        return f"{self.action}: " + "; ".join(f"{one.worker_id}: {one.kind}: {one.error}" for one in self.failed)


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """What an audit of a pool's weights found.

    answers: by worker; a result has `clean`, and names of tensors that are `wrong` (not as the trainer sent them),
    of `nan`, `inf` or all `zero`. versions: by worker. apart: groups of workers that serve one version with one kind of
    engine, and whose parameters are not the same.
    """

    answers: Answers
    versions: Mapping[str, int]
    apart: tuple[tuple[str, ...], ...]

    @property
    def clean(self) -> bool:
        """Whether every worker answered and found nothing, and all serve one version with the same bits."""
        found = all(bool(result["clean"]) for result in self.answers.results.values())
        return self.answers.ok and found and len(set(self.versions.values())) == 1 and not self.apart


@checks_arguments()
class PoolControl:
    """Gives commands to the workers of one pool, over a connection of its own: use it in `async with`, or close it.

    `RolloutClient.control` is one over the client's connection.

    Every method takes `worker_id` ("" for all workers that are alive) and `timeout` in seconds. It returns Answers when
    all have answered or the time is over; a worker that is silent is in them, too. A parameter that no worker could
    take raises InvalidField before anything is sent. Methods may be called from several tasks of one event loop.

    Args:
        redis_url: the pool's Redis; by default $ROLLOUTMQ_REDIS, or the one on this host.
        pool: its name.
    """

    def __init__(self, redis_url: str | None = None, pool: str = "default") -> None:
        self._own: Any = connect(redis_url or default_url(), pool=pool)
        self._redis, self._sender = self._own, CommandSender(self._own, pool)

    @classmethod
    def _over(cls, broker: Broker) -> Self:
        """A control over a connection that its owner opens and closes."""
        control = cls.__new__(cls)
        control._own, control._redis = None, broker.redis
        control._sender = CommandSender(broker.redis, broker.keys.pool)
        return control

    async def open(self) -> Self:
        """Connect. Raises RedisUnavailable. `async with` does it too."""
        await ping(self._redis)
        return self

    async def aclose(self) -> None:
        """Disconnect, if the connection is its own."""
        if self._own is not None:
            await self._own.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def send(
        self, action: str, params: Mapping[str, Any] | None = None, *, worker_id: str = "", timeout: float = 30.0
    ) -> Answers:
        """Send any action by its name, with its parameters. Raises InvalidField, RedisUnavailable."""
        given = dict(params or {})
        check_params(action, given)
        sent = await self._sender.send(action, given, worker_id=worker_id, timeout_s=timeout)
        replies = await self._sender.answers(sent)
        silent = [worker for worker in sent.workers if worker not in replies]
        gone = await self._sender.gone(silent) if silent else set()
        answers = [Answer(one.worker_id, one.ok, one.result, one.kind, one.error) for one in replies.values()]
        for worker in silent:
            left = "; its lease is over, or it has left" if worker in gone else ""
            why = f"no answer{'' if left else f' within {timeout:g} s'}{left}"
            answers.append(Answer(worker, False, {}, NO_ANSWER, why))
        return Answers(action, sorted(answers, key=lambda answer: answer.worker_id))

    # --- serving ---------------------------------------------------------------------------------------------------

    async def pause(
        self, mode: PauseMode = "interrupt", *, hand_back: bool = False, worker_id: str = "", timeout: float = 60.0
    ) -> Answers:
        """Stop generating until `resume`; see PauseParams for the modes. Only "abort" ends running samples."""
        params = {"mode": mode, "hand_back": hand_back}
        return await self.send("pause", params, worker_id=worker_id, timeout=timeout)

    async def resume(self, *, worker_id: str = "", timeout: float = 30.0) -> Answers:
        """Go on after `pause`."""
        return await self.send("resume", worker_id=worker_id, timeout=timeout)

    async def abort(self, *, drop: bool = True, worker_id: str = "", timeout: float = 30.0) -> Answers:
        """Cancel the jobs that workers hold; drop=False only interrupts them. Queued jobs stay in the pool."""
        return await self.send("abort", {"drop": drop}, worker_id=worker_id, timeout=timeout)

    async def stop(self, *, drain_s: float | None = None, worker_id: str = "", timeout: float = 120.0) -> Answers:
        """Drain workers for `drain_s` seconds, and wait until they have left the pool. Then their processes end."""
        deadline = time.monotonic() + timeout
        params = {} if drain_s is None else {"drain_s": drain_s}
        told = await self.send("stop", params, worker_id=worker_id, timeout=timeout)
        there = {worker for worker, answer in told.items() if answer.ok or answer.kind == NO_ANSWER}
        while there and time.monotonic() < deadline:
            if not (there := there - await self._sender.gone(sorted(there))):
                break
            await asyncio.sleep(LOOK_S)
        return Answers("stop", [_stopped(answer, answer.worker_id in there, timeout) for answer in told.values()])

    async def sleep(
        self,
        tags: Sequence[MemoryTag] = (),
        *,
        hand_back: bool = False,
        worker_id: str = "",
        timeout: float = 120.0,
    ) -> Answers:
        """Give up GPU memory: "weights", "kv_cache", "cuda_graph", or all of it. Running samples wait until `wake`."""
        params = {"tags": list(tags), "hand_back": hand_back}
        return await self.send("sleep", params, worker_id=worker_id, timeout=timeout)

    async def wake(self, tags: Sequence[MemoryTag] = (), *, worker_id: str = "", timeout: float = 120.0) -> Answers:
        """Take memory again. Weights that did not survive are loaded again before anything is sampled."""
        return await self.send("wake", {"tags": list(tags)}, worker_id=worker_id, timeout=timeout)

    # --- caches ----------------------------------------------------------------------------------------------------

    async def flush_cache(self, *, worker_id: str = "", timeout: float = 60.0) -> Answers:
        """Forget cached prefixes. Running samples are interrupted for it, and continue."""
        return await self.send("flush_cache", worker_id=worker_id, timeout=timeout)

    async def clear_storage(self, *, worker_id: str = "", timeout: float = 120.0) -> Answers:
        """Empty the storage of a hierarchical cache; refused by engines that have none."""
        return await self.send("clear_storage", worker_id=worker_id, timeout=timeout)

    # --- weights ---------------------------------------------------------------------------------------------------

    async def version(self, *, worker_id: str = "", timeout: float = 10.0) -> Answers:
        """What each worker serves, and in which state it is. Workers answer it while they do other commands."""
        return await self.send("version", worker_id=worker_id, timeout=timeout)

    async def versions(self, *, worker_id: str = "", timeout: float = 10.0) -> dict[str, int]:
        """Worker id -> version. Raises CommandFailed if a worker does not answer."""
        answers = (await self.version(worker_id=worker_id, timeout=timeout)).check()
        return {worker: int(result["version"]) for worker, result in answers.results.items()}

    async def set_version(self, version: int, *, worker_id: str = "", timeout: float = 30.0) -> Answers:
        """Give the served weights another, higher version number, which the pool has not used."""
        return await self.send("set_version", {"version": version}, worker_id=worker_id, timeout=timeout)

    async def audit(
        self, *, names: int = 20, only: Sequence[str] = (), worker_id: str = "", timeout: float = 600.0
    ) -> PoolAudit:
        """Check every bit of the weights while engines serve, and compare the workers. names: most names listed.

        only: look at these parameters alone, and compare nothing with what the trainer sent.
        """
        params = {"names": names} | ({"only": list(only)} if only else {})
        answers = await self.send("audit", params, worker_id=worker_id, timeout=timeout)
        prints: dict[tuple[int, str], dict[str, list[str]]] = {}
        for worker, result in answers.results.items():
            alike = prints.setdefault((int(result["version"]), str(result["kind"])), {})
            alike.setdefault(str(result["fingerprint"]), []).append(worker)
        apart = tuple(
            tuple(sorted(worker for workers in alike.values() for worker in workers))
            for alike in prints.values()
            if len(alike) > 1
        )
        versions = {worker: int(result["version"]) for worker, result in answers.results.items()}
        return PoolAudit(answers, versions, apart)

    async def parameter(
        self, name: str, *, truncate_size: int = 100, rank: int = 0, worker_id: str = "", timeout: float = 60.0
    ) -> Answers:
        """The first `truncate_size` entries (rows of a matrix) of a parameter, as nested lists of floats, in `values`.

        name: the engine's, or the trainer's of a tensor that the engine holds whole. rank: the tensor-parallel rank
        whose part it is, of `ranks`. Results also have its whole `shape` there, `dtype` and the `version`. A worker
        answers InvalidField for an unknown name, and for more than 1,048,576 values.
        """
        params = {"name": name, "truncate_size": truncate_size, "rank": rank}
        return await self.send("parameter", params, worker_id=worker_id, timeout=timeout)

    async def save(
        self,
        path: str,
        *,
        format: Literal["safetensors", "sharded"] = "safetensors",
        upload: str = "",
        pattern: str | None = None,
        max_size: int | None = None,
        discard: bool = False,
        worker_id: str = "",
        timeout: float = 3600.0,
    ) -> Answers:
        """Save the served version in a folder on the worker's host, and copy it to a URL; usually of one worker.

        pattern: names of sharded files, with {rank} and {part}. max_size: most bytes in a file. None: SGLang's own.
        discard: remove the folder once it has been uploaded.
        """
        params: dict[str, Any] = {"path": path, "format": format}
        params |= {"upload": upload} if upload else {}
        params |= {"pattern": pattern} if pattern is not None else {}
        params |= {"max_size": max_size} if max_size is not None else {}
        params |= {"discard": True} if discard else {}
        return await self.send("save", params, worker_id=worker_id, timeout=timeout)

    async def load(
        self,
        path: str,
        version: int,
        *,
        format: Literal["auto", "snapshot", "safetensors", "sharded"] = "auto",
        worker_id: str = "",
        timeout: float = 3600.0,
    ) -> Answers:
        """Load weights from a folder on the workers' hosts, to serve them as `version`, above all of the pool's."""
        params = {"path": path, "version": version, "format": format}
        return await self.send("load", params, worker_id=worker_id, timeout=timeout)

    # --- adapters --------------------------------------------------------------------------------------------------

    async def adapters(self, *, worker_id: str = "", timeout: float = 10.0) -> Answers:
        """The LoRA adapters of each worker, with their versions, and which are pinned."""
        return await self.send("adapters", worker_id=worker_id, timeout=timeout)

    async def load_adapter(
        self,
        name: str,
        version: int,
        path: str,
        *,
        pinned: bool = True,
        worker_id: str = "",
        timeout: float = 120.0,
    ) -> Answers:
        """Load a LoRA adapter from a folder on the workers' hosts, as PEFT saves it. A pinned one stays loaded."""
        params = {"name": name, "version": version, "path": path, "pinned": pinned}
        return await self.send("load_adapter", params, worker_id=worker_id, timeout=timeout)

    async def unload_adapter(
        self, name: str, version: int | None = None, *, worker_id: str = "", timeout: float = 120.0
    ) -> Answers:
        """Unload one version of an adapter, or all of them; refused while samples use it."""
        params: dict[str, Any] = {"name": name} | ({} if version is None else {"version": version})
        return await self.send("unload_adapter", params, worker_id=worker_id, timeout=timeout)

    # --- profiles --------------------------------------------------------------------------------------------------

    async def start_profile(
        self,
        folder: str | None = None,
        *,
        activities: Sequence[ProfileActivity] = (),
        steps: int | None = None,
        worker_id: str = "",
        timeout: float = 60.0,
    ) -> Answers:
        """Start to record what the engines do, in a folder on their hosts. steps: ends by itself after so many."""
        params: dict[str, Any] = {"activities": list(activities)}
        params |= {name: value for name, value in (("folder", folder), ("steps", steps)) if value is not None}
        return await self.send("start_profile", params, worker_id=worker_id, timeout=timeout)

    async def stop_profile(
        self, *, upload: str = "", fetch_bytes: int = 0, worker_id: str = "", timeout: float = 300.0
    ) -> Answers:
        """End the recording. Results have `files`, and where they are: on the host, at `uploaded`, or in `fetched`."""
        params = {"fetch_bytes": fetch_bytes} | ({"upload": upload} if upload else {})
        return await self.send("stop_profile", params, worker_id=worker_id, timeout=timeout)

    # --- journals --------------------------------------------------------------------------------------------------

    async def journal(
        self, switch: Literal["on", "off"], folder: str = "", *, worker_id: str = "", timeout: float = 90.0
    ) -> Answers:
        """Have workers write a journal from now on, into a folder of their hosts or a URL, or end it.

        Results have `folder`, and how many `entries` are written and `lost`.
        """
        params = {"switch": switch} | ({"folder": folder} if folder else {})
        return await self.send("journal", params, worker_id=worker_id, timeout=timeout)


def _stopped(answer: Answer, there: bool, timeout: float) -> Answer:
    if there:
        return Answer(answer.worker_id, False, {}, NO_ANSWER, f"still in the pool after {timeout:g} s")
    if answer.kind == NO_ANSWER:  # it left, as it was told, before it could answer
        return Answer(answer.worker_id, True, {})
    return answer
