"""The train–inference check: recorded log-probabilities against those of a plain forward pass of the same weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....messages.errors import WeightSyncError
from ....messages.model import GRAMMARS, GenerateJob, RolloutResult, cut_segments
from .. import Recorded, Settings, Verdict, compared, unverified

if TYPE_CHECKING:
    from .forward import Ask, Forward

BATCH_TOKENS = 8192
"""Of a forward pass, padding included. A longer sample goes through alone."""


_Adapter = tuple[str, int] | None
"""Name and version of a LoRA adapter."""


@dataclass(slots=True)
class _Piece:
    """Tokens `start` to `end` of a sample, of one version, whose KV cache is either computed anew or continued."""

    sample: int
    start: int
    end: int
    continues: bool
    carried: bool = False  # the next piece continues on its cache


@dataclass(slots=True)
class _Scored:
    """What is known of a sample so far."""

    recorded: Recorded
    logprobs: npt.NDArray[np.float32]
    done: npt.NDArray[np.bool_]
    reasons: list[str] = field(default_factory=list)
    cache: Any = None


def score(samples: Iterable[Recorded], settings: Settings) -> list[Verdict]:
    """Recompute the log-probability of every recorded token, under the version that sampled it; in the samples' order.

    Each version is loaded once, the oldest first, and one at a time. A token whose weights were switched in place is
    computed on the KV of the versions that the engine had. LoRA adapters go through peft.

    A sample that cannot be recomputed exactly is unverified and says why. Raises InvalidField, ConfigError.
    """
    scored, verdicts = [], {}
    for number, one in enumerate(samples):
        tokens = len(one.result.token_ids)
        scored.append(_Scored(one, np.full(tokens, np.nan, np.float32), np.zeros(tokens, np.bool_)))
        if why := why_not(one):
            verdicts[number] = unverified(one, *why)
    settings = settings.for_model_of(one.recorded for one in scored)
    todo: dict[int, dict[_Adapter, list[_Piece]]] = {}
    for number, sample in enumerate(scored):
        if number not in verdicts:
            for version, adapter, piece in _pieces(number, sample):
                todo.setdefault(version, {}).setdefault(adapter, []).append(piece)
    for version, by_adapter in sorted(todo.items()):
        try:
            from .forward import Forward  # noqa: PLC0415  # torch

            forward = Forward(settings.verified_path_of(version), settings)
        except WeightSyncError as error:
            for pieces in by_adapter.values():
                _tell(scored, pieces, f"version {version}: {error}")
            continue
        for adapter, pieces in by_adapter.items():
            try:
                with forward.adapted(settings.adapter_path_of(*adapter)) if adapter else nullcontext():
                    _score(forward, pieces, scored, settings)
            except WeightSyncError as error:
                _tell(scored, pieces, str(error))
        del forward
    return [verdicts.get(number) or _verdict(sample, settings) for number, sample in enumerate(scored)]


def _tell(scored: list[_Scored], pieces: list[_Piece], why: str) -> None:
    for number in {piece.sample for piece in pieces}:
        scored[number].reasons.append(why)


def why_not(one: Recorded) -> list[str]:
    """Why a sample cannot be scored at all; empty if it can."""
    result, job = one.result, one.job
    why = []
    if result.logprobs is None:
        why.append("it has no log-probabilities: its job did not ask for them")
    if one.prompt_ids is None:
        why.append("its prompt is not in the journal")
    if job is None:
        return [*why, f"{one.problem or 'its job is not in the journal'}: nobody knows what changed its logits"]
    return why + [f"{name} changes its logits" for name in _not_recomputed(job)]


def _not_recomputed(job: GenerateJob) -> list[str]:
    """What a job has that changes log-probabilities and is not applied here."""
    found = [f"sampling.{name}" for name in GRAMMARS if getattr(job.sampling, name) is not None]
    found += ["sampling.min_new_tokens"] if job.sampling.min_new_tokens else []
    found += ["a logit processor"] if job.logit_processors else []
    return found + (["media"] if job.media else [])


def _pieces(number: int, sample: _Scored) -> Iterator[tuple[int, _Adapter, _Piece]]:
    """A sample's tokens by version, adapter and KV cache, without those that the journal says too little about."""
    result = sample.recorded.result
    legs, in_place = set(result.legs), set(result.in_place)
    before: _Piece | None = None
    unclear = False
    for span in sample.recorded.spans():
        inside = (token for token in sorted(legs | in_place) if span.start < token < span.end)
        cuts = [span.start, *inside, span.end]
        for start, end in itertools.pairwise(cuts):
            switched, anew = start in in_place, start in legs or start == 0
            if switched is anew or (switched and start > span.start):
                sample.reasons.append(f"nothing says which KV cache token {start} was sampled on")
                unclear = True
            unclear = unclear and (switched or not anew)
            if unclear:
                before = None
                continue
            piece = _Piece(number, start, end, continues=switched)
            if before is not None:
                before.carried = switched
            before = piece
            yield span.version, _adapter_of(result, start), piece


def _adapter_of(result: RolloutResult, token: int) -> _Adapter:
    """The adapter changes its version only where a leg begins, so one token speaks for its piece."""
    if result.adapter is None:
        return None
    segments = cut_segments(result.adapter_segments or (), token, token + 1)
    return result.adapter, segments[0].version if segments else result.adapter_version or 0


def _score(forward: Forward, pieces: list[_Piece], scored: list[_Scored], settings: Settings) -> None:
    """Fill in the log-probabilities of pieces of one version."""
    from .forward import Ask  # noqa: PLC0415

    alone = [piece for piece in pieces if piece.continues or piece.carried]
    together = [piece for piece in pieces if not (piece.continues or piece.carried)]

    def ask(piece: _Piece) -> Ask:
        one = scored[piece.sample].recorded
        assert one.prompt_ids is not None
        assert one.job is not None
        cache = scored[piece.sample].cache if piece.continues else None
        scaled = one.result.logprob_kind == "scaled"
        return Ask(one.prompt_ids, one.result.token_ids, piece.start, piece.end, one.job, scaled, cache)

    def known(piece: _Piece, logprobs: npt.NDArray[np.float32]) -> None:
        sample = scored[piece.sample]
        sample.logprobs[piece.start : piece.end] = logprobs
        sample.done[piece.start : piece.end] = True
        settings.moved(piece.end - piece.start)

    for piece in alone:
        sample = scored[piece.sample]
        if piece.continues and sample.cache is None:
            continue  # the weights of the piece before it are missing, which has been said
        logprobs, cache = forward.continued(ask(piece))
        sample.cache = cache if piece.carried else None
        known(piece, logprobs)
    for batch in _batches(together, lambda piece: len(ask(piece).fed)):
        for piece, logprobs in zip(batch, forward.logprobs([ask(piece) for piece in batch]), strict=True):
            known(piece, logprobs)


def _batches(pieces: list[_Piece], length: Callable[[_Piece], int]) -> Iterator[list[_Piece]]:
    """Pieces of about one length together, with at most BATCH_TOKENS tokens."""
    batch: list[_Piece] = []
    for piece in sorted(pieces, key=length):
        if batch and (len(batch) + 1) * length(piece) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _verdict(sample: _Scored, settings: Settings) -> Verdict:
    one, limit = sample.recorded, settings.score_limit
    engine = {"engine": "transformers", "dtype": settings.dtype, "device": settings.device}
    if not is_exact(one, engine):
        assert one.result.logprobs is not None
        gaps = np.abs(sample.logprobs - one.result.logprobs)[sample.done]
        limit = math.inf if not gaps.size or gaps.mean() <= settings.mean_limit else settings.mean_limit
    tokens, missing = one.result.token_ids, sample.reasons
    return compared(one, tokens, sample.logprobs, limit, replayed=sample.done, unproved=missing, engine=engine)


def is_exact(one: Recorded, engine: Mapping[str, str]) -> bool:
    """Whether both sides computed in float32, as far as the result says."""
    return one.result.fingerprint.get("dtype") == engine.get("dtype") == "float32"
