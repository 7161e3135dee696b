"""One command to all workers, or to one, and their answers; the first that could not do it becomes an error."""

from __future__ import annotations

from typing import Any

from ...messages import errors
from ...messages.errors import EngineError, FeatureUnavailable, InvalidField, RolloutMQError, WaitTimeout
from ..control import NO_ANSWER, Answer, PoolControl
from .core import EngineCore

COMMAND_S = 120.0
NOBODY = "no worker has joined this pool"
_CANNOT = frozenset({"RequestRefused", "UnknownAction"})


class Commands(EngineCore):
    """What methods that ask workers stand on."""

    async def ask(
        self, action: str, params: dict[str, Any] | None = None, *, worker_id: str = "", timeout_s: float = COMMAND_S
    ) -> dict[str, dict[str, Any]]:
        """What each worker answered; nothing from a pool without workers. Those that left meanwhile are left out.

        Raises what a worker raised, as the error of that name with the worker's id in its text: FeatureUnavailable for
        what it cannot do; WaitTimeout if one that still lives did not answer.
        """
        client = await self.client()
        answers = await PoolControl(client).send(action, params, worker_id=worker_id, timeout=timeout_s)
        silent = [one for one in answers.failed if one.kind == NO_ANSWER]
        left = {worker.worker_id for worker in await self.workers()} if silent else set()
        for one in answers.failed:
            if one not in silent or one.worker_id in left:
                raise _error(action, one)
        return {worker: dict(result) for worker, result in answers.results.items()}

    async def ask_one(
        self, action: str, params: dict[str, Any] | None = None, *, timeout_s: float = COMMAND_S
    ) -> dict[str, Any]:
        """The answer of one worker that serves. Raises RolloutMQError if there is none, and as `ask`."""
        workers = await self.workers()
        serving = [worker for worker in workers if worker.state == "serving"] or workers
        if not serving:
            raise RolloutMQError(f"{action}: {NOBODY}")
        chosen = min(serving, key=lambda worker: (worker.running, worker.worker_id)).worker_id
        answers = await self.ask(action, params, worker_id=chosen, timeout_s=timeout_s)
        if chosen not in answers:
            raise EngineError(f"{action}: worker {chosen} has left")
        return answers[chosen]


def _error(action: str, answer: Answer) -> RolloutMQError:
    text = f"worker {answer.worker_id}: {answer.error}"
    if answer.kind in _CANNOT:
        return FeatureUnavailable(action, None, text)
    if answer.kind == NO_ANSWER:
        return WaitTimeout(f"{action}: {text}")
    if answer.kind == "InvalidField":
        return InvalidField(action, None, text)
    kind = getattr(errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, RolloutMQError) and "__init__" not in vars(kind):
        return kind(text)
    return EngineError(f"{action}: {text}")
