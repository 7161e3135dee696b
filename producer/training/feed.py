"""The feed: groups for a trainer, with staleness under control and books that survive restarts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from ...messages.arguments import checks_arguments
from ...messages.errors import InvalidField, PoolBusy, WaitTimeout
from ...messages.model import GenerateJob
from ..core import ClientCore, left_of
from ..inbox import HandOut
from .asked import Asked, as_text
from .batches import Batches
from .books import Books, Measured, Why
from .generating import Generating
from .groups import GroupRules, TrainGroup, oldest_version
from .keeping import checkpoint_number
from .reproducible import Schedule
from .staleness import Staleness

log = logging.getLogger(__name__)
SAY_S = 30.0  # after which a wait that has no end says what it waits for
RETRY_S = 0.2  # pause before what a full pool refused is submitted again


@checks_arguments(GenerateJob)
class RolloutFeed:
    """Made by `RolloutClient.feed`. Gives one trainer groups of samples, and writes the books.

    A prompt goes through it like this: `submit` (or `batches`) accepts it, when the staleness allows it; the pool
    generates it; `batch` or `take` gives it to the trainer; the trainer says `train` or `drop`. After each update of
    the weights the trainer says `advance`. What a feed submits belongs to it: no other call of the client gets it. Its
    jobs have one turn; docs/staleness.md says how sessions and episodes are counted.

    Into the trainer's checkpoint goes `state_dict()`, and when the checkpoint is saved the trainer says `saved()`. A
    client that opens again under the same `client_id` and loads the state goes on from there:

    - What was trained by then does not come again. What was not comes again, also if it had been trained after the
      checkpoint: the weights that it trained are gone.
    - What is under way in the pool goes on, with what it has generated.
    - The trainer submits the prompts after the first `books.numbers` ones again, in the same order. Those that were
      submitted after the checkpoint are not generated again.
    - An older checkpoint than the last one that was saved works, too: what is no longer there is generated again.

    books: what became of each sample. rules: what makes a group.
    """

    def __init__(
        self, core: ClientCore, staleness: Staleness, rules: GroupRules, version: int, *, reproducible: bool
    ) -> None:
        self.staleness, self.rules, self._core, self.books = staleness, rules, core, Books(version)
        self._schedule = Schedule(staleness, rules, self.books) if reproducible else None
        # What teaches is decided in the order of the prompts then, when a batch is made.
        self._pool = Generating(core, self.books, replace(rules, teaches=None) if reproducible else rules, self._wake)
        self._ready = self._pool.ready
        self._handed: set[tuple[int, tuple[int, ...]]] = set()  # at the trainer: prompts and samples of groups
        self._waited_s, self._given = 0.0, 0  # for groups, until one is trained on; samples given since the last update
        self._changes = 0  # each task that waits compares it with what it was
        self._begun = self._held_up = self._has_waited = self._said = False
        self._submitting = asyncio.Lock()

    # --- in --------------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Samples that may be submitted now."""
        # No prompt takes the place of what a batch did without: that one is complete.
        return self.staleness.capacity(self.books.updates, self.books.live + self.books.marks["left out"])

    async def submit(self, job: GenerateJob, timeout: float | None = None) -> int:
        """Accept a prompt, when the staleness and the pool have room for it; returns its number in the books.

        The job's id is the feed's. timeout: seconds to wait for room; None waits for ever. Raises WaitTimeout,
        PoolBusy, InvalidField, and what `RolloutClient.submit` raises; the prompt was not accepted then.
        """
        if self._schedule is not None:
            raise InvalidField("submit", "a job", "`batches` alone in a reproducible run")
        self.staleness.check(job)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._begun = True
        await self._pool.begin()
        self.books.marks["held up"] += self.capacity < job.n
        while True:
            full = f"no room for {job.n} samples"
            await self._until(lambda: self.capacity >= job.n, left_of(deadline), full, timeout)
            async with self._submitting:  # for one try: whoever waits for room holds up nobody
                if self.capacity < job.n:
                    continue
                if (busy := await self._submit(job)) is None:
                    return self.books.numbers - 1
            if deadline is not None and time.monotonic() + RETRY_S > deadline:
                raise busy
            await asyncio.sleep(RETRY_S)

    async def _submit(self, job: GenerateJob) -> PoolBusy | None:
        """Accept a prompt now. Returns the error of a full pool."""
        bound = self._schedule.bound(job) if self._schedule else self.staleness.bound(job, self.books.version)
        spare = self.rules.over_sample
        number = self.books.accept(job.n + spare, as_text(bound), spare)
        asked = Asked(self._core.client_id, number, bound, self.books.prompts[number], self.rules)
        try:
            await self._pool.add(asked, asked.ask(list(range(job.n + spare))))
        except BaseException as error:
            self.books.withdraw(number)
            if not isinstance(error, PoolBusy):
                raise
            if error.reason == "unread" and self._pool.keeping.nbytes and not (self._pool.asked or self._ready):
                # Nothing is to come that the trainer could take: waiting is in vain.
                told = f"{error}: {self._pool.keeping.nbytes} bytes wait for a checkpoint; save one and call saved()"
                raise PoolBusy(told, [], error.reason) from error
            return error
        return None

    # --- out -------------------------------------------------------------------------------------------------------

    async def take(self, timeout: float | None = None) -> TrainGroup:
        """The next group, or sample (`GroupRules.deliver`), in the order of acceptance as far as they are ready.

        Raises WaitTimeout if there is none within `timeout` seconds: nothing is lost then.
        """
        return (await self._get(1, timeout, None))[0]

    async def batch(self, timeout: float | None = None) -> list[TrainGroup]:
        """Groups for one step: as many as `Staleness.batch_size` samples are, before any failed.

        It has fewer only as far as `GroupRules.over_sample_rate` says, or if the staleness lets no more in before the
        next update, or nothing is under way any more.
        Empty if nothing is under way. Raises WaitTimeout if there is none within `timeout` seconds.
        """
        return await anext(Batches(self._get, self.staleness.batch_size, (), timeout), [])

    def batches(self, jobs: Iterable[GenerateJob], timeout: float | None = None) -> AsyncIterator[list[TrainGroup]]:
        """Batches as `batch` has them; submits `jobs` as far as the staleness and the pool allow.

        Ends when `jobs` are through and nothing is under way. A wait for the next batch that is cancelled or times out
        loses nothing, and the loop can go on. A batch that was given and neither trained nor dropped is in flight.
        """
        return Batches(self._get, self.staleness.batch_size, jobs, timeout)

    async def _get(self, most: int, timeout: float | None, source: Batches | None) -> list[TrainGroup]:
        """See `batch`. source: what to submit meanwhile; None waits for what others submit."""
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        self._begun = True
        await self._pool.begin()
        aside = self._pool.aside
        aside.raise_new()  # by coroutines that ended while nobody waited
        self._pool.try_again()
        while True:
            news = partial(self._news_since, self._changes)
            await self._pool.pump()
            aside.raise_new()
            busy = source is not None and await self._refill(source)
            found = self._choose(most, source)
            if source is not None and self._schedule is not None and not busy:
                accepted = self.books.numbers  # what was filtered makes room, before the next update and not after it
                if (busy := await self._refill(source)) or self.books.numbers > accepted:
                    continue
            if not found and self._pool.stuck and not busy:
                aside.raise_again()
            if found is not None and not (busy and self._schedule):
                self._pool.leave_out(self._late(source))
                self._waited_s += time.monotonic() - began
                return self._hand_out(found)
            left = left_of(deadline)
            pause = left if not (busy or self._pool.busy) else RETRY_S if left is None else min(left, RETRY_S)
            try:
                await self._until(news, pause, "nothing was ready for the trainer", timeout)
            except WaitTimeout:
                if pause == left:
                    raise

    def _news_since(self, changes: int) -> bool:
        return self._changes != changes or bool(self._pool.news())

    async def _refill(self, source: Batches) -> bool:
        """Submit from `source` what the staleness allows. Returns whether the pool is too full for that."""
        while source.peek() is not None:
            async with self._submitting:  # others may have submitted meanwhile, also from this source
                if (job := source.peek()) is None:
                    break
                self.staleness.check(job)
                held_up, self._held_up = self._held_up, self.capacity < job.n
                if self._held_up:
                    self.books.marks["held up"] += not held_up
                    break
                if await self._submit(job) is not None:
                    return True
                source.step()
        return False

    def _choose(self, most: int, source: Batches | None) -> list[TrainGroup] | None:
        """Groups of `most` samples; fewer if no more can come; None if they have to be waited for."""
        self._drop_stale()
        chosen: list[TrainGroup] = []
        total, full, schedule = 0, False, self._schedule
        for number in sorted(self._ready) if schedule is None else schedule.in_order(self._ready, self._pool.asked):
            group = self._ready[number]
            if schedule is not None and total < most and not schedule.teaches(group):
                self._pool.filter(self._ready.pop(number))
                continue
            if self.rules.deliver == "samples":
                group = group.first(most - total)
            full = total >= most or (bool(chosen) and total + group.n > most)
            if full:
                break
            chosen.append(group)
            total += group.n
        under_way = self._pool.asked and (schedule is not None or not self._pool.stuck)
        enough = most if source is None else self.rules.enough(most)
        more_may_come = source is None or under_way or not (chosen or source.peek() is None)
        if not full and total < enough and more_may_come:
            return None
        wait = self.staleness.on_stale == "wait" and self._has_to_wait(chosen, total, self._late(source))
        return None if wait else chosen

    def _has_to_wait(self, chosen: list[TrainGroup], total: int, late: set[int]) -> bool:
        """Whether older samples have to come first. What has come can only be taken in its order."""
        older = [number for number in self._pool.asked if chosen and number < chosen[-1].number]
        if not older:
            return False
        mine = Counter({group.number: len(group.samples) for group in chosen})
        for number, samples in self._handed:
            mine[number] += len(samples)
        left = [
            (self.books.updates - prompt.update, prompt.needed - mine[number])
            for number, prompt in self.books.prompts.items()
            if prompt.needed > mine[number] and number not in late
        ]
        too_late = self.staleness.too_late(left, max(0, self.staleness.batch_size - self._given - total))
        self.books.marks["waited"] += too_late and not self._has_waited
        self._has_waited = too_late
        return too_late

    def _late(self, source: Batches | None) -> set[int]:
        """Prompts that a batch does without: by the next one they are too old (`GroupRules.over_sample_rate`)."""
        running = () if source is None or not self.rules.over_sample_rate else self._pool.running
        return {it for it in running if self.books.prompts[it].update <= self.books.updates - self.staleness.eta}

    def _drop_stale(self) -> None:
        for number, group in list(self._ready.items()):
            stale = {
                sample
                for sample, result in zip(group.samples, group.results, strict=True)
                if self.staleness.is_stale(self.books.age(oldest_version(result)))
            }
            if stale and self.staleness.on_stale == "drop":
                self._pool.drop(number, stale, "stale", group.known())
                group.note(self._core.journal, stale, dropped="stale")
                self._remove(number, stale)

    def _remove(self, number: int, samples: Collection[int]) -> None:
        """These are not ready any more."""
        left = self._ready.pop(number).without(samples)
        if left.samples:
            self._ready[number] = left if self.rules.deliver == "groups" else left.first(len(left.samples))

    def _hand_out(self, groups: list[TrainGroup]) -> list[TrainGroup]:
        aged = [
            replace(it, staleness=tuple(self.books.age(oldest_version(one)) for one in it.results)) for it in groups
        ]
        for group in aged:
            self.books.marks["marked"] += sum(map(self.staleness.is_stale, group.staleness))
            self._remove(group.number, group.samples)
            self._handed.add((group.number, group.samples))
            self._given += group.n
        self._has_waited = False
        self._wake()  # another task may wait for what is ready beside this, or for the end
        # Ctrl-C in a plain loop may come before its thread has them: then they are ready again.
        replies = [reply for group in groups for reply in self._pool.keeping.of(group.number)]
        HandOut(replies, lambda _: None, lambda _: self._take_back(groups))
        return aged

    def _take_back(self, groups: Iterable[TrainGroup]) -> None:
        for group in groups:
            if (group.number, group.samples) in self._handed:
                self._handed.remove((group.number, group.samples))
                other = self._ready.get(group.number)
                self._ready[group.number] = group if other is None else other.joined(group)
                self._given -= group.n
        self._wake()

    # --- the trainer says ------------------------------------------------------------------------------------------

    def train(self, groups: Iterable[TrainGroup], step: int | None = None) -> None:
        """These were trained on. step: by default the number of updates so far.

        Raises InvalidField for a group that the trainer does not have, or with rewards that are not finite. Nothing is
        noted of it then.
        """
        for group in groups:
            known = self._back(group)
            group.check_rewards()
            at = self.books.updates if step is None else step
            self.books.train(group.number, group.samples, at, known)
            waited, self._waited_s = self._waited_s / len(group.samples), 0.0  # all of it with the first group
            group.note(self._core.journal, group.samples, trained=at, **({"waited_s": waited} if waited else {}))
            self._handed.remove((group.number, group.samples))
            self._pool.settled(group.number, group.samples)
        self._wake()

    def drop(self, groups: Iterable[TrainGroup], why: Why = "filtered") -> None:
        """These are not trained on. Raises InvalidField as `train` does."""
        for group in groups:
            known = self._back(group)
            self._pool.drop(group.number, group.samples, why, known)
            group.note(self._core.journal, group.samples, dropped=why)
            self._handed.remove((group.number, group.samples))
        self._wake()

    def _back(self, group: TrainGroup) -> dict[int, Measured]:
        if not isinstance(group, TrainGroup):
            raise InvalidField("groups", group, "a list of TrainGroups")
        if (group.number, tuple(group.samples)) not in self._handed:
            raise InvalidField("groups", f"prompt {group.number}", "groups that the trainer has, each once")
        return group.known()

    def advance(self, version: int) -> None:
        """The weights were updated and are published as `version`. Raises InvalidField unless it is a newer one."""
        if self._schedule is not None:
            self._schedule.check_next(version)
        self.books.advance(version)
        self._given = 0
        self._wake()

    def renumber(self, version: int) -> None:
        """The same weights are published as `version`, as a restored trainer has to: that is no update. Its number is
        max(publisher.last_version, feed.books.version) + 1. Raises InvalidField for one below `books.version`."""
        if self._schedule is not None:
            self._schedule.check_same(version)
        self.books.renumber(version)

    def sampled(self, version: int) -> Future[None]:
        """Done when nothing is left to be sampled by an older version: `WeightPublisher.publish(…, after=…)`."""
        self._begun = True
        return self._pool.when_sampled(version)

    def _wake(self) -> None:
        self._changes += 1
        self._core.reader.wake()

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The books, for the trainer's checkpoint: plain data, also JSON. Samples stay in Redis until `saved`, to be
        called when the checkpoint is where it survives a crash. What it knows is in the journal's file by now."""
        self._core.flush_journal()
        number = self._pool.keeping.checkpoint()
        return {"books": self.books.state_dict(), "checkpoint": number, "client_id": self._core.client_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was made; before anything is submitted or taken. Raises InvalidField for a state
        that is damaged or of another client, and changes nothing then."""
        if self._begun:
            raise InvalidField("state", "a checkpoint", "to be loaded before the feed's first call")
        number, read = checkpoint_number(state, self._core.client_id), Books()
        read.load_state_dict(state["books"])
        prompts, _ = self._pool.restored(read)
        if self._schedule is not None:
            self._schedule.check_restored(prompts)
        self.books.load_state_dict(state["books"])
        self._pool.keeping.checkpoint(number)

    def saved(self, state: Mapping[str, Any] | None = None) -> None:
        """A checkpoint with this state is saved, by default the newest: what it knows the end of leaves Redis. Raises
        InvalidField for a state that `state_dict` did not make."""
        self._pool.keeping.saved(None if state is None else checkpoint_number(state, self._core.client_id))

    def report(self) -> dict[str, Any]:
        """What the books say (`Books.report`), and what is where: `ready` groups, groups `at_trainer`."""
        now = {"ready": len(self._ready), "at_trainer": len(self._handed), "unsaved_bytes": self._pool.keeping.nbytes}
        return self.books.report() | now

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _until(self, ready: Callable[[], bool], left: float | None, what: str, timeout: float | None) -> None:
        """Raises WaitTimeout, with reasons. A wait without an end on a pool that has nothing to do logs them, once."""
        while True:
            try:
                return await self._core.until(ready, SAY_S if left is None and not self._said else left)
            except WaitTimeout as late:
                within, asked = SAY_S if timeout is None else timeout, len(self._pool.asked)
                told = f"{what} within {within:g} s: {asked} prompts are under way"
                if self._handed:
                    told += f", {len(self._handed)} groups are at the trainer, neither trained nor dropped"
                if self._held_up or not self.capacity:
                    told += f". {self.staleness.full}"
                if left is not None:
                    raise WaitTimeout(told, late.why) from None
                if not asked:
                    self._said = True
                    log.warning("%s", told)
