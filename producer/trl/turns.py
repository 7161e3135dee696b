"""One turn of a conversation as one job, under an id that a restarted trainer finds again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ...messages.dialects import job_fields
from ...messages.errors import InvalidField, JobFailed
from ...messages.model import GenerateJob, JobFailure, RolloutResult
from ..core import ClientCore
from ..inbox import HandOut, as_failure

ASKED = 16
"""How often a turn is asked for, under new ids, where an earlier process took its outcome or cancelled it."""


def sampling_of(args: Any, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Fields of GenerateJob for TRL's settings of generation; args: an AsyncGRPOConfig or a GRPOConfig.

    Log-probabilities are taken after temperature, as TRL's trainers take their own. Raises InvalidField.
    """
    more = getattr(args, "generation_kwargs", None) or {}
    given: dict[str, Any] = {
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or -1,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "stop_token_ids": tuple(eos_token_ids),
    }
    fields = job_fields(more) if more else {}
    if odd := sorted(fields.keys() - {"sampling"}):
        raise InvalidField("args.generation_kwargs", odd, "parameters of sampling alone")
    if "sampling" in fields:
        given |= fields["sampling"].model_dump(exclude_unset=True)
    logprobs = {"kind": "scaled"} if given["temperature"] not in (0.0, 1.0) else {}
    return {"sampling": given, "logprobs": logprobs}


def token_versions(result: RolloutResult) -> list[int]:
    """The version that sampled each token: of the adapter, where one did."""
    segments = result.segments if result.adapter_segments is None else result.adapter_segments
    return [version for version, count in segments for _ in range(count)]


@dataclass(slots=True)
class Conversation:
    """One sample of a prompt under way.

    number, sample: its place in the books. turns: of each turn its prompt's ids, its tokens and their versions.
    failure: why no worker could generate it. versions: of each of its rows for training, one for each token.
    """

    number: int
    sample: int
    turns: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)
    failure: JobFailed | None = None
    versions: list[list[int]] = field(default_factory=list)
    completion: Any = None

    @property
    def oldest(self) -> int | None:
        """The oldest version that sampled a token of it."""
        return min((version for _, _, versions in self.turns for version in versions), default=None)


class Turns:
    """Asks the pool for turns. Runs in the rollouts' event loop.

    Outcomes stay on the reply stream until `settle`: a trainer that crashes finds them there, under the ids that the
    same conversations get again.

    Args:
        run: name of the training run; part of every id.
        fields: of every job.
    """

    def __init__(self, core: ClientCore, run: str, fields: Mapping[str, Any]) -> None:
        self._core, self._run, self._fields = core, run, dict(fields)
        self._held: dict[int, list[HandOut]] = {}

    async def open(self, resumed: bool) -> None:
        """Connect. resumed: whether jobs that an earlier process left are wanted; else they are cancelled."""
        if not resumed:
            await self._core.broker.cancel_client(self._core.client_id)
        await self._core.open()

    async def ask(self, conversation: Conversation, prompt_ids: Sequence[int], **more: Any) -> RolloutResult:
        """The next turn. more: further fields of the job, the same in every process of the run. Raises JobFailed."""
        failure = JobFailure(job_id="", outcome="dead", cause="never asked")
        for attempt in range(ASKED):
            job = self._job(conversation, prompt_ids, attempt, more)
            with self._core.inbox.reserved(job.id):
                [handle] = await self._core.submit_many([job], None)
                await self._core.until(partial(self._core.inbox.is_over, job.id), None)
                replies = self._core.inbox.take_job(job.id)
            held = self._core.hand_out(replies)
            for reply in replies:
                if isinstance(reply.outcome, RolloutResult):
                    self._held.setdefault(conversation.number, []).append(held)
                    return reply.outcome
            held.acknowledge()
            failures = [it.outcome for it in replies if isinstance(it.outcome, JobFailure)]
            failure = failures[0] if failures else as_failure(job.id, handle.state)
            if failures and failure.outcome != "cancelled":
                break
        raise JobFailed(failure)

    def settle(self, ended: Callable[[int], bool]) -> None:
        """Acknowledge what belongs to prompts that have ended, and what an earlier run left.

        What an earlier process of this run left waits until its prompt's turn comes again.
        """
        for number in [number for number in self._held if ended(number)]:
            for held in self._held.pop(number):
                held.acknowledge()
        waiting = []
        while (reply := self._core.inbox.take_next()) is not None:
            waiting.append(reply)
        wanted = [it for it in waiting if (its := self._prompt_of(it.outcome)) is not None and not ended(its)]
        self._core.hand_out([it for it in waiting if it not in wanted]).acknowledge()
        self._core.hand_out(wanted).give_back()

    async def close(self, cancel: bool) -> None:
        """Disconnect. cancel: nobody will resume; jobs are cancelled, and what was held is acknowledged."""
        try:
            if cancel and self._core.reader.reading:
                await self._core.broker.cancel_client(self._core.client_id)
                self.settle(lambda _number: True)
        finally:
            await self._core.close()

    def _prompt_of(self, outcome: Any) -> int | None:
        """The number of the prompt that an outcome of this run belongs to."""
        number = outcome.metadata.get("prompt")
        return number if outcome.metadata.get("run") == self._run and isinstance(number, int) else None

    def _job(
        self, conversation: Conversation, prompt_ids: Sequence[int], attempt: int, more: Mapping[str, Any]
    ) -> GenerateJob:
        place = f"{conversation.number}/{conversation.sample}/{len(conversation.turns)}/{attempt}"
        digest = hashlib.blake2b(f"{self._run}/{place}/{self._fields}".encode(), digest_size=16)
        digest.update(np.asarray(prompt_ids, "<i4").tobytes())
        return GenerateJob.build(
            id=digest.hexdigest(),
            group_id=f"{self._run}-{conversation.number}",
            token_ids=list(prompt_ids),
            metadata={"run": self._run, "prompt": conversation.number, "sample": conversation.sample},
            **{**self._fields, **more},
        )
