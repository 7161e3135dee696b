"""Streams: what a job generates while it runs, as deltas of its samples."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from redis.exceptions import RedisError

from ...messages import decode
from ...messages.broker import PIECES_COUNT, Broker
from ...messages.errors import JobFailed, MessageError
from ...messages.model import GenerateJob, JobFailure, Partial, RolloutResult, Segment, cut_segments, join_segments
from ..core import ClientCore, nothing_left
from ..inbox import Handle, HandOut, News, Together

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delta:
    """The tokens that a sample got since its last delta. The deltas of a sample come in order and without gaps.

    start: tokens of the sample before these. token_ids: (t,) int32. logprobs: (t,) float32, as in RolloutResult; None
    if the job is known not to ask for them. segments: which weights sampled them; adapter_segments: which version of
    the adapter, None without one. token_arrays: one row per token, of what the job asked for.
    text: what they add to the text of a job that has one, else None.
    restarted: earlier deltas of this sample are void; this one has all of it from the start.
    result: the whole sample, in its last delta; None in the others.
    """

    job_id: str
    sample: int
    start: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None
    segments: tuple[Segment, ...]
    adapter_segments: tuple[Segment, ...] | None = None
    token_arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    text: str | None = None
    restarted: bool = False
    result: RolloutResult | None = None


class Streams:
    """A client's streamed jobs."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._read = {part: Together(partial(_pieces, part)) for part in core.broker.parts}
        self._news = News(core.shards, core.client_id, core.reader.wake_for)

    async def close(self) -> None:
        """Stop listening; who still iterates gets a RolloutMQError when the client is closed."""
        await self._news.close()

    async def of(
        self, job: GenerateJob | Handle, timeout: float | None, hold: list[HandOut] | None = None
    ) -> AsyncGenerator[Delta]:
        """See RolloutClient.stream. hold: outcomes are put there instead of being acknowledged."""
        core = self._core
        await core.open()
        job_id = job.job_id if isinstance(job, Handle) else job.id
        with core.inbox.reserved(job_id), self._news.follow(job_id):  # others may take what the stream leaves
            if not isinstance(job, Handle):
                job = await core.submit(job.model_copy(update={"stream": True}))
            async for delta in self._deltas(job, timeout, hold):
                yield delta

    async def _deltas(self, job: Handle, timeout: float | None, hold: list[HandOut] | None) -> AsyncGenerator[Delta]:
        core, inbox, news, job_id = self._core, self._core.inbox, self._news, job.job_id
        watched = {sample: Watched(job_id, sample) for sample in range(job.n)}
        came = time.monotonic()
        while True:
            # What is left of the time since something came: News has us look every second even if there is nothing.
            left = None if timeout is None else max(0.0, came + timeout - time.monotonic())
            await core.until(lambda: news.fresh(job_id) or job_id in inbox.stirred, left, job_id)
            if (tracked := inbox.tracked(job_id)) is None:
                raise nothing_left(job)
            if news.fresh(job_id):
                news.looked(job_id)
                async for delta in self._saved(job_id, watched):
                    yield delta
                    came = time.monotonic()
            ended = tracked.ended
            while replies := inbox.take_job(job_id, 1):  # one by one: others may take what this loop does not reach
                outcome = replies[0].outcome
                if isinstance(outcome, JobFailure) and hold is None:
                    core.hand_over(replies)
                    raise JobFailed(outcome)
                out = core.hand_out(replies)
                if hold is not None:
                    hold.append(out)
                if isinstance(outcome, JobFailure):
                    raise JobFailed(outcome)
                assert isinstance(outcome, RolloutResult)
                if (one := watched.pop(outcome.sample, None)) is not None:
                    yield one.finish(outcome)
                if hold is None:
                    out.acknowledge()
                came = time.monotonic()
            if ended:
                return

    async def _saved(self, job_id: str, watched: dict[int, Watched]) -> AsyncIterator[Delta]:
        """Deltas of what is saved of these samples and was not shown."""
        look = list(watched)
        read = next(read for part, read in self._read.items() if part.has(job_id))
        while look:
            found = await read((job_id, {sample: watched[sample].place for sample in look}))
            look = []
            for sample, pieces in found.items():
                delta, more = watched[sample].take(pieces)
                if more:
                    look.append(sample)
                if delta is not None:
                    yield delta


async def _pieces(
    broker: Broker, asked: Sequence[tuple[str, Mapping[int, int]]]
) -> Sequence[dict[int, list[bytes]] | Exception]:
    """As Broker.read_pieces; nothing while Redis is away. `News` has them read later, and the results have it all."""
    try:
        return await broker.read_pieces(asked)
    except (RedisError, OSError) as error:
        log.warning("what is saved of %d streamed jobs cannot be read: %s", len(asked), error)
        return [{} for _ in asked]


class Watched:
    """Makes the deltas of one sample, from its saved pieces and its result.

    Workers save a sample in pieces, and may save all of it anew, as the same tokens in one piece or as others. So when
    the last known piece is gone, what is read is compared with what was shown.
    """

    def __init__(self, job_id: str, sample: int) -> None:
        self._job_id, self._sample = job_id, sample
        self._pieces = 0  # that are known
        self._last = b""  # of them, encoded
        self._anew: list[Partial] | None = None  # all pieces, while they are not more than what was shown
        self._read = 0  # tokens in the known pieces
        self._ids: list[npt.NDArray[np.int32]] = []  # shown
        self._versions: list[npt.NDArray[np.int64]] = []
        self._text = ""
        self._tokens = 0

    @property
    def place(self) -> int:
        """The piece to read from: the last one that is known, to see whether it is still the same."""
        return max(0, self._pieces - 1)

    def take(self, pieces: Sequence[bytes]) -> tuple[Delta | None, bool]:
        """Take in what was read from `place` on. Returns what is new, and whether to read again at once."""
        if self._pieces and (not pieces or pieces[0] != self._last):
            self._begin_anew()
            return None, bool(pieces)
        fresh = pieces[1:] if self._pieces else pieces
        parts: list[Partial] = []
        for piece in fresh:
            try:
                part = decode(piece, Partial)
            except MessageError as error:
                log.warning("a piece of job %s cannot be read: %s", self._job_id, error)
                part = None
            if part is None or part.start != self._read or not len(part.token_ids):
                self._begin_anew()  # as the next worker will
                return None, False
            parts.append(part)
            self._read += len(part.token_ids)
        if fresh:
            self._pieces, self._last = self._pieces + len(fresh), fresh[-1]
        more = len(pieces) >= PIECES_COUNT
        if self._anew is None:
            return (self._show(self._joined(parts)) if parts else None), more
        self._anew += parts
        return (None, True) if more else (self._compare(), False)

    def finish(self, result: RolloutResult) -> Delta:
        """The sample's last delta."""
        logprobs, segments, adapter_segments = result.logprobs, result.segments, result.adapter_segments
        whole = self._delta(
            result.token_ids, logprobs, segments, adapter_segments, dict(result.token_arrays), result.text
        )
        if self._fits(whole) and len(whole.token_ids) >= self._tokens:
            return self._show(_after(whole, self._tokens, len(self._text)), result=result)
        return self._restart(whole, result)

    def _begin_anew(self) -> None:
        self._pieces, self._last, self._read, self._anew = 0, b"", 0, []

    def _compare(self) -> Delta | None:
        if not self._anew:
            return None
        whole = self._joined(self._anew)
        if not self._fits(whole):
            self._anew = None
            return self._restart(whole)
        if len(whole.token_ids) <= self._tokens:
            return None
        self._anew = None
        return self._show(_after(whole, self._tokens, len(self._text)))

    def _fits(self, whole: Delta) -> bool:
        """Whether `whole` begins with what was shown, as far as it goes."""
        if not self._tokens:
            return True
        both = min(self._tokens, len(whole.token_ids))
        text = whole.text or ""
        return (
            np.array_equal(np.concatenate(self._ids)[:both], whole.token_ids[:both])
            and np.array_equal(np.concatenate(self._versions)[:both], versions_of(whole.segments)[:both])
            and (text.startswith(self._text) or (both < self._tokens and self._text.startswith(text)))
        )

    def _restart(self, whole: Delta, result: RolloutResult | None = None) -> Delta:
        shown = self._tokens > 0
        self._ids, self._versions, self._text, self._tokens = [], [], "", 0
        return self._show(whole, restarted=shown, result=result)

    def _show(self, new: Delta, restarted: bool = False, result: RolloutResult | None = None) -> Delta:
        start = self._tokens
        self._ids.append(new.token_ids)
        self._versions.append(versions_of(new.segments))
        self._text += new.text or ""
        self._tokens += len(new.token_ids)
        return replace(new, start=start, restarted=restarted, result=result)

    def _joined(self, parts: Sequence[Partial]) -> Delta:
        """Pieces in order, at least one."""
        texts = [part.text for part in parts]
        adapters = [part.adapter_segments for part in parts]
        return self._delta(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            tuple(join_segments(segment for part in parts for segment in part.segments)),
            None if None in adapters else tuple(join_segments(it for part in adapters for it in part or ())),
            {name: np.concatenate([part.token_arrays[name] for part in parts]) for name in parts[0].token_arrays},
            None if None in texts else "".join(text or "" for text in texts),
        )

    def _delta(self, *tokens: Any) -> Delta:
        """What is known of the sample from its start. tokens: Delta's fields `token_ids` to `text`."""
        return Delta(self._job_id, self._sample, 0, *tokens)


def versions_of(segments: Sequence[Segment]) -> npt.NDArray[np.int64]:
    """(t,): of each token."""
    return np.repeat([v for v, _ in segments], [n for _, n in segments]).astype(np.int64)


def _after(whole: Delta, tokens: int, chars: int) -> Delta:
    """Without the first `tokens` tokens and the first `chars` characters of text."""
    adapter = whole.adapter_segments
    return replace(
        whole,
        token_ids=whole.token_ids[tokens:],
        logprobs=None if whole.logprobs is None else whole.logprobs[tokens:],
        segments=tuple(cut_segments(whole.segments, start=tokens)),
        adapter_segments=None if adapter is None else tuple(cut_segments(adapter, start=tokens)),
        token_arrays={name: rows[tokens:] for name, rows in whole.token_arrays.items()},
        text=None if whole.text is None else whole.text[chars:],
    )
