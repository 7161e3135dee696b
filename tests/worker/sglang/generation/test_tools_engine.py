"""Calls of tools in what real SGLang generates, read by its own parsers: from the job to the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines.remote import RemoteEngine

from rolloutmq.messages import GenerateJob, RolloutResult, SamplingParams
from rolloutmq.messages.broker.lease import Claim
from rolloutmq.messages.codec import decode, encode
from rolloutmq.worker.jobs.held import as_result, text_with_calls
from rolloutmq.worker.jobs.intake import admit
from rolloutmq.worker.text.tokenizer import ModelTokenizer
from rolloutmq.worker.text.tool_calls import calls_in

pytestmark = pytest.mark.sglang
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CITY = "(Rome|Oslo)"
ONE = rf'<tool_call>\n\{{"name": "get_weather", "arguments": \{{"city": "{CITY}"\}}\}}\n</tool_call>'
SYNTAX = {
    "json": ONE,
    "xml": rf"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n</function>\n</tool_call>",
    "function": rf'\[get_weather\(city="{CITY}"\)\]',
}


async def run(engine: RemoteEngine, model: Path, **fields: Any) -> RolloutResult:
    """What a worker does with a job, without the queue."""
    sampling = SamplingParams(max_new_tokens=200, **fields.pop("sampling"))
    job = GenerateJob(reply_to="c", sampling=sampling, tools=[WEATHER], **fields)
    tokenizer = ModelTokenizer(str(model))
    held = admit(Claim(job.id, 1, 1, 0.0, None, encode(job)), engine.info, tokenizer)
    sample = held.samples[0]
    request = sample.next_request(0)
    assert sample.leg is not None
    sample.absorb(sample.leg, await engine.generate(request), 0.1)
    result = as_result(sample, "w", engine.info, tokenizer)
    assert isinstance(result, RolloutResult)
    calls = calls_in(text_with_calls(sample, tokenizer) or "", job, 0)
    result = result.model_copy(update={"tool_calls": calls}) if calls else result
    return decode(encode(result), RolloutResult)


@pytest.mark.parametrize("parser", SYNTAX)
async def test_a_call_the_model_makes_is_in_the_result(
    text_engine: RemoteEngine, text_model: Path, parser: str
) -> None:
    messages = [{"role": "user", "content": "How is the weather?"}]
    sampling = {"regex": SYNTAX[parser]}
    result = await run(text_engine, text_model, messages=messages, sampling=sampling, tool_parser=parser)
    (call,) = result.tool_calls
    assert (call.name, call.valid) == ("get_weather", True)
    assert call.arguments in ({"city": "Rome"}, {"city": "Oslo"})
    assert call.id == f"call_{result.job_id}_0_0"
    assert call.arguments["city"] in (result.text or "")


async def test_tokens_in_and_tokens_out_have_calls_too_and_invalid_ones_are_told(
    text_engine: RemoteEngine, text_model: Path
) -> None:
    broken = ONE + r"<tool_call>\n\{oops\n</tool_call>"
    result = await run(text_engine, text_model, token_ids=[65, 66, 67], sampling={"regex": broken})
    good, bad = result.tool_calls
    assert good.valid
    assert result.text is None
    assert (bad.valid, bad.text) == (False, "<tool_call>\n{oops\n</tool_call>")
    plain = await run(text_engine, text_model, token_ids=[65, 66, 67], sampling={"regex": "It is warm\\."})
    assert plain.tool_calls == ()
