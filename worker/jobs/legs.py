"""One engine request of a job, which weights sampled which of its tokens, and what every run of a job has."""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ...messages.model import GenerateJob, Segment, TaskJob, Timings
from ..engine import EngineInfo
from .traces import JobTraces

J = TypeVar("J", GenerateJob, TaskJob)


@dataclass(slots=True)
class Leg:
    """A request from when it is made until its output is taken in.

    version: of the weights it began under. switching: weights are being switched right now, and nobody can say yet
    which version sampled its newest tokens. spoiled: nobody ever will; what it generated must not be used.
    """

    request_id: str
    version: int
    switching: bool = False
    spoiled: bool = False
    _switches: list[Segment] = field(default_factory=list)  # what was sampled up to each switch
    _in_place: set[int] = field(default_factory=set)
    _computed: set[int] = field(default_factory=set)

    def switch(self, version: int, count: int, *, anew: bool = False) -> None:
        """Tokens from number `count` of this leg on are sampled by `version`; the earlier ones keep theirs.

        anew: `version` computes the whole cache that it samples them on.
        """
        before = sum(segment.tokens for segment in self._switches)
        count = max(0, count, before)
        self._switches.append(Segment(self.version, count - before))
        self.version = version
        if anew:
            self._computed.add(count)
            self._in_place.discard(count)
        else:
            self._in_place.add(count)

    @property
    def crossed(self) -> bool:
        """Whether the weights were switched while its request was in the engine."""
        return bool(self._switches)

    def segments(self, count: int) -> list[Segment]:
        """The versions of the leg's first `count` tokens. Switches beyond them do not appear: they came too late."""
        found: list[Segment] = []
        for version, tokens in self._switches:
            if taken := min(tokens, count):
                found.append(Segment(version, taken))
                count -= taken
        if count:
            found.append(Segment(self.version, count))
        return found

    def in_place(self, count: int) -> list[int]:
        """The first token after each switch, ascending, among the leg's first `count`, but where `computed` has it all.

        A token that both have was switched again while the cache before it was being computed.
        """
        return sorted(token for token in self._in_place if token < count)

    def computed(self, count: int) -> list[int]:
        """The tokens among the leg's first `count` before which newer weights have computed the whole cache anew."""
        return sorted(token for token in self._computed if 0 < token < count)


@dataclass(slots=True)
class JobRun(Generic[J]):
    """Sample or input number `index` of a claimed job, on its way through the engine.

    prompt: (p,) int32, what the engine reads; of a task all of its input. attempt: the claim it runs under.
    """

    job: J
    prompt: npt.NDArray[np.int32]
    index: int
    attempt: int
    queued_s: float
    _: KW_ONLY
    dropped: bool = False  # cancelled, expired or fenced: what it still generates is thrown away
    ending: bool = False  # somebody asked to have it as it is: it ends with what it has
    moving: bool = False  # on its way to another worker: it does not run on here
    leg: Leg | None = None  # the one that is in the engine now
    retries: int = 0  # after the engine's memory was not enough
    traces: JobTraces | None = None  # told of each of its legs; None if traces are off
    _legs: int = 0
    _engine_s: float = 0.0
    _born: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """Seconds since it came to this worker."""
        return max(0.0, time.monotonic() - self._born)

    @property
    def engine_s(self) -> float:
        """Seconds in the engine so far, of all legs that have ended."""
        return self._engine_s

    def begin_leg(self, version: int) -> str:
        """Set `leg`, and return its request id: 44 digits for job (32), sample (4), attempt (4) and leg (4)."""
        self._legs += 1
        request_id = f"{self.job.id}{self.index:04x}{self.attempt & 0xFFFF:04x}{self._legs & 0xFFFF:04x}"
        self.leg = Leg(request_id, version)
        return request_id

    def common(self, worker_id: str, info: EngineInfo) -> dict[str, Any]:
        """The fields that results of all kinds have."""
        job = self.job
        timings = Timings(
            queued=max(0.0, self.queued_s),
            generating=self._engine_s,
            waiting=max(0.0, self.age_s - self._engine_s),
        )
        names = {"job_id": job.id, "sample": self.index, "n": job.n, "group_id": job.group, "attempt": self.attempt}
        told = {"worker_id": worker_id, "timings": timings, "fingerprint": dict(info.fingerprint())}
        return {**names, **told, "metadata": job.metadata, "trace_id": job.trace_id}
