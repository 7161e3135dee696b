"""A reproducible run: which version samples which prompt, from which seed, in which order, and what it refuses.

A prompt is sampled by the version that the trainer had when it was accepted, and by no other. Prompts are accepted in
the order of the data, as many as the staleness allows, before a batch is given out; and they are decided in that order.
So without a filter batch k is sampled by the version of update max(0, k - eta), whoever samples it and whenever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from ...messages.errors import InvalidField
from ...messages.model import GenerateJob
from .asked import Asked
from .books import Books
from .groups import GroupRules, TrainGroup
from .staleness import Staleness

REFUSED_RULES = {
    "over_sample": (0, "which samples of a prompt come first depends on the workers"),
    "over_sample_rate": (0.0, "which samples of a batch come first depends on the workers"),
    "partials": (False, "where a sample is stopped depends on the workers"),
    "deliver": ("groups", "which samples come first depends on the workers"),
    "on_failed": ("ask", "which samples fail depends on the workers"),
}
"""Fields of GroupRules: the only value, and why no other."""
REFUSED_FIELDS = {
    "deadline_s": "when a job expires depends on the clock",
    "max_staleness": "the schedule says which version samples it",
    "lora": "there is no schedule of adapters' versions",
}
"""Fields of GenerateJob that are not set, and why."""
FILTERED = "dropped: filtered"


class Schedule:
    """Of one feed. books: its own. Raises InvalidField for what cannot be reproduced."""

    def __init__(self, staleness: Staleness, rules: GroupRules, books: Books) -> None:
        self._rules, self._books = rules, books
        self._decided = 0  # prompts below this are filtered, or worth a step
        if staleness.on_stale != "wait":
            why = '"wait" in a reproducible run: what is stale when it comes depends on the workers'
            raise InvalidField("on_stale", staleness.on_stale, why)
        for name, (only, why) in REFUSED_RULES.items():
            if (given := getattr(rules, name)) != only:
                raise InvalidField(name, given, f"{only!r} in a reproducible run: {why}")

    def bound(self, job: GenerateJob) -> GenerateJob:
        """The job of the next prompt, for one version and with a seed. Raises InvalidField for a field that it cannot
        have."""
        for name, why in REFUSED_FIELDS.items():
            if (given := getattr(job, name)) is not None:
                raise InvalidField(name, given, f"None in a reproducible run: {why}")
        seed = job.seed if job.seed is not None else seed_of(f"prompt {self._books.numbers}")
        return job.model_copy(update={"exact_version": self._books.version, "seed": seed})

    def check_next(self, version: int) -> None:
        """Raises InvalidField unless an update makes this version: its number says which update it was."""
        if version != (follows := self._books.version + 1):
            raise InvalidField("version", version, f"{follows} in a reproducible run, the number after the last one")

    def check_same(self, version: int) -> None:
        """Raises InvalidField for another number of the weights that prompts were accepted for."""
        if version != self._books.version and self._books.numbers:
            allowed = f"{self._books.version} in a reproducible run, where a number stands for one update"
            raise InvalidField("version", version, allowed)

    @staticmethod
    def check_restored(prompts: Mapping[int, Asked]) -> None:
        """Raises InvalidField for prompts of a checkpoint that a run without a schedule accepted."""
        for number, asked in prompts.items():
            if asked.job.exact_version is None:
                raise InvalidField("state.prompts", f"prompt {number}", "of a reproducible run, as this one is")

    @staticmethod
    def in_order(ready: Iterable[int], asked: Iterable[int]) -> Iterator[int]:
        """The prompts that are ready, by their numbers, up to the first one that is still to come."""
        here = set(ready)
        first = min((number for number in asked if number not in here), default=None)
        yield from sorted(number for number in here if first is None or number < first)

    def teaches(self, group: TrainGroup) -> bool:
        """Whether the group of the next prompt is worth a step. All before it have been decided. `most_filtered` in a
        row are not, as the books tell. Raises what `GroupRules.teaches` raises."""
        number, most = group.number, self._rules.most_filtered
        if number < self._decided:
            return True
        if self._rules.teaches is not None and not self._rules.teaches(group.rewards):
            before = range(number - 1, number - 1 - most, -1)
            if all(it >= 0 and self._books.fate(it, 0) == FILTERED for it in before):
                self._books.marks["let through"] += len(group.samples)
            else:
                return False
        self._decided = number + 1
        return True


def seed_of(place: str) -> int:
    """The seed of a prompt whose job has none. It follows from the prompt's place in the data alone."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") >> 1
