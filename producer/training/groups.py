"""Groups for a trainer: how many samples are asked for, which are kept, what fails, and which prompts teach nothing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ...messages.arguments import whole_number
from ...messages.errors import InvalidField
from ...messages.journal import Journal
from ...messages.model import RolloutResult
from ..inbox import Group
from .books import Measured

Deliver = Literal["groups", "samples"]
OnFailed = Literal["ask", "less"]
Rewards = Sequence[float]
Score = Callable[[Sequence[RolloutResult]], Rewards | Awaitable[Rewards]]


def rewards_differ(rewards: Rewards) -> bool:
    """Whether not all rewards are equal. DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476) keeps such groups
    only: where all samples earned the same, each advantage is 0 and the prompt teaches nothing. NaN stands for no
    reward, and differs from none."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return any(reward != known[0] for reward in known)


def finite_rewards(rewards: Any, count: int) -> list[float]:
    """Rewards as Python's numbers. Raises InvalidField unless they are `count` finite numbers in an order.

    NaN or infinity in one reward would be in the advantages of the whole group, and then in all of the weights.
    """
    try:
        if isinstance(rewards, Mapping | Set | str | bytes):  # a mapping would give its keys
            raise TypeError
        given = list(rewards)
        if len(given) != count or any(isinstance(it, str | bytes) for it in given):
            raise TypeError
        found = [float(it) for it in given]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of several values
        raise InvalidField("rewards", rewards, f"a list of one number for each of {count} results") from error
    for place, reward in enumerate(found):
        if not math.isfinite(reward):
            raise InvalidField(f"rewards[{place}]", reward, "a finite number")
    return found


def oldest_version(result: RolloutResult) -> int | None:
    """The version of its oldest token: of the adapter, if one sampled it; None without tokens."""
    segments = result.segments if result.adapter_segments is None else result.adapter_segments
    return segments[0].version if segments else None


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What makes a group.

    over_sample: samples that are asked for beyond a job's `n`. The first n that `keep` accepts make the group, and the
        others are stopped. partials: what was stopped, with the tokens it had, belongs to the group, too; otherwise it
        is dropped as "surplus".
    over_sample_rate: the share of a batch that it can do without, as in VERL; at least 0 and below 1. `batch` and
        `batches` give a batch when 1 - over_sample_rate of its samples are ready. What is still being generated and
        would be too old for the next batch is stopped then, and dropped as "surplus": with `Staleness(eta=0)` all of
        it. What is young enough goes on, and is in a later batch.
    keep: whether a sample may be in a group; others are dropped as "filtered". By default each may.
    score: the rewards of a group's samples, in their order: a list, an array or a tensor of one finite number for each.
        A function or a coroutine function. It is asked once for each sample, with all that are delivered together.
        Coroutines run beside each other, `score_concurrency` of them at most. teaches: whether a group with these
        rewards is worth a step; others are dropped as "filtered", and another prompt takes their place.
        `rewards_differ` is DAPO's filter. It needs complete groups.
    most_filtered: so many groups in a row are filtered; the next one is let through, and counted. With 0 all groups are
        let through, and those that teach nothing are counted.
    on_failed: what becomes of samples that failed. "ask": they are asked for again, up to `retries` times a prompt.
        "less", and after the last retry: the group has that many samples less.
    deliver: "groups": the trainer gets a group when all of it is there. "samples": it gets samples as they finish, so a
        slow one holds up no others. A TrainGroup then has the samples of a prompt that are there; the others follow
        under the same number. Batches are filled to the sample.
    What `keep`, `score` or `teaches` raises reaches the caller of the feed as it is, once for each prompt; SystemExit
    does, too, and so does the InvalidField of rewards that are not finite. CancelledError and the end of an iterator
    come as a RolloutMQError that names them. The prompt's samples stay in flight, other prompts go on, and each later
    call tries the function again. What it raises then is raised only if the call has nothing else to give or to wait
    for.

    Raises InvalidField.
    """

    over_sample: int = 0
    over_sample_rate: float = 0.0
    keep: Callable[[RolloutResult], bool] | None = None
    partials: bool = False
    score: Score | None = None
    score_concurrency: int = 64
    teaches: Callable[[Rewards], bool] | None = None
    most_filtered: int = 64
    on_failed: OnFailed = "ask"
    retries: int = 2
    deliver: Deliver = "groups"

    def __post_init__(self) -> None:
        for name, least in (("over_sample", 0), ("most_filtered", 0), ("retries", 0), ("score_concurrency", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        rate = self.over_sample_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise InvalidField("over_sample_rate", rate, "a number, at least 0 and below 1")
        if not isinstance(self.partials, bool):
            raise InvalidField("partials", self.partials, "True or False")
        for name in ("keep", "score", "teaches"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise InvalidField(name, value, "a function")
            if name != "score" and inspect.iscoroutinefunction(value):
                raise InvalidField(name, value, "a plain function: only score may be a coroutine function")
        if self.on_failed not in get_args(OnFailed):
            raise InvalidField("on_failed", self.on_failed, '"ask" or "less"')
        if self.deliver not in get_args(Deliver):
            raise InvalidField("deliver", self.deliver, '"groups" or "samples"')
        if self.teaches is not None and self.score is None:
            raise InvalidField("teaches", self.teaches, "only together with score, which gives it the rewards")
        if self.teaches is not None and self.deliver == "samples":
            raise InvalidField("teaches", self.teaches, 'None with deliver="samples": it judges complete groups')

    def enough(self, most: int) -> int:
        """How many of a batch's `most` samples have to be ready."""
        return max(1, int(most * (1 - self.over_sample_rate) + 1e-9))  # 10 * (1 - 0.9) is a little below 1


@dataclass(frozen=True, slots=True, repr=False)
class TrainGroup(Group):
    """What a trainer gets of one prompt. It goes back to the feed by `train` or `drop`.

    number: the prompt's number in the books. samples: the numbers of the results, in their order. n: how many samples
    were wanted; with `deliver="samples"`, how many there are. rewards: of the results, as `GroupRules.score` has given
    them; a trainer that scores by itself puts them in before it calls `train`, so that they are in the books: one
    finite number for each result, or none at all.
    staleness: of the results, in updates, when it was taken. failures: what has cost the prompt samples.
    """

    number: int = 0
    samples: tuple[int, ...] = ()
    n: int = 1
    rewards: list[float] = field(default_factory=list)
    staleness: tuple[int, ...] = ()

    def _told(self) -> list[str]:
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else None
        stale = f"staleness up to {max(self.staleness)}" if self.staleness else ""
        return [f"prompt {self.number}", "" if mean is None else f"mean reward {mean:.3g}", stale]

    def known(self) -> dict[int, Measured]:
        """What the books note of the samples. Raises InvalidField for rewards that are not one for each result."""
        if self.rewards and len(self.rewards) != len(self.results):
            raise InvalidField("rewards", self.rewards, f"one for each of {len(self.results)} results, or none")
        rewards: Sequence[float | None] = self.rewards or [None] * len(self.results)
        ages: Sequence[int | None] = self.staleness or [None] * len(self.results)
        return {
            sample: Measured(len(result.token_ids), reward, age)
            for sample, result, reward, age in zip(self.samples, self.results, rewards, ages, strict=True)
        }

    def check_rewards(self) -> None:
        """Raises InvalidField unless there are no rewards, or one finite number for each result."""
        if self.rewards:
            finite_rewards(self.rewards, len(self.results))

    def note(self, journal: Journal | None, samples: Collection[int], **fate: float | str) -> None:
        """Write into a journal, if there is one, what became of samples."""
        if journal is None:
            return
        known = self.known()
        for sample, result in zip(self.samples, self.results, strict=True):
            if sample in samples:
                _, reward, staleness = known[sample]
                told = {"reward": reward, "staleness": staleness}
                journal.note(result, **fate, **{name: value for name, value in told.items() if value is not None})

    def without(self, samples: Collection[int]) -> TrainGroup:
        """The group, less some samples."""
        left = [place for place, sample in enumerate(self.samples) if sample not in samples]
        return self._of(left, self.n)

    def first(self, most: int) -> TrainGroup:
        """Its first samples, as a part; `n` is what it has."""
        places = range(len(self.samples))[:most]
        return self._of(places, len(places))

    def joined(self, other: TrainGroup) -> TrainGroup:
        """Both parts of what is delivered of a prompt, by the samples' numbers."""
        both = TrainGroup(
            self.group_id,
            self.results + other.results,
            other.failures,
            self.number,
            self.samples + other.samples,
            self.n + other.n,
            self.rewards + other.rewards,
            self.staleness + other.staleness,
        )
        return both._of(sorted(range(len(both.samples)), key=both.samples.__getitem__), both.n)

    def _of(self, places: Sequence[int], n: int) -> TrainGroup:
        return replace(
            self,
            results=tuple(self.results[place] for place in places),
            samples=tuple(self.samples[place] for place in places),
            n=n,
            rewards=[self.rewards[place] for place in places] if self.rewards else [],
            staleness=tuple(self.staleness[place] for place in places) if self.staleness else (),
        )
