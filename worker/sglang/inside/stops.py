"""Stops in SGLang's scheduler process. A request that has some is checked token by token.

SGLang's own stop texts are not used. They need its tokenizer in every process, search a window of as many tokens as the
text usually has, and do not know earlier legs. Instead, SGLang's check of a request that has stops is replaced, for
that request alone.
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
    """Follow a request (`Req`) that is about to wait, if it has stops. A second call has no effect."""
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
    except Exception as error:  # a tokenizer may have code of its own; its error ends this request, not the engine
        logger.exception("stops cannot be looked for")
        req.set_finish_with_abort(_lost(error))
        return
    watched = _Watched(req, matcher, frozenset(tokens), req.update_finish_state)
    setattr(req, _ATTRIBUTE, watched)
    patches.replace_on(req, "managers.schedule_batch:Req.update_finish_state", watched.check)


def abort(message: str) -> Any:
    """Return what `Req.to_finish` takes to end a running request as refused."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415 – only in a scheduler process

    return FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


class _Watched:
    """A request of SGLang's with its matcher. `check` takes the place of the request's own check."""

    def __init__(self, req: Any, matcher: StopMatcher, tokens: frozenset[int], check: Callable[..., Any]) -> None:
        self._req, self._matcher, self._tokens, self._check = req, matcher, tokens, check
        self._seen = 0

    def check(self, *args: Any, **kwargs: Any) -> Any:
        """Look for these stops first, then run SGLang's check."""
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
