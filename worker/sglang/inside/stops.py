"""Stops on SGLang: what a request tells the scheduler's process, what is looked for there, and how it is told back.

SGLang's own stop texts need its tokenizer in every process, look at a window of as many tokens as the text has when it
is written the usual way, and know nothing of earlier legs. So they are not used: the scheduler's check of a request
that has such stops is wrapped, for that request alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ....messages.errors import RequestRefused
from ...engine import EngineInfo, EngineRequest, MatchedStop
from ...stops import Match, StopMatcher, Stops, check_stops
from ..extras import abort, extras_of, generated_before
from .tokenizer import EngineTokenizer

logger = logging.getLogger(__name__)
STOPS, LEAST, PENALISED = "stops", "least", "penalised"
"""[texts, regexes, sequences, tokens]; min_new_tokens of the sample; whether earlier tokens count for penalties."""
TOKENS, TEXT = "rolloutmq_tokens", "rolloutmq_text"
CHECK = ("update_finish_state", "check_finished")
"""What SGLang's request calls its check after new tokens, newest name first."""
_ATTRIBUTE = "rolloutmq_matcher"


def told(request: EngineRequest) -> dict[str, Any]:
    """A part of the request's extras, for the scheduler's process."""
    sampling = request.sampling
    # With ignore_eos SGLang ignores these, too.
    tokens = sampling.stop_token_ids if sampling.ignore_eos else ()
    parts: dict[str, Any] = {}
    if sampling.stop or sampling.stop_regex or sampling.stop_token_sequences or tokens:
        parts[STOPS] = [sampling.stop, sampling.stop_regex, sampling.stop_token_sequences, tokens]
    if sampling.min_new_tokens:
        parts[LEAST] = sampling.min_new_tokens
    penalties = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
    if request.generated and penalties != (0.0, 0.0, 1.0):
        parts[PENALISED] = True
    return parts


def check(request: EngineRequest, info: EngineInfo) -> None:
    """Raises RequestRefused for stops that this engine cannot look for, or that nobody could."""
    sampling = request.sampling
    check_stops(sampling)
    for name in ("stop", "stop_regex"):
        if getattr(sampling, name) and f"sampling.{name}" not in info.features:
            raise RequestRefused(
                f"sampling.{name}: this engine has no tokenizer; allowed: sampling.stop_token_sequences"
            )
    for sequence in sampling.stop_token_sequences:
        if not all(0 <= token < info.vocab_size for token in sequence):
            raise RequestRefused(
                f"sampling.stop_token_sequences has {sequence}: token ids of this model are 0 to {info.vocab_size - 1}"
            )


def watch(req: Any, tokenizer: EngineTokenizer | None) -> None:
    """In the scheduler: follow a request (`Req`) that is about to wait, if it has stops; again has no effect."""
    extras = extras_of(req)
    if STOPS not in extras or hasattr(req, _ATTRIBUTE) or req.finished() or req.to_finish:
        return
    texts, regexes, sequences, tokens = extras[STOPS]
    stops = Stops(
        texts=tuple(texts),
        regexes=tuple(regexes),
        sequences=(*map(tuple, sequences), *((token,) for token in tokens)),
        after=extras.get(LEAST, 0),
    )
    try:
        matcher = StopMatcher(stops, tokenizer.new_pieces() if tokenizer is not None and stops.need_text else None)
        matcher.follow(generated_before(req))
    except Exception as error:  # a tokenizer's own code, perhaps; it ends this request and not the engine
        logger.exception("stops cannot be looked for")
        req.set_finish_with_abort(_lost(error))
        return
    name = next(name for name in CHECK if callable(getattr(req, name, None)))
    watched = _Watched(req, matcher, frozenset(tokens), getattr(req, name))
    setattr(req, _ATTRIBUTE, watched)
    setattr(req, name, watched.check)


class _Watched:
    """A request of SGLang's with its matcher; stands in for the request's own check."""

    def __init__(self, req: Any, matcher: StopMatcher, tokens: frozenset[int], check: Callable[..., Any]) -> None:
        self._req, self._matcher, self._tokens, self._check = req, matcher, tokens, check
        self._seen = 0

    def check(self, *args: Any, **kwargs: Any) -> Any:
        """First for these stops, then for all that SGLang knows."""
        req = self._req
        if not req.finished() and not req.to_finish:
            try:
                self._look(req)
            except Exception as error:
                logger.exception("stops cannot be looked for any more")
                req.to_finish = abort(_lost(error))
        return self._check(*args, **kwargs)

    def _look(self, req: Any) -> None:
        for token in req.output_ids[self._seen :]:
            if not 0 <= token < req.vocab_size or self._seen >= req.sampling_params.max_new_tokens:
                return  # SGLang's own check ends it
            self._seen += 1
            if (match := self._matcher.next(int(token))) is not None:
                stop = match.stop
                if isinstance(stop, tuple) and len(stop) == 1 and stop[0] in self._tokens:
                    stop = stop[0]
                req.finished_reason = _reason_class()(stop, match)
                req.finished_len = self._seen
                return


def _lost(error: Exception) -> str:
    return f"stops cannot be looked for in what was generated: {error!r}"


@lru_cache(maxsize=1)
def _reason_class() -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR  # noqa: PLC0415  (only in a scheduler process)

    class MatchedStopReason(FINISH_MATCHED_STR):  # type: ignore[misc]
        """SGLang sends the JSON of a reason on as it is; newer releases allow only flat ones."""

        def __init__(self, stop: MatchedStop, match: Match) -> None:
            super().__init__(matched=list(stop) if isinstance(stop, tuple) else stop)
            self.match = match

        def to_json(self) -> dict[str, Any]:
            return {**super().to_json(), TOKENS: self.match.tokens, TEXT: self.match.text}

    return MatchedStopReason


def what_ended(reason: Mapping[str, Any]) -> tuple[MatchedStop | None, int, str]:
    """`matched_stop`, `stop_tokens` and `stop_text` of an EngineOutput, from SGLang's finish reason."""
    matched = reason.get("matched")
    if TOKENS in reason:
        return tuple(matched) if isinstance(matched, list) else matched, int(reason[TOKENS]), str(reason[TEXT])
    return (matched, 1, "") if isinstance(matched, int) else (None, 0, "")
