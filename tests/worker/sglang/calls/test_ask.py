"""What SGLang's answers to a request mean where it answers by an error."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.engines.asking import ask

from rolloutmq.worker.engine.protocol import NOTHING_MORE


class Refusing:
    """SGLang's manager, which answers every request by an error."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def generate_request(self, request: Any, _: None) -> AsyncIterator[dict[str, Any]]:
        raise ValueError(self.text)
        yield {}


@pytest.mark.sglang
async def test_an_abort_while_a_grammar_is_compiled_is_no_refusal() -> None:
    """As a refusal it would end the job for good, though only new weights came."""
    from sglang.srt.constrained import grammar_manager  # noqa: PLC0415

    from rolloutmq.worker.sglang.calls.ask import ABORTED, generate  # noqa: PLC0415

    request = ask([1, 2], 3, wanted=NOTHING_MORE, regex="a+")
    assert await generate(Refusing(ABORTED), request) is None
    with pytest.raises(ValueError, match="too long"):
        await generate(Refusing("too long"), request)
    assert ABORTED in inspect.getsource(grammar_manager)
