"""What an engine without a tokenizer does of stops and grammars, and what it refuses."""

from __future__ import annotations

import pytest
from support.engines.text_requests import in_legs, request

from rolloutmq.messages.errors import RequestRefused
from rolloutmq.worker.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


async def test_without_a_tokenizer_sequences_work_and_texts_are_refused_by_name(engine: SGLangEngine) -> None:
    free = await engine.generate(request(max_new_tokens=30, frequency_penalty=2.0))
    sequence = tuple(free.token_ids[10:13].tolist())
    for cuts in ((), (11,), (12,)):
        asked = request(max_new_tokens=30, frequency_penalty=2.0, stop_token_sequences=(sequence, (511, 511)))
        output = await in_legs(engine, asked, *cuts)
        assert output.token_ids.tolist() == free.token_ids[:13].tolist()
        assert (output.finish_reason, output.matched_stop, output.stop_tokens) == ("stop", sequence, 3)
    for name, value in (("stop", ("a",)), ("stop_regex", ("a",)), ("regex", "a"), ("json_schema", "{}"), ("ebnf", "a")):
        assert f"sampling.{name}" not in engine.info.features
        with pytest.raises(RequestRefused, match=f"sampling.{name}: this engine has no tokenizer"):
            await engine.generate(request(**{name: value}))
