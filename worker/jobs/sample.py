"""One sample on its way: the legs it was generated in, and which weights sampled which of its tokens."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.broker import Piece
from ...messages.errors import InvalidField
from ...messages.model import GenerateJob, Partial, RolloutResult, Segment, cut_segments, join_segments
from ..engine import (
    NOTHING_MORE,
    AdapterUse,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Generated,
    LoadedAdapters,
    MatchedStop,
    Wanted,
)
from ..text import SampleStream
from .legs import JobRun, Leg

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SampleRun(JobRun[GenerateJob]):
    """One sample, across interruptions, weight updates and earlier workers.

    adapters: the engine's, of which the job may name one.
    starts_over: an interrupted one is generated anew, because it cannot go on, or not exactly as it would have; see
        EngineRequest.media and EngineInfo.starts_over.

    A sample keeps the adapter version that it began with. If that version is gone, on another worker or after a restart
    of the engine, the next leg takes a newer one, and `adapter_segments` says so.
    """

    done: Generated = field(default_factory=Generated)  # by the legs that have ended
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # as RolloutResult has them, when known
    segments: list[Segment] = field(default_factory=list)
    legs: list[int] = field(default_factory=list)  # as RolloutResult has them
    in_place: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: MatchedStop | None = None
    stop_tokens: int = 0  # how many of the last ones have a part of what was matched
    stop_text: str = ""  # from where the match begins, as EngineOutput has it
    stream: SampleStream | None = None  # of a job whose client is told of every piece
    cached_tokens: int = 0  # of the prompt, when the first leg here began
    adapters: LoadedAdapters | None = None
    starts_over: bool = False
    adapter_segments: list[Segment] = field(default_factory=list)
    _adapter: AdapterUse | None = None
    saved_at: float = field(default_factory=time.monotonic)
    _saved: int = 0  # tokens that the pool has
    pieces: int = 0  # in so many pieces
    _arrays_saved: bool = False  # and the arrays
    _wanted: Wanted = NOTHING_MORE
    _offered: tuple[Piece, float] | None = None  # the next one, perhaps on its way, and when it was made

    def __post_init__(self) -> None:
        self._wanted = _wanted(self.job, self.index)
        self.starts_over |= bool(self.job.media)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """(n,) int32: what the legs that have ended generated."""
        return self.done.token_ids

    @property
    def known_tokens(self) -> int:
        """Tokens generated so far, as of the last leg that ended or was saved; a running leg may have more."""
        return max(len(self.done), self._saved)

    def resume_from(self, pieces: Sequence[Partial]) -> None:
        """Go on where another worker, or an earlier attempt, stopped. `pieces` are in order."""
        if not pieces:
            return
        for piece in pieces:
            self.done = self.done.then(Generated(piece.token_ids, piece.logprobs, piece.token_arrays))
            self.arrays |= piece.arrays
        self._arrays_saved = bool(self.arrays)
        self.segments = join_segments(segment for piece in pieces for segment in piece.segments)
        self.adapter_segments = join_segments(seg for piece in pieces for seg in piece.adapter_segments or ())
        self.legs = [token for piece in pieces for token in piece.legs]
        self.in_place = [token for piece in pieces for token in piece.in_place]
        self._saved, self.pieces = len(self.done), len(pieces)
        most = self.job.sampling.max_new_tokens - 1
        if len(self.done) > most:  # all was saved but how it ended: the last token is generated again, to find out
            self.done = self.done.cut(end=most)
            self.segments = cut_segments(self.segments, end=most)
            self.adapter_segments = cut_segments(self.adapter_segments, end=most)
            self.legs = list(_between(self.legs, 0, most))
            self.in_place = list(_between(self.in_place, 0, most))
            self.save_anew()

    @property
    def unsaved_tokens(self) -> int:
        """Tokens of the legs that have ended which the pool does not have."""
        return len(self.done) - self._saved

    @property
    def newest(self) -> int | None:
        """The newest version that sampled any of its tokens, or runs it now; None for none."""
        return self.leg.version if self.leg is not None else _last_version(self.segments)

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.job.sampling.max_new_tokens - len(self.done)

    def next_request(self, version: int) -> EngineRequest:
        """The next leg: the prompt and what there is of the answer, under weights `version`."""
        adapter = self._use_adapter()
        exact = self.job.exact_version is not None and any(its.version != version for its in self.segments)
        if exact or _ahead(self.segments, version) or _ahead(self.adapter_segments, adapter.version if adapter else 0):
            # A worker with a newer version released it. Versions never decrease within a sample, so it starts over.
            self.done, self.arrays, self.segments, self.adapter_segments = Generated(), {}, [], []
            self.legs, self.in_place = [], []
            self.save_anew()
            if self.stream is not None:
                self.stream.restart()
        return EngineRequest(
            request_id=self.begin_leg(version),
            token_ids=np.concatenate([self.prompt, self.tokens]) if len(self.done) else self.prompt,
            sampling=self.job.sampling,
            max_new_tokens=self.remaining,
            cache_key=f"{version}/{adapter.name}@{adapter.version}" if adapter else str(version),
            adapter=adapter.name if adapter else "",
            adapter_version=adapter.version if adapter else 0,
            generated=len(self.done),
            media=self.job.media,
            priority=self.job.engine_priority,
            wanted=replace(self._wanted, prompt=False) if self.arrays and self._wanted.prompt else self._wanted,
        )

    def _use_adapter(self) -> AdapterUse | None:
        """The version for the next leg, held from now on."""
        if self.job.lora is None:
            return None
        assert self.adapters is not None
        before = self.adapter_segments[-1].version if self.adapter_segments else 0
        self._adapter = self.adapters.use(self.job.lora, self._adapter.version if self._adapter else before)
        return self._adapter

    def absorb(self, leg: Leg, output: EngineOutput, seconds: float) -> None:
        """Take in what a leg generated, finished or not."""
        self._engine_s += seconds
        interrupted = output.finish_reason == "abort" or (output.retracted and not self.job.media)
        if self.starts_over and interrupted and not self.ending:
            self.save_anew()
            if self.stream is not None:
                self.stream.restart()
            return
        if self._legs == 1:
            self.cached_tokens = min(output.cached_tokens, len(self.prompt))
        if count := len(output.token_ids):
            self.legs, self.in_place = self._lineage(leg, count)
            self.done = self.done.then(Generated(output.token_ids, output.logprobs, output.token_arrays))
            self.segments = join_segments([*self.segments, *leg.segments(count)])
            if self._adapter is not None:
                self.adapter_segments = join_segments([*self.adapter_segments, Segment(self._adapter.version, count)])
        self.arrays.update(output.arrays)
        if output.finish_reason != "abort":
            self.finish_reason, self.matched_stop = output.finish_reason, output.matched_stop
            self.stop_tokens, self.stop_text = output.stop_tokens, output.stop_text
        elif self.remaining <= 0:
            self.finish_reason = "length"  # the abort hit it on its very last token

    def _lineage(self, leg: Leg, count: int) -> tuple[list[int], list[int]]:
        """`legs` and `in_place` with the first `count` tokens of a leg behind what is done."""
        start = len(self.done)
        legs = [*self.legs, *[start] * bool(start), *(start + n for n in leg.computed(count))]
        return legs, [*self.in_place, *(start + n for n in leg.in_place(count))]

    def unsaved(self, progress: Callable[[str, int], Generated | None] | None = None) -> Piece | None:
        """The next piece to save: tokens that the pool does not have yet.

        progress(request id, start): tokens of the leg in the engine, from number `start` of it on.

        None if there is nothing new, or more than a message may have. Until `keep_saved` is told of a piece, the same
        piece is made again, or a longer one. While weights are being switched the leg adds nothing: nobody can say yet
        which version sampled its newest tokens.
        """
        made_at = time.monotonic()
        unsaved, segments, adapter_segments = self.done.cut(self._saved), self.segments, self.adapter_segments
        leg, legs, in_place = self.leg, self.legs, self.in_place
        if progress is not None and leg is not None and not (leg.switching or leg.spoiled):
            start = max(0, self._saved - len(self.done))
            if more := progress(leg.request_id, start):
                unsaved = unsaved.then(more)
                segments = join_segments([*segments, *leg.segments(start + len(more.token_ids))])
                legs, in_place = self._lineage(leg, start + len(more.token_ids))
                if self._adapter is not None:
                    new_segment = Segment(self._adapter.version, start + len(more.token_ids))
                    adapter_segments = join_segments([*adapter_segments, new_segment])
        if self.stream is not None:
            unsaved = unsaved.cut(end=max(0, self.stream.shown(self._saved + len(unsaved)) - self._saved))
        if not len(unsaved):
            return None
        text, end = self.stream and self.stream.text(self._saved, unsaved.token_ids), self._saved + len(unsaved)
        lora = tuple(cut_segments(adapter_segments, start=self._saved, end=end)) if self.job.lora else None
        new = Partial(
            start=self._saved,
            token_ids=unsaved.token_ids,
            logprobs=unsaved.logprobs,
            segments=tuple(cut_segments(segments, start=self._saved, end=end)),
            adapter_segments=lora,
            **_told(_between(legs, self._saved, end), _between(in_place, self._saved, end)),
            # What is not there does not travel.
            **({"token_arrays": unsaved.token_arrays} if unsaved.token_arrays else {}),
            **({"arrays": self.arrays} if self.arrays and not self._arrays_saved else {}),
            **({"text": text} if text is not None else {}),
        )
        streamed = self.stream is not None
        try:
            piece = Piece(self.job.id, self.attempt, self.index, self.pieces, new, streamed=streamed)
        except InvalidField as error:
            log.warning("sample %d of job %s cannot be saved as it is: %s", self.index, self.job.id, error)
            self.saved_at = made_at  # not tried again at once
            return None
        self._offered = piece, made_at
        return piece

    def keep_saved(self, piece: Piece) -> None:
        """The pool has this piece."""
        if self._offered is not None and piece is self._offered[0]:  # else started over, or more of it is on its way
            self.saved_at, self._offered = self._offered[1], None
            self._saved, self.pieces = self._saved + len(piece.partial.token_ids), self.pieces + 1
            self._arrays_saved = self._arrays_saved or bool(piece.partial.arrays)

    def save_anew(self) -> None:
        """The pieces that the pool has are useless: the next piece is the first."""
        self._saved, self.pieces, self._offered, self._arrays_saved = 0, 0, None, False

    @property
    def kept(self) -> int:
        """How many of its tokens a finished sample's result has. The stop's tokens count only if the job wants them."""
        wanted = self.job.sampling.include_stop
        kept = isinstance(self.matched_stop, int) if wanted == "token" else wanted
        trims = self.finish_reason == "stop" and not kept
        return len(self.done) - min(self.stop_tokens, len(self.done)) if trims else len(self.done)

    def text(self, decode: Callable[[npt.NDArray[np.int32]], str]) -> str:
        """The finished sample's text, up to where its stop begins unless the job wants stops in the result.

        A stop can begin in the middle of a token. If a special token is part of it, the text ends before that token.
        """
        whole, kept = decode(self.tokens), self.kept
        if kept == len(self.tokens):
            return whole
        if self.stop_text and whole.endswith(self.stop_text):
            return whole.removesuffix(self.stop_text)
        return decode(self.tokens[:kept])

    def result(self, worker_id: str, info: EngineInfo, text: str | None) -> RolloutResult:
        """The finished sample as it is published."""
        assert self.finish_reason is not None
        job, kept = self.job, self.kept
        done = self.done if kept == len(self.done) else self.done.cut(end=kept)
        return RolloutResult(
            **self.common(worker_id, info),
            token_ids=done.token_ids,
            logprobs=done.logprobs if job.logprobs.sampled else None,
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            segments=tuple(cut_segments(self.segments, end=kept)),
            adapter=job.lora,
            adapter_version=self._adapter.version if self._adapter else _last_version(self.adapter_segments),
            adapter_segments=tuple(cut_segments(self.adapter_segments, end=kept)) if job.lora else None,
            prompt_ids=None if job.token_ids is not None else self.prompt,
            text=text,
            **_told(_between(self.legs, 0, kept), _between(self.in_place, 0, kept)),
            **({"token_arrays": done.token_arrays} if done.token_arrays else {}),
            **({"arrays": self.arrays} if self.arrays else {}),
            **({"cached_tokens": self.cached_tokens} if self.cached_tokens else {}),
            **({"session_id": job.session_id} if job.session_id is not None else {}),
            **({"logprob_kind": job.logprobs.kind} if job.logprobs.kind != "raw" else {}),
        )


def _wanted(job: GenerateJob, index: int) -> Wanted:
    """What sample `index` asks for; the one object for most of them."""
    plain = job.logprobs.top == 0 and not job.logprobs.token_ids and not job.logprobs.prompt
    more = job.hidden_states != "none" or job.routed_experts or job.logit_processors or job.stream
    if plain and job.logprobs.kind == "raw" and not more and job.seed is None:
        return NOTHING_MORE
    return Wanted(
        logprobs=job.logprobs,
        hidden_states=job.hidden_states,
        routed_experts=job.routed_experts,
        logit_processors=job.logit_processors,
        seed=None if job.seed is None else sample_seed(job.seed, index),
        stream=job.stream,
    )


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a seeded job: samples differ from each other, and repeat from run to run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "little") >> 1


def _last_version(segments: Sequence[Segment]) -> int | None:
    return segments[-1].version if segments else None


def _between(tokens: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    return tuple(token for token in tokens if start <= token < end)


def _told(legs: tuple[int, ...], in_place: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The fields of a message. Most samples have none."""
    return {name: tokens for name, tokens in (("legs", legs), ("in_place", in_place)) if tokens}


def _ahead(segments: Sequence[Segment], version: int) -> bool:
    return bool(segments) and segments[-1].version > version
