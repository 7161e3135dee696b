"""One sample on its way: the legs it was generated in, and which weights sampled which of its tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..messages.jobs import GenerateJob
from ..messages.results import Partial, RolloutResult, Segment, Timings
from .engine import EngineInfo, EngineOutput, EngineRequest, FinishReason


@dataclass(slots=True)
class SampleRun:
    """Sample `index` of a claimed job, across interruptions, weight updates and earlier workers.

    prompt: (p,) int32. attempt: the claim it runs under.
    """

    job: GenerateJob
    prompt: npt.NDArray[np.int32]
    index: int
    attempt: int
    queued_s: float
    dropped: bool = False  # cancelled, expired or fenced: what it still generates is thrown away
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    segments: list[Segment] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    _legs: int = 0
    _generating_s: float = 0.0
    _born: float = field(default_factory=time.monotonic)

    def resume_from(self, partial: Partial) -> None:
        """Go on where another worker, or an earlier attempt, had to let go."""
        self.tokens, self.logprobs = partial.token_ids, partial.logprobs
        self.segments = list(partial.segments)

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.job.sampling.max_new_tokens - len(self.tokens)

    def next_request(self, version: int) -> EngineRequest:
        """The next leg: the prompt and what there is of the answer, under weights `version`.

        Request ids are 44 digits: job (32), sample (4), attempt (4), leg (4); the first 36 name the sample.
        """
        self._legs += 1
        if self.segments and self.segments[-1].version > version:
            # Released by a worker that was ahead of this one. Versions never decrease within a sample: start over.
            self.tokens, self.logprobs, self.segments = self.tokens[:0], self.logprobs[:0], []
        return EngineRequest(
            request_id=f"{self.job.id}{self.index:04x}{self.attempt & 0xFFFF:04x}{self._legs & 0xFFFF:04x}",
            token_ids=np.concatenate([self.prompt, self.tokens]) if len(self.tokens) else self.prompt,
            sampling=self.job.sampling,
            max_new_tokens=self.remaining,
            cache_key=str(version),
        )

    def absorb(self, output: EngineOutput, version: int, seconds: float) -> None:
        """Take in a leg that `version` generated, finished or not."""
        self._generating_s += seconds
        if count := len(output.token_ids):
            self.tokens = np.concatenate([self.tokens, output.token_ids])
            self.logprobs = np.concatenate([self.logprobs, output.logprobs])
            if self.segments and self.segments[-1].version == version:
                self.segments[-1] = Segment(version, self.segments[-1].tokens + count)
            else:
                self.segments.append(Segment(version, count))
        if output.finish_reason != "abort":
            self.finish_reason, self.matched_stop = output.finish_reason, output.matched_stop
        elif self.remaining <= 0:
            self.finish_reason = "length"  # the abort hit it on its very last token

    def partial(self) -> Partial | None:
        """What the next worker can continue from; None if there is nothing yet."""
        if not len(self.tokens):
            return None
        return Partial(token_ids=self.tokens, logprobs=self.logprobs, segments=tuple(self.segments))

    def result(self, worker_id: str, info: EngineInfo, text: str | None) -> RolloutResult:
        """The finished sample as it is published."""
        assert self.finish_reason in {"stop", "length"}
        job = self.job
        return RolloutResult(
            job_id=job.id,
            sample=self.index,
            n=job.n,
            group_id=job.group,
            token_ids=self.tokens,
            logprobs=self.logprobs if job.logprobs.sampled else None,
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            segments=tuple(self.segments),
            worker_id=worker_id,
            attempt=self.attempt,
            prompt_ids=None if job.token_ids is not None else self.prompt,
            text=text,
            timings=Timings(
                queued=max(0.0, self.queued_s),
                generating=self._generating_s,
                waiting=max(0.0, time.monotonic() - self._born - self._generating_s),
            ),
            fingerprint=dict(info.fingerprint()),
            metadata=job.metadata,
            trace_id=job.trace_id,
        )
