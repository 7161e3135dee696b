"""Prompts in the pool: submitted, collected, asked for again, stopped when there is enough, and made into groups."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future

from redis.exceptions import RedisError

from ...messages.errors import InvalidField, PoolBusy, RolloutMQError
from ...messages.model import GenerateJob, JobFailure, RolloutResult
from ..core import ClientCore
from ..inbox import FAILURE
from .asked import Asked, number_of
from .books import Books, Measured, Why
from .groups import GroupRules, Rewards, TrainGroup, finite_rewards
from .keeping import Keeping
from .set_aside import SetAside

log = logging.getLogger(__name__)
FEW = 32
"""So many samples that were dropped as stale say nothing about a run."""


class Generating:
    """A feed's prompts until their groups are ready.

    asked: prompts that are being generated or scored. aside: those of them that wait because a function of GroupRules
    has raised. ready: groups that nobody has taken. busy: whether something waits to be sent to Redis again after a
    pause. changed(): called when a coroutine of GroupRules has ended.
    """

    def __init__(self, core: ClientCore, books: Books, rules: GroupRules, changed: Callable[[], None]) -> None:
        self.asked: dict[int, Asked] = {}
        self.aside = SetAside()
        self.ready: dict[int, TrainGroup] = {}
        self.keeping = Keeping(core.reader.ack)
        self._core, self._inbox, self._books, self._rules = core, core.inbox, books, rules
        self._to_send: dict[str, GenerateJob] = {}
        self._to_cancel: list[str] = []
        self._to_stop: list[str] = []
        self._filtered = 0  # groups in a row
        self._told_stale = FEW
        self._scored_at_once = asyncio.Semaphore(rules.score_concurrency)
        self._changed = changed
        self._begun = False
        self._to_look_at: set[int] = set()  # prompts that may go on though nothing has come of them
        self._one_at_a_time = asyncio.Lock()

    @property
    def busy(self) -> bool:
        return bool(self._to_send or self._to_cancel or self._to_stop)

    @property
    def stuck(self) -> bool:
        """Whether nothing more is to come but what is set aside."""
        return bool(self.asked) and all(it.number in self.aside and not it.scoring for it in self.asked.values())

    @property
    def running(self) -> list[int]:
        """Prompts of which something is still being generated."""
        return [number for number, asked in self.asked.items() if asked.waiting and number not in self.aside]

    def sampled(self, version: int) -> bool:
        """Whether nothing is left to be sampled by an older version. What failed is asked for again."""
        older = [it for it in self.asked.values() if (its := it.job.exact_version) is not None and its < version]
        return all(self._inbox.is_whole(job_id, len(these)) for it in older for job_id, these in it.waiting.items())

    def when_sampled(self, version: int) -> Future[None]:
        """Done when that is so; cancelled when the client closes before."""
        done: Future[None] = Future()
        if self._begun and self.sampled(version):
            done.set_result(None)
        else:
            self._core.start(self._tell_sampled(version, done))
        return done

    async def _tell_sampled(self, version: int, done: Future[None]) -> None:
        try:
            await self.begin()  # a checkpoint may have prompts in flight
            await self._core.reader.until(lambda: self.sampled(version), None)
            done.set_result(None)
        finally:
            done.cancel()

    def news(self) -> set[int]:
        """Prompts of which something has come that `pump` has not seen."""
        return self.asked.keys() & {number_of(it) for it in self._inbox.stirred if self._sent(it)}

    def try_again(self) -> None:
        """A call of the feed begins: functions that raised are asked again."""
        self._to_look_at |= self.aside.try_again()

    async def begin(self) -> None:
        """Connect, and go on with the prompts that the books have in flight."""
        await self._core.open()
        if self._begun:
            return
        found, to_send = self.restored(self._books)
        self._begun = True  # not before: whoever catches an error and asks again gets it again
        self.asked.update(found)
        self._to_look_at |= found.keys()
        for job in to_send:
            self._send_soon(job)
        waiting = {job_id for asked in self.asked.values() for job_id in asked.waiting}
        old = [it for it in self._inbox.known if it not in waiting and self._is_old(it)]
        self.give_up(old)  # the checkpoint knows that they ended

    def restored(self, books: Books) -> tuple[dict[int, Asked], list[GenerateJob]]:
        """The prompts that these books have in flight, and those of their jobs that are not over. Changes nothing.

        Raises InvalidField for a prompt that this client did not submit.
        """
        found: dict[int, Asked] = {}
        to_send: list[GenerateJob] = []
        client_id = self._core.client_id
        for number, prompt in books.prompts.items():
            asked = found[number] = Asked.restored(client_id, number, prompt, self._rules)
            for place, (job_id, samples) in enumerate(prompt.asked):
                job = asked.again(place, samples)
                if job.id != job_id:
                    allowed = f"jobs as client {client_id!r} asks for them: another client made this, or it is damaged"
                    raise InvalidField("state.prompts", f"prompt {number}", allowed)
                if all(prompt.fates[sample] is not None for sample in samples):
                    del asked.waiting[job_id]
                else:
                    to_send.append(job)
        return found, to_send

    async def add(self, asked: Asked, job: GenerateJob) -> None:
        """Submit the first job of a prompt. Raises what `ClientCore.submit_many` raises; nothing is left then."""
        # An earlier run may have submitted another prompt under this number.
        self.give_up([it for it in self._inbox.known if number_of(it) == asked.number and it != job.id])
        self._inbox.reserve(job.id)
        try:
            await self._core.submit_many([job], 0.0)
        except PoolBusy:
            self._inbox.release(job.id)
            raise
        except BaseException:
            await self._core.give_up([job.id])  # it may have been accepted before the error came
            raise
        self.asked[asked.number] = asked

    async def pump(self) -> None:
        """Take in what has come, and send what is to be sent. Prompts of which a function raises are set aside."""
        async with self._one_at_a_time:
            look, self._to_look_at = self._to_look_at, set()
            for number in sorted(self.asked.keys() & (look | self.news())):
                asked = self.asked[number]
                self._collect(asked)
                if number not in self.aside and self._judge(asked):
                    self._go_on(asked)
            await self._flush()

    def give_up(self, job_ids: Collection[str]) -> None:
        """Nobody wants these any more, and what came of them."""
        for job_id in job_ids:
            self._to_send.pop(job_id, None)
            self.keeping.unneeded(self._inbox.abandon(job_id))
            self._inbox.release(job_id)
        self._to_cancel += job_ids

    def drop(self, number: int, samples: Collection[int], why: Why, known: dict[int, Measured]) -> None:
        """Samples end as dropped."""
        self._books.drop(number, samples, why, known)
        self._warn_of_stale()
        self.settled(number, samples)

    def filter(self, group: TrainGroup) -> None:
        """A group that teaches nothing ends."""
        group.note(self._core.journal, group.samples, dropped="filtered")
        self.drop(group.number, group.samples, "filtered", group.known())

    def leave_out(self, numbers: Collection[int]) -> None:
        """A batch does without the rest of these prompts: it is stopped, and what nobody was given is dropped."""
        live = self._books.live
        for number in numbers:
            asked = self.asked[number]
            self.give_up(list(asked.waiting))
            asked.waiting.clear()
            asked.complete = True
            self._drop(asked, "surplus", [it for it in asked.prompt.open if it not in asked.given | asked.scoring])
            if not asked.scoring:
                del self.asked[number]
        if numbers:
            self._books.marks["left out"] += live - self._books.live
            self._core.start(self._end_unneeded())

    def settled(self, number: int, samples: Collection[int]) -> None:
        """Samples have their fate in the books."""
        self.keeping.settle(number, samples, number not in self._books.prompts)
        self._core.reader.wake()  # somebody may wait for capacity

    # --- inside ----------------------------------------------------------------------------------------------------

    def _warn_of_stale(self) -> None:
        """A run that drops more as stale than it trains burns its data. It is told again when it is twice as much."""
        stale, trained = self._books.dropped["stale"], self._books.trained
        if stale > max(trained, self._told_stale):
            self._told_stale = 2 * stale
            log.warning(
                "%d samples were dropped as stale and only %d were trained: call advance() once for each batch_size "
                "samples, allow a larger eta, or do not drop (on_stale)",
                stale,
                trained,
            )

    def _is_old(self, job_id: str) -> bool:
        number = number_of(job_id)
        return number is not None and number < self._books.numbers

    def _sent(self, job_id: str) -> bool:
        return job_id not in self._to_send

    def _send_soon(self, job: GenerateJob) -> None:
        self._inbox.reserve(job.id)
        self._to_send[job.id] = job

    def _collect(self, asked: Asked) -> None:
        for job_id in [it for it in asked.waiting if self._sent(it)]:
            over = self._inbox.is_over(job_id)
            for reply in self._inbox.take_job(job_id):
                outcome = reply.outcome
                if isinstance(outcome, JobFailure):
                    asked.failed(outcome)
                    self.keeping.take(asked.number, FAILURE, reply)
                elif isinstance(outcome, RolloutResult) and (it := asked.arrived(job_id, outcome)) is not None:
                    self.keeping.take(asked.number, it, reply)
                else:
                    self.keeping.unneeded([reply])
            if over:
                self._inbox.release(job_id)
                del asked.waiting[job_id]

    def _decide(self, asked: Asked) -> None:
        """Stop what is not needed any more, ask again for what is missing, or call the prompt complete."""
        if asked.complete:
            return
        if len(asked.whole) >= asked.wanted and asked.waiting:
            if self._rules.partials:
                self._to_stop += [it for it in asked.waiting if it not in asked.stopped]
                asked.stopped.update(asked.waiting)
            else:
                self.give_up(list(asked.waiting))
                asked.waiting.clear()
        if asked.waiting:
            return
        if again := asked.to_ask():
            self._books.marks["asked again"] += len(again)
            self._send_soon(asked.ask(again))
        else:
            asked.complete = True

    def _judge(self, asked: Asked) -> bool:
        try:
            asked.judge()
        except BaseException as error:
            self.aside.put(asked.number, "keep", error)
            return False
        return True

    def _go_on(self, asked: Asked) -> None:
        """A prompt whose samples have been judged."""
        self._decide(asked)
        if asked.complete and asked.lacks:
            asked.complete = False
            self.aside.put(asked.number, "on_failed", RolloutMQError(asked.lacks))
            return
        if asked.complete:
            self._drop_the_rest(asked)
        if asked.complete or self._rules.deliver == "samples":
            self._give(asked)
        if asked.complete and not asked.to_give and not asked.scoring:
            del self.asked[asked.number]

    def _drop_the_rest(self, asked: Asked) -> None:
        """Nothing more of this prompt is to come: drop what the trainer does not get."""
        for why, others in asked.not_chosen().items():
            self._drop(asked, why, others)

    def _drop(self, asked: Asked, why: Why, samples: Collection[int]) -> None:
        """Drop samples of which some may be here."""
        here = asked.here
        if self._core.journal is not None:
            for sample in samples:
                if sample in here:
                    self._core.journal.note(here[sample], dropped=why)
        known = {it: Measured(len(here[it].token_ids)) for it in samples if it in here}
        self.drop(asked.number, samples, why, known)
        for sample in samples:
            here.pop(sample, None)

    def _give(self, asked: Asked) -> None:
        """Make what is chosen and was not given ready for the trainer, as a group, or as a part of one."""
        if not (samples := asked.to_give):
            return
        results = tuple(asked.here[sample] for sample in samples)
        group_id = asked.job.group_id or results[0].group_id
        n = asked.wanted if self._rules.deliver == "groups" else len(samples)
        group = TrainGroup(group_id, results, tuple(asked.failures), asked.number, samples, n)
        if self._rules.score is None:
            self._scored(asked, group)
            return
        try:
            rewards = self._rules.score(results)
        except BaseException as error:
            self.aside.put(asked.number, "score", error)
            return
        if inspect.isawaitable(rewards):
            asked.scoring.update(samples)
            task = self._core.start(self._await_rewards(asked, group, rewards))
            if inspect.iscoroutine(rewards):
                task.add_done_callback(lambda _: rewards.close())  # not awaited, if the client closes before its turn
        else:
            self._scored(asked, group, rewards)

    async def _await_rewards(self, asked: Asked, group: TrainGroup, coming: Awaitable[Rewards]) -> None:
        """Groups are scored beside each other, also while nobody waits for the feed."""
        task = asyncio.current_task()
        try:
            async with self._scored_at_once:
                rewards = await coming
        except BaseException as error:  # nobody awaits this task: SystemExit reaches the feed's caller, too
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise  # the client closes; otherwise it is the function that was cancelled
            self.aside.put(asked.number, "score", error)
        else:
            self._scored(asked, group, rewards)
        finally:
            asked.scoring.difference_update(group.samples)
            self._to_look_at.add(asked.number)
            self._changed()

    def _scored(self, asked: Asked, group: TrainGroup, rewards: Rewards = ()) -> None:
        """A group, or a part of one, has its rewards: it is ready, or is dropped."""
        number = asked.number
        if self._rules.score is not None:
            try:
                group.rewards.extend(finite_rewards(rewards, len(group.results)))
            except InvalidField as error:
                self.aside.put(number, "score", error)
                return
        try:
            teaches = self._teaches(group)
        except BaseException as error:
            self.aside.put(number, "teaches", error)
            return
        asked.given.update(group.samples)
        self.aside.over(number)
        if teaches:
            self.ready[number] = self.ready[number].joined(group) if number in self.ready else group
        else:
            self.filter(group)

    def _teaches(self, group: TrainGroup) -> bool:
        if self._rules.teaches is None or self._rules.teaches(group.rewards):
            self._filtered = 0
            return True
        self._filtered += 1
        if self._filtered <= self._rules.most_filtered:
            return False
        self._books.marks["let through"] += len(group.samples)
        self._filtered = 0
        return True

    async def _flush(self) -> None:
        if jobs := list(self._to_send.values()):
            try:
                await self._core.submit_many(jobs, 0.0)
                sent = set(range(len(jobs)))
            except PoolBusy as busy:
                sent = {*busy.beyond, *range(busy.accepted)}
            for place in sent:
                self._to_send.pop(jobs[place].id, None)
            self._core.reader.wake()
        await self._end_unneeded()

    async def _end_unneeded(self) -> None:
        cancel, self._to_cancel = self._to_cancel, []  # others may be added meanwhile
        stop, self._to_stop = self._to_stop, []
        try:
            if cancel:
                await self._core.broker.cancel(cancel, "its trainer needs no more of it")
                cancel = []
            if stop:
                await self._core.broker.stop(stop)
                stop = []
        except (RedisError, OSError) as error:
            log.warning("jobs that are not needed any more still run: %s", error)
        finally:
            self._to_cancel += cancel
            self._to_stop += stop
