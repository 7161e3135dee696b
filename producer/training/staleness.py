"""Staleness, declared once: what may be submitted, what may be claimed, and what becomes of stale samples.

The rule at submission is AReaL's (Fu et al. 2025, arXiv:2505.24298, section 5.1): the samples that were accepted and
not dropped are at most (eta + updates + 1) x batch_size, where `updates` counts the trainer's updates of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from ...messages.arguments import whole_number
from ...messages.errors import InvalidField
from ...messages.model import GenerateJob

OnStale = Literal["drop", "mark", "wait"]


@dataclass(frozen=True, slots=True)
class Staleness:
    """How far the weights that sampled a sample may be behind those that train on it.

    A sample's staleness is the number of updates between the weights that sampled its oldest token and those that the
    trainer has when it takes the sample.

    eta: the largest staleness that a sample may have. 0 is synchronous training.
    batch_size: samples that the trainer trains on for each update.
    on_stale: what becomes of a sample that is stale when the trainer takes it. "drop": it is dropped, and another
        prompt may be submitted for it. "mark": the trainer gets it, and it is counted. "wait": the trainer gets it,
        too, but it waits for old samples before it takes younger ones, as far as the old ones would get stale
        otherwise. As long as it trains on `batch_size` samples for each update, no sample is stale then.
    Raises InvalidField.
    """

    eta: int
    batch_size: int
    on_stale: OnStale = "drop"

    def __post_init__(self) -> None:
        for name, least in (("eta", 0), ("batch_size", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.on_stale not in get_args(OnStale):
            raise InvalidField("on_stale", self.on_stale, '"drop", "mark" or "wait"')

    def capacity(self, updates: int, live: int) -> int:
        """How many more samples may be submitted.

        updates: those since training began. live: samples accepted by now, less those that were dropped.
        """
        return max(0, (self.eta + updates + 1) * self.batch_size - live)

    def check(self, job: GenerateJob) -> None:
        """Raises InvalidField for a job for which there is never room, or that wants one version."""
        if job.exact_version is not None:
            raise InvalidField("exact_version", job.exact_version, "None: a feed says how old weights may be")
        if job.n > (most := (self.eta + 1) * self.batch_size):
            raise InvalidField("n", job.n, f"at most (eta + 1) x batch_size = {most}: there is never room for more")

    def bound(self, job: GenerateJob, version: int) -> GenerateJob:
        """The job with what makes workers with older weights leave it alone; a stricter bound of its own stays.

        version: the trainer's. `max_staleness` becomes eta. If `needs_newest`, the job also starts only on `version` or
        newer weights: of the adapter, if the job names one.
        """
        own = self.eta if job.max_staleness is None else job.max_staleness
        bounds = {"max_staleness": min(own, self.eta)}
        if self.needs_newest:
            least = "min_version" if job.lora is None else "min_adapter_version"
            bounds[least] = max(getattr(job, least), version)
        return job.model_copy(update=bounds)

    @property
    def full(self) -> str:
        """What whoever waits for room is told."""
        return f"{self} lets in no more before the next update: publish each one, and call advance()"

    @property
    def needs_newest(self) -> bool:
        """Whether jobs start on the weights that the trainer had when they were accepted, or on newer ones.

        Under "wait" it is only then known in time when their samples become stale. Under "drop" samples that begin with
        older weights, while the update is on its way to the workers, would mostly be dropped. Under "mark" none is.
        """
        return self.on_stale != "mark"

    def is_stale(self, staleness: int) -> bool:
        """Whether a sample of this staleness is too old to train on."""
        return staleness > self.eta

    def too_late(self, left: Iterable[tuple[int, int]], room: int = 0) -> bool:
        """Whether some samples would be stale if the others were trained first, whatever comes afterwards.

        left: prompts in flight that this update does not train, each by its age, the updates since it was accepted,
        and its samples. room: samples that this update may train beside what it has. A prompt of age a can still be
        trained at eta - a later updates. So all prompts of age a or more have to fit into so many batches.
        """
        by_age: Counter[int] = Counter()
        for age, samples in left:
            by_age[age] += samples
        older = 0
        for age in sorted(by_age, reverse=True):
            older += by_age[age]
            if older > max(0, self.eta - age) * self.batch_size + room:
                return True
        return False
