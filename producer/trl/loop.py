"""TRL's own rollout loop with its generation replaced.

TRL's `_AsyncRolloutLoop` renders prompts, runs tools and environments, calls reward functions, computes advantages and
cuts conversations into rows. All of that is inherited. Five places are replaced that have to do with a server: the
connection, the order of prompts, the request for a turn, what becomes of a failed one, and a sample's version.

TRL starts its loop in a process of its own. Here it runs in a thread. Generation costs this process nothing, the books
are shared with the trainer without a second protocol, and reward functions may be closures.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _AsyncRolloutLoop, _chain_to_sequences

from ...messages.errors import JobFailed
from ..training import Books, Staleness
from .samples import as_pool_sample
from .turns import Conversation, Turns, token_versions

LOOK_S = 0.02
"""Pause between two looks whether an update of the weights has arrived."""
CURRENT: ContextVar[Conversation] = ContextVar("rolloutmq_trl_conversation")
"""The conversation of the task: TRL generates each in a task of its own."""


class PoolLoop(_AsyncRolloutLoop):  # type: ignore[misc]  # TRL publishes no types
    """Generates and scores samples until it is stopped. Its constructor also takes the arguments of TRL's.

    turns: asks the pool. books, lock: what became of each sample, shared with the trainer's thread. staleness: the
    gate at acceptance; None for none. slack: samples that the trainer reads ahead. bounds: returns fields of every
    job. under_way: whether an update of the weights is on its way. trl_version: TRL's number for a version of the pool.
    resumed: whether an earlier process's jobs are wanted. keep: whether jobs stay when the loop ends.
    """

    def __init__(
        self,
        *,
        turns: Turns,
        books: Books,
        lock: threading.RLock,
        staleness: Staleness | None,
        slack: int,
        bounds: Callable[[], dict[str, Any]],
        under_way: Callable[[], bool],
        trl_version: Callable[[int | None], int],
        resumed: bool,
        keep: bool,
        **inherited: Any,
    ) -> None:
        super().__init__(model_name="", **inherited)
        self._turns, self._books, self._lock = turns, books, lock
        self._staleness, self._slack = staleness, slack
        self._bounds, self._trl_version, self._under_way = bounds, trl_version, under_way
        self._resumed, self._keep = resumed, keep
        self._begun: Counter[int] = Counter()
        self._ended: dict[int, Conversation] = {}  # by the identity of its completion
        self._admission = asyncio.Lock()
        self._roomier = asyncio.Event()

    # --- called from the trainer's thread ---------------------------------------------------------------------------

    def stop(self) -> None:
        """Have `run` return soon; nothing that is generated is lost if jobs are kept."""
        self._call(self._stop_event.set)

    def look_again(self) -> None:
        """There may be room for more prompts."""
        self._call(self._roomier.set)

    def settle(self) -> None:
        """Acknowledge what has ended in the books."""
        self._call(self._turns.settle, self._ended_by_now())

    def _call(self, work: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(work, *args)

    def _ended_by_now(self) -> Callable[[int], bool]:
        """Whether a prompt has ended, by the books as they are now: a checkpoint has them."""
        with self._lock:
            count, still_open = self._books.numbers, set(self._books.prompts)
        return lambda number: number < count and number not in still_open

    # --- in place of TRL's ------------------------------------------------------------------------------------------

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop_event.wait())
        try:
            await self._turns.open(self._resumed)
            self._turns.settle(self._ended_by_now())
            work = [
                asyncio.create_task(self._generate_loop(stop_event=stop_event)),
                asyncio.create_task(self._score_loop(stop_event=stop_event)),
            ]
            done, _ = await asyncio.wait({stopping, *work}, return_when=asyncio.FIRST_COMPLETED)
            for task in work:  # a conversation is not waited for: its jobs go on without it
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            for task in done - {stopping}:
                task.result()
        finally:
            stopping.cancel()
            await self._turns.close(cancel=not self._keep)

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Prompts in the dataset's order: those that an earlier process left in flight, then new ones."""
        indexed = hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")
        rows = None if indexed else self._endless()
        number = 0
        while True:
            row = next(rows) if rows is not None else None
            with self._lock:
                wanted = number >= self._books.numbers or number in self._books.prompts
            if wanted:
                row = self.dataset[number % len(self.dataset)] if row is None else row
                for _ in range(self.num_generations):
                    yield number, row
            number += 1

    def _endless(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.dataset

    async def _generate_one(
        self, prompt: Any, tool_dict: dict[str, Any], tools: list[Any], group_id: int = 0
    ) -> tuple[Any, ...]:
        conversation = Conversation(group_id, self._begun[group_id])
        self._begun[group_id] += 1
        await self._admit(group_id)
        CURRENT.set(conversation)
        told: tuple[Any, ...]
        try:
            told = await super()._generate_one(prompt, tool_dict=tool_dict, tools=tools, group_id=group_id)
        except JobFailed as error:
            conversation.failure = error
            told = ([], [], [], 0, 0, None)
        conversation.completion = told[0]
        conversation.versions = self._row_versions(conversation)
        self._ended[id(told[0])] = conversation
        return told

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        conversation = CURRENT.get()
        result = await self._turns.ask(conversation, prompt_ids, **self._bounds())
        ids = result.token_ids.tolist()
        conversation.turns.append((list(prompt_ids), ids, token_versions(result)))
        assert result.logprobs is not None
        return ids, result.logprobs.tolist()

    async def _score_group(self, group: Any) -> list[Any]:
        number = group.group_id
        whole = [self._ended.pop(id(completion)) for completion in group.completions]
        failed = [it for it in whole if it.failure is not None]
        if failed:
            self._leave_out(group, [place for place, it in enumerate(whole) if it.failure is None])
            self._counters["rollout/failed_total"] += len(failed)
        if len(failed) == len(whole):
            raise failed[0].failure  # type: ignore[misc]
        kept = [it for it in whole if it.failure is None]
        scored = await super()._score_group(group)
        del self._begun[number]
        rows = [(it, versions) for it in kept for versions in it.versions]
        with self._lock:
            still_open = set(self._books.prompts[number].open)
            without = {it.sample for it in kept if not it.versions}
            self._books.drop(number, still_open & {it.sample for it in failed}, "failed")
            self._books.drop(number, still_open & without, "filtered")
        return [
            as_pool_sample(sample, self._trl_version(it.oldest), versions, (number, it.sample, len(it.versions)))
            for sample, (it, versions) in zip(scored, rows, strict=True)
            if it.sample in still_open  # an earlier process trained the others
        ]

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _admit(self, number: int) -> None:
        """Return when the prompt is in the books: its turn has come and there is room for it."""
        async with self._admission:  # first come, first served: numbers are given in the dataset's order
            while True:
                self._roomier.clear()
                with self._lock:
                    if number < self._books.numbers:
                        return
                    if self._has_room():
                        self._books.accept(self.num_generations)
                        return
                with contextlib.suppress(TimeoutError):  # nobody tells when an update has arrived
                    await asyncio.wait_for(self._roomier.wait(), LOOK_S if self._under_way() else None)

    def _has_room(self) -> bool:
        rule = self._staleness
        if rule is None:
            return True
        # What is accepted before an update has arrived is sampled without it, and sooner stale than the rule reckons.
        updates = self._books.updates - (self._books.updates > 0 and self._under_way())
        room = rule.capacity(updates, self._books.live - self._slack)
        return room >= min(int(self.num_generations), rule.batch_size)

    def _row_versions(self, conversation: Conversation) -> list[list[int]]:
        """Of each row that TRL cuts the conversation into, the version of each token; -1 for tokens that were given.

        TRL carries a number for each token through its cutting: the log-probability. Here that is the version.
        """
        turns = [
            TurnRecord(prompt, ids, [float(it) for it in versions]) for prompt, ids, versions in conversation.turns
        ]
        rows, _ = _chain_to_sequences(turns, "", self._fork_threshold_tokens)
        return [
            [int(version) if mine else -1 for version, mine in zip(row.old_log_probs, row.completion_mask, strict=True)]
            for row in rows
        ]

    @staticmethod
    def _leave_out(group: Any, kept: list[int]) -> None:
        """Only these conversations are scored."""
        for name in (
            "prompts", "completions", "completions_ids", "completions_sequences",
            "tool_call_counts", "tool_failure_counts", "env_rewards", "rollout_rewards",
        ):  # fmt: skip
            values = getattr(group, name)
            setattr(group, name, [values[place] for place in kept] if values else values)
        group.reward_kwargs = {key: [values[it] for it in kept] for key, values in group.reward_kwargs.items()}
