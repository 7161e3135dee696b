"""The books: a ledger of a trainer's samples that goes into its checkpoints.

Every sample of every accepted prompt ends as trained (at a step) or dropped (for a reason), or is in flight. A prompt's
number is its place in the order of acceptance. So a trainer that is restored, together with its data loader, accepts
the same prompts under the same numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ...messages.errors import InvalidField
from .spread import Spread

Why = Literal["stale", "filtered", "failed", "cancelled", "surplus"]
"""Why a sample was dropped. stale: too old when the trainer took it. filtered: its prompt's rewards taught nothing.
failed: no worker could generate it. cancelled: on request, or stopped. surplus: more was asked for than was needed."""
REASONS: tuple[Why, ...] = get_args(Why)
FORMAT = 1
NO_FATE = "in flight"


@dataclass(slots=True)
class Prompt:
    """A prompt that has samples in flight.

    n: samples accepted. version: the trainer's version at acceptance. fates: of each sample the step that trained on
    it, or its reason's place in REASONS as -1, -2, …; None for a sample in flight. job: what was asked for, as text
    that its owner understands. asked: the jobs that generate it, each with its first sample and its number of samples.
    """

    n: int
    version: int
    fates: list[int | None]
    job: str = ""
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def open(self) -> list[int]:
        """The samples in flight."""
        return [sample for sample, fate in enumerate(self.fates) if fate is None]


class Books:
    """What became of each sample. Steps and versions are the trainer's; lengths are in tokens.

    first_version: the trainer's version when training began.
    """

    def __init__(self, first_version: int = 0) -> None:
        self.first_version = first_version
        self.accepted = 0
        """Samples accepted."""
        self.trained = 0
        """Samples trained."""
        self.dropped: Counter[str] = Counter()
        """Samples dropped, by reason."""
        self.marks: Counter[str] = Counter()
        """What was noted without dropping a sample: "stale" ones that were trained on, and so on."""
        self.steps: Counter[int] = Counter()
        """Samples trained, by step."""
        self.prompts: dict[int, Prompt] = {}
        """Prompts with samples in flight, by number."""
        self._ended: list[tuple[int, ...] | None] = []  # of each prompt its samples' fates as runs, once all have one
        self._spreads: dict[str, tuple[Spread, Spread]] = {}  # "trained" or a reason: lengths, rewards

    @property
    def numbers(self) -> int:
        """Prompts accepted; the number of the next one."""
        return len(self._ended)

    @property
    def in_flight(self) -> int:
        """Samples in flight."""
        return sum(prompt.fates.count(None) for prompt in self.prompts.values())

    @property
    def live(self) -> int:
        """Samples accepted and not dropped: what counts for the capacity."""
        return self.accepted - self.dropped.total()

    def accept(self, n: int, version: int, job: str = "") -> int:
        """Write down a prompt with `n` samples; returns its number."""
        if n < 1:
            raise InvalidField("n", n, "at least 1")
        number = self.numbers
        self.prompts[number] = Prompt(n, version, [None] * n, job)
        self._ended.append(None)
        self.accepted += n
        return number

    def withdraw(self, number: int) -> None:
        """Strike out the newest prompt: it was not accepted after all. Raises InvalidField for another one."""
        prompt = self.prompts.get(number)
        if prompt is None or number != self.numbers - 1 or len(prompt.open) < prompt.n:
            raise InvalidField("number", number, "the newest prompt, with all of its samples in flight")
        del self.prompts[number], self._ended[number]
        self.accepted -= prompt.n

    def train(
        self, number: int, samples: Iterable[int], step: int, outcomes: Mapping[int, tuple[int, float | None]] = {}
    ) -> None:
        """Samples of a prompt were trained on at `step`. outcomes: length and reward of each, as far as known.

        Raises InvalidField for a sample that is not in flight: nothing is trained twice. Nothing is noted then.
        """
        if step < 0:
            raise InvalidField("step", step, "0 or more")
        count = self._end(number, samples, step, "trained", outcomes)
        self.trained += count
        self.steps[step] += count

    def drop(
        self, number: int, samples: Iterable[int], why: Why, outcomes: Mapping[int, tuple[int, float | None]] = {}
    ) -> None:
        """Samples of a prompt were dropped. Raises InvalidField for a sample that is not in flight."""
        if why not in REASONS:
            raise InvalidField("why", why, ", ".join(REASONS))
        if count := self._end(number, samples, -1 - REASONS.index(why), why, outcomes):
            self.dropped[why] += count

    def fate(self, number: int, sample: int) -> str:
        """ "in flight", "trained at step 7", or "dropped: stale". Raises InvalidField for an unknown sample."""
        codes = self._codes(number)
        if not 0 <= sample < len(codes):
            raise InvalidField("sample", f"{number}.{sample}", f"prompt {number} has {len(codes)} samples")
        code = codes[sample]
        if code is None:
            return NO_FATE
        return f"trained at step {code}" if code >= 0 else f"dropped: {REASONS[-1 - code]}"

    def due(self, before: int) -> list[int]:
        """The prompts in flight that were accepted at version `before` or earlier."""
        return [number for number, prompt in self.prompts.items() if prompt.version <= before]

    # --- what goes into a checkpoint, and what is printed ----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data, also for JSON: a copy that later samples do not change."""
        return {
            "format": FORMAT,
            "first_version": self.first_version,
            "accepted": self.accepted,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "marks": dict(self.marks),
            "steps": [[step, count] for step, count in sorted(self.steps.items())],
            "prompts": [
                [number, it.version, list(it.fates), it.job, [list(one) for one in it.asked]]
                for number, it in self.prompts.items()
            ],
            "ended": [None if runs is None else [*runs] for runs in self._ended],
            "spreads": {name: [one.state() for one in both] for name, both in self._spreads.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` saw. Raises InvalidField for anything else."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else state
            raise InvalidField("state.format", found, f"{FORMAT}, as Books.state_dict makes it")
        read = Books()
        try:
            read.first_version, read.accepted, read.trained = (
                int(state[name]) for name in ("first_version", "accepted", "trained")
            )
            read.dropped, read.marks = (
                Counter({str(k): int(v) for k, v in state[n].items()}) for n in ("dropped", "marks")
            )
            read.steps = Counter({int(step): int(count) for step, count in state["steps"]})
            read._ended = [None if runs is None else tuple(map(int, runs)) for runs in state["ended"]]
            read.prompts = {
                int(number): Prompt(len(fates), int(version), list(fates), str(job), [(a, b, c) for a, b, c in asked])
                for number, version, fates, job, asked in state["prompts"]
            }
            read._spreads = {name: (Spread.of(a), Spread.of(b)) for name, (a, b) in state["spreads"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidField("state", type(error).__name__, f"what Books.state_dict made: {error}") from error
        read.check()
        self.__dict__.update(read.__dict__)

    def check(self) -> None:
        """Raises InvalidField unless accepted = trained + dropped + in flight, counted sample by sample."""
        if missing := [it for it, runs in enumerate(self._ended) if runs is None and it not in self.prompts]:
            raise InvalidField("prompts", sorted(self.prompts), f"prompt {missing[0]} too, which has not ended")
        found = Counter(self._told(code) for number in range(self.numbers) for code in self._codes(number))
        said = Counter({"trained": self.trained, NO_FATE: self.in_flight, **self.dropped})
        if +found != +said or found.total() != self.accepted or self.steps.total() != self.trained:
            raise InvalidField("books", dict(said), f"accepted={self.accepted}; sample by sample it is {dict(found)}")

    def report(self) -> dict[str, Any]:
        """Counts of samples, and length and reward of what was trained beside what was dropped, by reason."""
        return {
            "prompts": self.numbers,
            "accepted": self.accepted,
            "trained": self.trained,
            "dropped": {why: self.dropped[why] for why in REASONS if self.dropped[why]},
            "in_flight": self.in_flight,
            "marks": dict(self.marks),
            "steps": {"first": min(self.steps, default=None), "last": max(self.steps, default=None)},
            "lengths": {name: lengths.report() for name, (lengths, _) in self._spreads.items()},
            "rewards": {name: rewards.report() for name, (_, rewards) in self._spreads.items()},
        }

    # --- inside ----------------------------------------------------------------------------------------------------

    def _end(
        self,
        number: int,
        samples: Iterable[int],
        code: int,
        name: str,
        outcomes: Mapping[int, tuple[int, float | None]],
    ) -> int:
        """Give samples their fate; returns how many. Raises InvalidField before anything is noted."""
        chosen = list(samples)
        for place, sample in enumerate(chosen):
            if (told := self.fate(number, sample)) != NO_FATE or sample in chosen[:place]:
                raise InvalidField("sample", f"{number}.{sample}", f"a sample in flight, once; this one is {told}")
        if not chosen:
            return 0
        prompt = self.prompts[number]
        lengths, rewards = self._spreads.setdefault(name, (Spread(), Spread()))
        for sample in chosen:
            prompt.fates[sample] = code
            length, reward = outcomes.get(sample, (None, None))
            if length is not None:
                lengths.add(length)
            if reward is not None:
                rewards.add(reward)
        if None not in prompt.fates:
            self._ended[number] = _runs(prompt.fates)
            del self.prompts[number]
        return len(chosen)

    def _codes(self, number: int) -> list[int | None]:
        """The fates of a prompt's samples. Raises InvalidField for an unknown prompt."""
        if not 0 <= number < self.numbers:
            raise InvalidField("number", number, f"a prompt that was accepted: there are {self.numbers}")
        runs = self._ended[number]
        if runs is None:
            return self.prompts[number].fates
        return [code for code, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]

    def _told(self, code: int | None) -> str:
        return NO_FATE if code is None else "trained" if code >= 0 else REASONS[-1 - code]


def _runs(fates: list[int | None]) -> tuple[int, ...]:
    """Fates as runs: fate, how many samples have it, the next one's fate, and so on."""
    return tuple(
        value for code, same in itertools.groupby(fates) if code is not None for value in (code, sum(1 for _ in same))
    )
