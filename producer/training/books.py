"""The books: a ledger of a trainer's samples that goes into its checkpoints.

Every sample of every accepted prompt ends as trained (at a step) or dropped (for a reason), or is in flight. A prompt's
number is its place in the order of acceptance. So a trainer that is restored, together with its data loader, accepts
the same prompts under the same numbers.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from ...messages.arguments import whole_number
from ...messages.errors import InvalidField
from .spread import Spread

Why = Literal["stale", "filtered", "failed", "cancelled", "surplus"]
"""Why a sample was dropped. stale: too old when the trainer took it. filtered: its prompt's rewards taught nothing.
failed: no worker could generate it. cancelled: on request, or stopped. surplus: more was asked for than was needed."""
REASONS: tuple[Why, ...] = get_args(Why)
FORMAT = 1
MOST_VERSION = (1 << 53) - 1
"""The largest version: Redis' scripts compare versions as floats, which are exact up to here."""
REMEMBERED = 255
"""Updates whose versions are remembered, beside the newest one."""
COUNTERS = ("dropped", "marks", "steps", "staleness")
NUMBERS = ("version", "updates", "accepted", "trained")
NOTHING: Mapping[int, Any] = {}
NO_FATE = "in flight"


@dataclass(slots=True)
class Prompt:
    """A prompt that has samples in flight.

    n: samples accepted. spare: so many of them are more than were wanted. update: updates of the weights until it was
    accepted. fates: of each sample the step that trained on
    it, or its reason's place in REASONS as -1, -2, …; None for a sample in flight. job: what was asked for, as text
    that its owner understands. asked: the jobs that generate it, each with the samples it is for.
    """

    n: int
    spare: int
    update: int
    fates: list[int | None]
    job: str = ""
    asked: list[tuple[str, list[int]]] = field(default_factory=list)

    @property
    def open(self) -> list[int]:
        """The samples in flight."""
        return [sample for sample, fate in enumerate(self.fates) if fate is None]

    @property
    def trained(self) -> int:
        """Samples trained."""
        return sum(fate is not None and fate >= 0 for fate in self.fates)

    @property
    def needed(self) -> int:
        """Samples in flight that are wanted: others are spare."""
        open_ = self.fates.count(None)
        return max(0, min(self.n - self.spare - self.trained, open_)) if self.spare else open_


class Measured(NamedTuple):
    """What is known of a sample: length in tokens, reward, and staleness in updates."""

    length: int
    reward: float | None = None
    staleness: int | None = None


class Books:
    """What became of each sample, and the updates of the weights that the samples are compared with.

    version: the version that the trainer begins with.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = whole_number("version", version, 0, MOST_VERSION)
        """The trainer's newest version."""
        self.updates = 0
        """Updates of the weights since training began."""
        self._versions: list[int] = []  # that the newest updates made, in ascending order
        self.accepted = 0
        """Samples accepted."""
        self.trained = 0
        """Samples trained."""
        self.dropped: Counter[str] = Counter()
        """Samples dropped, by reason."""
        self.marks: Counter[str] = Counter()
        """What happened without an end of a sample: "marked", "waited", "asked again", "let through", "held up"; and
        "left out": samples that were dropped as more than a batch needed."""
        self.steps: Counter[int] = Counter()
        """Samples trained, by step."""
        self.staleness: Counter[int] = Counter()
        """Samples trained, by staleness, as far as it was told."""
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
        """Samples trained, and those in flight that are wanted: what counts for the capacity."""
        return self.trained + sum(it.needed for it in self.prompts.values())

    def advance(self, version: int) -> None:
        """The weights were updated and are version `version` now. Raises InvalidField unless it is a newer one."""
        if (version := whole_number("version", version, most=MOST_VERSION)) <= self.version:
            raise InvalidField("version", version, f"above {self.version}, the newest")
        self.version = version
        self.updates += 1
        self._versions = [*self._versions[-REMEMBERED:], version]

    def renumber(self, version: int) -> None:
        """The same weights are version `version` now: a restored trainer has to publish them under a new number."""
        if (version := whole_number("version", version, most=MOST_VERSION)) < self.version:
            allowed = f"at least {self.version}, the newest: publish as max(publisher.last_version, books.version) + 1"
            raise InvalidField("version", version, allowed)
        self.version = version

    def age(self, oldest: int | None) -> int:
        """The staleness of a sample: updates that made newer versions than `oldest`, that of its oldest token.

        Versions are compared with those of this trainer's updates. So the numbers may have gaps. None, for a sample
        without tokens, is 0. More than some hundred updates count as that many.
        """
        return 0 if oldest is None else len(self._versions) - bisect_right(self._versions, oldest)

    def accept(self, n: int, job: str = "", spare: int = 0) -> int:
        """Write down a prompt with `n` samples, `spare` of them more than are wanted; returns its number."""
        if not 0 <= spare < n:
            raise InvalidField("n", n, f"at least 1, and more than spare={spare}")
        number = self.numbers
        self.prompts[number] = Prompt(n, spare, self.updates, [None] * n, job)
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

    def train(self, number: int, samples: Iterable[int], step: int, known: Mapping[int, Measured] = NOTHING) -> None:
        """Samples of a prompt were trained on at `step`. known: what is known of them.

        Raises InvalidField for a sample that is not in flight: nothing is trained twice. Nothing is noted then.
        """
        step = whole_number("step", step, 0, MOST_VERSION)
        count = self._end(number, samples, step, "trained", known)
        self.trained += count
        self.steps[step] += count

    def drop(self, number: int, samples: Iterable[int], why: Why, known: Mapping[int, Measured] = NOTHING) -> None:
        """Samples of a prompt were dropped. Raises InvalidField for a sample that is not in flight."""
        if why not in REASONS:
            raise InvalidField("why", why, ", ".join(REASONS))
        if count := self._end(number, samples, -1 - REASONS.index(why), why, known):
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

    # --- what goes into a checkpoint, and what is printed ----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data, also for JSON: a copy that later samples do not change."""
        counters = {name: [[key, count] for key, count in getattr(self, name).items()] for name in COUNTERS}
        numbers = {name: getattr(self, name) for name in NUMBERS}
        return {
            "format": FORMAT,
            **numbers,
            **counters,
            "versions": [*self._versions],
            "prompts": [
                [number, it.spare, it.update, [*it.fates], it.job, [[job_id, [*these]] for job_id, these in it.asked]]
                for number, it in self.prompts.items()
            ],
            "ended": [None if runs is None else [*runs] for runs in self._ended],
            "spreads": {name: [one.state() for one in both] for name, both in self._spreads.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` saw. Raises InvalidField for anything else."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise InvalidField("state.format", found, f"{FORMAT}, as Books.state_dict makes it")
        read = Books()
        try:
            for name in NUMBERS:
                setattr(read, name, whole_number(name, state[name], 0, MOST_VERSION))
            for name in COUNTERS:
                kind = str if name in {"dropped", "marks"} else int
                setattr(read, name, Counter({kind(key): int(count) for key, count in state[name]}))
            read._versions = [int(version) for version in state["versions"]]
            read._ended = [None if runs is None else tuple(map(int, runs)) for runs in state["ended"]]
            read.prompts = {
                int(number): Prompt(
                    len(fates),
                    int(spare),
                    int(update),
                    [None if code is None else int(code) for code in fates],
                    str(job),
                    [(str(it), _some_of(len(fates), these)) for it, these in asked],
                )
                for number, spare, update, fates, job, asked in state["prompts"]
            }
            read._spreads = {name: (Spread.of(a), Spread.of(b)) for name, (a, b) in state["spreads"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidField("state", type(error).__name__, f"what Books.state_dict made: {error}") from error
        read.check()
        self.__dict__.update(read.__dict__)

    def check(self) -> None:
        """Raises InvalidField unless accepted = trained + dropped + in flight, counted sample by sample, and each
        number is one that can come about."""
        self._check_updates()
        self._check_counters()
        if missing := [it for it, runs in enumerate(self._ended) if runs is None and it not in self.prompts]:
            raise InvalidField("prompts", sorted(self.prompts), f"prompt {missing[0]} too, which has not ended")
        found: Counter[str] = Counter()
        for number, runs in enumerate(self._ended):
            fates = [(code, 1) for code in self.prompts[number].fates] if runs is None else _pairs(runs)
            for code, count in fates:
                found[self._told(code)] += count
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
            "updates": self.updates,
            "version": self.version,
            "steps": dict(sorted(self.steps.items())),
            "staleness": dict(sorted(self.staleness.items())),
            "lengths": {name: lengths.report() for name, (lengths, _) in self._spreads.items()},
            "rewards": {name: rewards.report() for name, (_, rewards) in self._spreads.items()},
        }

    # --- inside ----------------------------------------------------------------------------------------------------

    def _check_updates(self) -> None:
        whole_number("updates", self.updates, 0, self.version)  # each one made a newer version
        versions, count = self._versions, min(self.updates, REMEMBERED + 1)
        if len(versions) != count or versions != sorted(set(versions)) or (versions and versions[-1] > self.version):
            raise InvalidField("versions", versions, f"{count} in ascending order, at most version={self.version}")
        for number, prompt in self.prompts.items():
            whole_number(f"prompts[{number}].spare", prompt.spare, 0, prompt.n - 1)
            whole_number(f"prompts[{number}].update", prompt.update, 0, self.updates)

    def _check_counters(self) -> None:
        for name in COUNTERS:
            for key, count in getattr(self, name).items():
                whole_number(f"{name}[{key!r}]", count, 0)
        for step in self.steps:
            whole_number("steps", step, 0)
        if self.staleness.total() > self.trained:
            raise InvalidField("staleness", dict(self.staleness), f"at most trained={self.trained} samples")
        if wrong := self._spreads.keys() - {"trained", *REASONS}:
            raise InvalidField("spreads", sorted(wrong), f"trained, {', '.join(REASONS)}")

    def _end(self, number: int, samples: Iterable[int], code: int, name: str, known: Mapping[int, Measured]) -> int:
        """Give samples their fate; returns how many. Raises InvalidField before anything is noted."""
        chosen = list(samples)
        for place, sample in enumerate(chosen):
            if (told := self.fate(number, sample)) != NO_FATE or sample in chosen[:place]:
                raise InvalidField("sample", f"{number}.{sample}", f"a sample in flight, once; this one is {told}")
        if not chosen:
            return 0
        measured = {sample: _plain(f"{number}.{sample}", known[sample]) for sample in chosen if sample in known}
        prompt = self.prompts[number]
        lengths, rewards = self._spreads.setdefault(name, (Spread(), Spread()))
        for sample in chosen:
            prompt.fates[sample] = code
            if (it := measured.get(sample)) is not None:
                lengths.add(it.length)
                if it.reward is not None:
                    rewards.add(it.reward)
                if it.staleness is not None and code >= 0:
                    self.staleness[it.staleness] += 1
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
        return [code for code, count in _pairs(runs) for _ in range(count)]

    def _told(self, code: int | None) -> str:
        if code is None:
            return NO_FATE
        if code < -len(REASONS):
            raise InvalidField("fates", code, f"a step, or -1 to {-len(REASONS)}")
        return "trained" if code >= 0 else REASONS[-1 - code]


def _runs(fates: list[int | None]) -> tuple[int, ...]:
    """Fates as runs: fate, how many samples have it, the next one's fate, and so on."""
    return tuple(
        value for code, same in itertools.groupby(fates) if code is not None for value in (code, sum(1 for _ in same))
    )


def _some_of(n: int, samples: Iterable[Any]) -> list[int]:
    """Samples of a prompt with n of them. Raises InvalidField unless each is one, and there once."""
    found = [whole_number("asked", sample, 0, n - 1) for sample in samples]
    if len(set(found)) < len(found) or not found:
        raise InvalidField("asked", found, "a job's samples, each once")
    return found


def _pairs(runs: tuple[int, ...]) -> list[tuple[int | None, int]]:
    """What `_runs` made, as (fate, count). Raises InvalidField for anything else."""
    if len(runs) % 2 or any(count < 1 for count in runs[1::2]):
        raise InvalidField("ended", runs, "fates, each with how many samples have it")
    return list(zip(runs[::2], runs[1::2], strict=True))


def _plain(sample: str, known: Measured) -> Measured:
    """The same in Python's numbers."""
    length, reward, staleness = known
    try:
        if isinstance(reward, str | bytes):
            raise TypeError
        return Measured(
            whole_number("length", length, 0),
            None if reward is None else float(reward),
            None if staleness is None else whole_number("staleness", staleness),
        )
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of several values
        raise InvalidField("reward", reward, f"a number or None, for sample {sample}") from error
