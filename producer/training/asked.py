"""A prompt that is being generated: the jobs that were submitted for it, what came, and what is still missing."""

from __future__ import annotations

import base64
import hashlib

from ...messages.codec import decode, encode
from ...messages.errors import InvalidField, MessageError
from ...messages.ids import derived_id
from ...messages.model import GenerateJob, JobFailure, RolloutResult
from .books import Prompt, Why
from .groups import GroupRules

NUMBERS = 1 << 40
"""Prompts' numbers are below this. Ids that are made by time are above it, until the year 2527 of their layout ends."""
_SEEDS = 1 << 63


def number_of(job_id: str) -> int | None:
    """The number of the prompt that a job was submitted for; None for jobs that no feed submitted."""
    number = int(job_id[:12], 16)
    return number if number < NUMBERS else None


class Asked:
    """One prompt in flight.

    Its jobs' ids follow from the client, the prompt's number, the job and how often it was asked for. So a restored
    trainer that asks for the same prompt gets what is there of it in the pool, and never something of another prompt.

    here: samples that have arrived, in the order of their arrival. wanted: samples that the trainer is to get, less
    those that it was trained on when a checkpoint was made. waiting: jobs that have not ended, each with the samples it
    is for. stopped: of those, the ones that were asked to end with what they have.
    scoring: samples whose rewards are awaited. given: samples that were made ready for the trainer. complete: nothing
    more is to come.
    """

    def __init__(self, client_id: str, number: int, job: GenerateJob, prompt: Prompt, rules: GroupRules) -> None:
        self.number, self.job, self.prompt = number, job, prompt
        self.here: dict[int, RolloutResult] = {}
        self.failures: list[JobFailure] = []
        self.waiting = dict(prompt.asked)
        self.stopped: set[str] = set()
        self.given: set[int] = set()
        self.scoring: set[int] = set()
        self.complete = False
        self.wanted = prompt.n - prompt.spare - prompt.trained
        self._client_id, self._rules = client_id, rules
        self._kept: dict[int, bool] = {}  # what `keep` has said of samples that are here
        self._failed: list[JobFailure] = []  # since the last time it was asked for
        self._retries = 0

    @classmethod
    def restored(cls, client_id: str, number: int, prompt: Prompt, rules: GroupRules) -> Asked:
        """A prompt of a checkpoint. Raises InvalidField if its job cannot be read."""
        try:
            job = decode(base64.b64decode(prompt.job), GenerateJob)
        except (MessageError, ValueError) as error:
            raise InvalidField("state.prompts", f"prompt {number}", f"a job that can be read: {error}") from error
        return cls(client_id, number, job, prompt, rules)

    def ask(self, samples: list[int]) -> GenerateJob:
        """The job for these samples; it counts as submitted."""
        job = self.again(len(self.prompt.asked), samples)
        self.prompt.asked.append((job.id, samples))
        self.waiting[job.id] = samples
        return job

    def again(self, place: int, samples: list[int]) -> GenerateJob:
        """The job of `place` among those that were submitted for this prompt."""
        told = f"{self._client_id}/{self.number}/{place}/{samples}/".encode() + base64.b64decode(self.prompt.job)
        fields = {"id": derived_id(self.number, hashlib.blake2b(told, digest_size=10).digest()), "n": len(samples)}
        if self.job.seed is not None and place and self.job.exact_version is None:
            # Sample i gets its seed from i: these are other samples. A reproducible run asks for all of them again.
            fields["seed"] = (self.job.seed + place * self.prompt.n) % _SEEDS
        return self.job.model_copy(update=fields)

    def arrived(self, job_id: str, result: RolloutResult) -> int | None:
        """Take in a sample; returns its number, or None if it has a fate or was here before."""
        samples = self.waiting[job_id]
        sample = samples[result.sample] if result.sample < len(samples) else None
        if sample is None or self.prompt.fates[sample] is not None or sample in self.here:
            return None
        result.learn(self.job.token_ids, self.job.metadata)
        self.here[sample] = result
        return sample

    def judge(self) -> None:
        """Ask `GroupRules.keep` about what has come. Raises what it raises, and can be called again."""
        for sample, result in self.here.items():
            if sample not in self._kept:
                self._kept[sample] = self._rules.keep is None or self._rules.keep(result)

    def failed(self, failure: JobFailure) -> None:
        """A job ended without all of its samples."""
        self.failures.append(failure)
        self._failed.append(failure)

    @property
    def kept(self) -> list[int]:
        """The samples that may be in the group."""
        return [sample for sample in self.here if self._kept[sample]]

    @property
    def whole(self) -> list[int]:
        """Of those, the ones that were not stopped early."""
        return [sample for sample in self.kept if self.here[sample].finish_reason != "abort"]

    @property
    def missing(self) -> list[int]:
        """Samples in flight that are not here."""
        return [sample for sample in self.prompt.open if sample not in self.here]

    @property
    def chosen(self) -> list[int]:
        """The samples for the trainer, of those that are here. None of them is unchosen when others come."""
        chosen = self.whole[: self.wanted]
        if self._rules.partials:
            chosen += [sample for sample in self.kept if sample not in self.whole]
        return chosen

    @property
    def to_give(self) -> tuple[int, ...]:
        """Of those, the ones that were neither given nor are being scored."""
        return tuple(sorted(set(self.chosen) - self.given - self.scoring))

    def not_chosen(self) -> dict[Why, list[int]]:
        """The open samples of a complete prompt that the trainer does not get, by the reason."""
        chosen = self.chosen
        enough = len(self.whole) >= self.wanted
        cancelled = any(failure.outcome == "cancelled" for failure in self.failures)
        found: dict[Why, list[int]] = {}
        for sample in self.prompt.open:
            if sample in chosen:
                continue
            if not self._kept.get(sample, True):
                why: Why = "filtered"
            elif enough:
                why = "surplus"
            else:
                why = "cancelled" if cancelled or sample in self.here else "failed"
            found.setdefault(why, []).append(sample)
        return found

    @property
    def lacks(self) -> str:
        """Why a prompt of a reproducible run is not as it has to be, now that nothing more comes; "" if it is."""
        stopped = any(it.finish_reason == "abort" for it in self.here.values())
        if self.job.exact_version is None or not (self.missing or stopped):
            return ""
        what = f"samples {self.missing}" if self.missing else "what was stopped"
        why = f": {self.failures[-1]}" if self.failures else ""
        return f"prompt {self.number} lacks {what}, without which a reproducible run does not go on{why}"

    def to_ask(self) -> list[int]:
        """The samples to ask for again, now that all jobs have ended; none if the group has to do without."""
        missing = self.missing
        if not missing or len(self.whole) >= self.wanted:
            return []
        failed, self._failed = self._failed, []
        if failed:  # what is missing without a failure is lost, not failed: it is always asked for again
            if self._rules.on_failed == "less" or self._retries >= self._rules.retries:
                return []
            if any(failure.outcome == "cancelled" for failure in failed):
                return []
            self._retries += 1
        if self.job.exact_version is not None:
            return list(range(self.prompt.n))
        return missing[: self.wanted - len(self.whole)]


def as_text(job: GenerateJob) -> str:
    """The job for the books. It has neither its id nor the client's."""
    plain = job.model_copy(update={"id": derived_id(0, bytes(10)), "reply_to": ""})
    return base64.b64encode(encode(plain)).decode()
