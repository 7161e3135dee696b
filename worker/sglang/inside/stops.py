"""Stops in SGLang's scheduler process. A request that has some is checked token by token.

SGLang's own stop texts are not used. They need its tokenizer in every process, search a window of as many tokens as the
text usually has, and do not know earlier legs. Instead, SGLang's check of a request that has stops is replaced, for
that request alone.

An abort lets a request sample one more token, and SGLang ends it without a look at that one. The next leg would go on
behind an end of sequence. So the check of every request looks at its newest token first, and aborts it then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from http import HTTPStatus
from typing import Any

from ...engine import MatchedStop
from ...stops import Match, StopMatcher, Stops
from .. import patches
from ..wire import LEAST, STOP_TEXT, STOP_TOKENS, STOPS, extras_of, generated_before
from .tokenizer import EngineTokenizer

logger = logging.getLogger(__name__)
_ATTRIBUTE = "rolloutmq_matcher"


def watch(req: Any, tokenizer: EngineTokenizer | None) -> None:
    """Follow a request (`Req`) that is about to wait. A second call has no effect."""
    extras = extras_of(req)
    if hasattr(req, _ATTRIBUTE) or req.finished() or req.to_finish:
        return
    setattr(req, _ATTRIBUTE, True)
    if STOPS not in extras:
        _replace(req, _before_an_abort(req, req.update_finish_state))
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
    except Exception as error:  # a tokenizer may have code of its own; its error ends this request, not the engine
        logger.exception("stops cannot be looked for")
        req.set_finish_with_abort(_lost(error))
        return
    _replace(req, _before_an_abort(req, _watched(req, matcher, frozenset(tokens))))


def _replace(req: Any, check: Callable[..., Any]) -> None:
    patches.replace_on(req, "managers.schedule_batch:Req.update_finish_state", check)


def _before_an_abort(req: Any, check: Callable[..., Any]) -> Callable[..., Any]:
    """Return the check that lets an abort wait until the newest token was looked at. An error does not wait."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        aborted = req.to_finish
        if aborted and req.output_ids and getattr(aborted, "status_code", None) is None:
            req.to_finish = None
            check(*args, **kwargs)
            req.to_finish = None if req.finished() else aborted
        return check(*args, **kwargs)

    return checked


def abort(message: str) -> Any:
    """Return what `Req.to_finish` takes to end a running request as refused."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415 – only in a scheduler process

    return FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


def _watched(req: Any, matcher: StopMatcher, tokens: frozenset[int]) -> Callable[..., Any]:
    """Return what takes the place of the request's own check: look for these stops first, then run SGLang's check."""
    check, seen = req.update_finish_state, 0

    def look() -> None:
        nonlocal seen
        for token in req.output_ids[seen:]:
            if not 0 <= token < req.vocab_size or seen >= req.sampling_params.max_new_tokens:
                return  # SGLang's own check ends it
            seen += 1
            if (match := matcher.next(int(token))) is not None:
                stop = match.stop
                if isinstance(stop, tuple) and len(stop) == 1 and stop[0] in tokens:
                    stop = stop[0]
                req.finished_reason, req.finished_len = _reason_class()(stop, match), seen
                return

    def checked(*args: Any, **kwargs: Any) -> Any:
        if not req.finished() and not req.to_finish:
            try:
                look()
            except Exception as error:
                logger.exception("stops cannot be looked for any more")
                req.to_finish = abort(_lost(error))
        return check(*args, **kwargs)

    return checked


def _lost(error: Exception) -> str:
    return f"stops cannot be looked for in what was generated: {error!r}"


@cache
def _reason_class() -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR  # noqa: PLC0415 – only in a scheduler process

    class MatchedStopReason(FINISH_MATCHED_STR):  # type: ignore[misc]
        """SGLang passes the JSON of a reason on as it is. Newer releases allow only flat ones."""

        def __init__(self, stop: MatchedStop, match: Match) -> None:
            super().__init__(matched=list(stop) if isinstance(stop, tuple) else stop)
            self.match = match

        def to_json(self) -> dict[str, Any]:
            return {**super().to_json(), STOP_TOKENS: self.match.tokens, STOP_TEXT: self.match.text}

    return MatchedStopReason
