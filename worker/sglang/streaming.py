"""Tokens of a streamed request as they are sampled, without SGLang's streaming.

SGLang streams by waking whoever asked, with everything about the request, for every token: on an H200 that costs a
third of the throughput. Here only the scheduler's process knows that a request streams, so that it reports each step.
In the worker's process the tokens go to the request's state, as those of any request do every 50 tokens, and nobody is
woken; who streams looks there (SGLangEngine.progress) when it is time to.
"""

from __future__ import annotations

from typing import Any

from ..engine import EngineRequest
from .extras import extras_of

STREAM = "stream"


def told(request: EngineRequest) -> dict[str, Any]:
    """What the scheduler's process is told."""
    return {STREAM: True} if request.wanted.stream else {}


def watch(req: Any) -> None:
    """In the scheduler: have every step of a request (`Req`) that streams reported."""
    if STREAM in extras_of(req):
        req.stream = True
