"""A tokenizer whose own code fails ends the request it failed on, and not the scheduler's process. And an abort ends
nothing that has just ended by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolloutmq.worker.sglang.inside.stops import watch
from rolloutmq.worker.sglang.inside.tokenizer import EngineTokenizer
from rolloutmq.worker.sglang.wire import STOPS, pack

pytestmark = pytest.mark.sglang


class FakeReq:
    """As much of SGLang's request as is looked at."""

    vocab_size = 100
    finished_reason: Any = None
    to_finish: Any = None

    def __init__(self, generated: list[int]) -> None:
        extras = {STOPS: [["x"], [], [], []], "generated": len(generated)}
        self.sampling_params = SimpleNamespace(custom_params=pack(extras), max_new_tokens=10)
        self.origin_input_ids, self.output_ids = [1, *generated], list[int]()

    def finished(self) -> bool:
        return self.finished_reason is not None

    def set_finish_with_abort(self, message: str) -> None:
        self.to_finish = message

    def update_finish_state(self, count: int = 1) -> None:
        """As SGLang does it, but for the stops that it knows: here there is one, token 2."""
        if self.finished():
            return
        if self.to_finish:
            self.finished_reason, self.to_finish = self.to_finish, None
        elif self.output_ids[-count:] == [2]:
            self.finished_reason = "stop"


def broken(token: int) -> bytes:
    if token == 99:  # an id that only pads the vocabulary
        raise KeyError(token)
    return b"a"


def test_it_is_told_why() -> None:
    tokenizer = cast("EngineTokenizer", SimpleNamespace(new_pieces=lambda: broken))
    req = FakeReq([5, 99])
    watch(req, tokenizer)
    assert req.to_finish == "stops cannot be looked for in what was generated: KeyError(99)"
    req = FakeReq([5])
    watch(req, tokenizer)
    for token in (7, 99):
        assert not req.finished()
        req.output_ids.append(token)
        req.update_finish_state()
    assert (req.finished_reason.message, int(req.finished_reason.status_code)) == (
        "stops cannot be looked for in what was generated: KeyError(99)",
        400,
    )


def test_what_ends_with_its_newest_token_is_not_aborted() -> None:
    """SGLang lets an aborted request sample one more token. Nobody may go on behind an end of sequence."""
    abort = SimpleNamespace(status_code=None)
    sequence = {STOPS: [[], [], [[5, 6]], []]}
    found = []
    for extras, token in (({}, 2), (sequence, 2), (sequence, 6), ({}, 6), (sequence, 7)):
        req = FakeReq([])
        req.sampling_params.custom_params = pack({"generated": 0} | extras)
        watch(req, None)
        for newest, finish in ((5, None), (token, abort)):
            req.output_ids.append(newest)
            req.to_finish = finish
            req.update_finish_state()
        found.append(getattr(req.finished_reason, "matched", req.finished_reason))
        assert req.to_finish is None
    assert found == ["stop", "stop", [5, 6], abort, abort]


def test_an_error_does_not_wait_for_the_newest_token() -> None:
    req = FakeReq([])
    req.sampling_params.custom_params = pack({"generated": 0})
    watch(req, None)
    req.output_ids.append(2)
    req.to_finish = error = SimpleNamespace(status_code=503)
    req.update_finish_state()
    assert req.finished_reason is error
