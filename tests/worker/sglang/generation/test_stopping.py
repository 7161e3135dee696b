"""Stops in real SGLang: where a sample ends, what is said of it, whichever legs it came in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.engines.remote import RemoteEngine
from support.engines.text_requests import EOS, ids_of, in_legs, request, text_of

from rolloutmq.messages.errors import RequestRefused

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
SAID = "one two €uro; END of it"
LEGS = [(), (1,), (14, 15), (9,), (10, 11)]
"""Legs end within "END", and within the bytes of "€"."""


@pytest.mark.parametrize("cuts", LEGS)
@pytest.mark.parametrize(
    ("stops", "ended"),
    [
        ({"stop": ("END",)}, ("one two €uro; END", "END", "END")),
        ({"stop": ("it", "€", "D o")}, ("one two €", "€", "€")),
        ({"stop": ("of", "; END o", "uro; E")}, ("one two €uro; E", "uro; E", "uro; E")),
        ({"stop_regex": (r"[A-Z]{2}", r"u\w+;")}, ("one two €uro;", r"u\w+;", "uro;")),
        ({"stop_regex": (r"€.*N",)}, ("one two €uro; EN", r"€.*N", "€uro; EN")),
        ({"stop": ("END",), "stop_regex": ("E",)}, ("one two €uro; E", "E", "E")),
        ({"stop_token_sequences": (ids_of("ND of"), ids_of("END"))}, ("one two €uro; END", ids_of("END"), "")),
        ({"stop_token_sequences": (ids_of("DE"),), "stop": ("f i",)}, ("one two €uro; END of i", "f i", "f i")),
        ({"stop": ("one",), "min_new_tokens": 5}, (SAID, EOS, "")),
        ({"stop": ("two €uro",), "min_new_tokens": 12}, ("one two €uro", "two €uro", "two €uro")),
        ({"stop": ("no such text",)}, (SAID, EOS, "")),
    ],
)
async def test_it_ends_at_the_token_that_completes_a_stop(
    text_engine: RemoteEngine, cuts: tuple[int, ...], stops: dict[str, Any], ended: tuple[str, object, str]
) -> None:
    said, stop, text = ended
    output = await in_legs(text_engine, request(regex=SAID, **stops), *cuts)
    assert (text_of(output.token_ids), output.finish_reason, output.matched_stop) == (said, "stop", stop)
    assert output.stop_text == text
    length = len(stop) if isinstance(stop, tuple) else len(text.encode()) or 1
    assert output.stop_tokens == length
    assert len(output.token_ids) == len(output.logprobs) == len(said.encode()) + (stop == EOS)


async def test_as_text_and_as_tokens_it_is_the_same(text_engine: RemoteEngine) -> None:
    """Free generation: of ten stops that occur in it, each is found at the same place either way."""
    options = {"frequency_penalty": 1.5, "max_new_tokens": 150, "logit_bias": {EOS: -1000.0}}
    free = await text_engine.generate(request(**options))
    plain = [i for i in range(100) if all(32 <= ord(c) < 127 for c in text_of(free.token_ids[i : i + 2]))]
    plain = [i for i in plain if len(text_of(free.token_ids[i : i + 2])) == 2]
    assert plain
    for i in plain[:10]:
        pair = text_of(free.token_ids[i : i + 2])
        by_text, by_tokens = await asyncio.gather(
            text_engine.generate(request(stop=(pair,), **options)),
            text_engine.generate(request(stop_token_sequences=(ids_of(pair),), **options)),
        )
        assert by_text.token_ids.tolist() == by_tokens.token_ids.tolist() == free.token_ids[: i + 2].tolist()
        assert (by_text.matched_stop, by_tokens.matched_stop) == (pair, ids_of(pair))
        assert by_text.stop_tokens == by_tokens.stop_tokens == 2


async def test_different_stops_in_one_batch_do_not_disturb_each_other(text_engine: RemoteEngine) -> None:
    stops = [{"stop": (SAID[i : i + 2],)} for i in range(8)] + [{"stop": ()}]
    outputs = await asyncio.gather(*(text_engine.generate(request(regex=SAID, **one)) for one in stops))
    assert [text_of(output.token_ids) for output in outputs] == [SAID[: i + 2] for i in range(8)] + [SAID]


async def test_ignoring_eos_leaves_the_requests_own_stop_tokens(text_engine: RemoteEngine) -> None:
    bias = {EOS: 1000.0}
    own = await text_engine.generate(request(logit_bias=bias, ignore_eos=True, stop_token_ids=(EOS,)))
    assert (own.token_ids.tolist(), own.matched_stop, own.stop_tokens) == ([EOS], EOS, 1)
    none = await text_engine.generate(request(logit_bias=bias, ignore_eos=True, max_new_tokens=5))
    assert (none.token_ids.tolist(), none.finish_reason) == ([EOS] * 5, "length")


async def test_a_stop_on_the_last_possible_token_is_a_stop(text_engine: RemoteEngine) -> None:
    output = await text_engine.generate(request(regex=SAID, stop=("two",), max_new_tokens=7))
    assert (output.finish_reason, output.matched_stop) == ("stop", "two")
    output = await text_engine.generate(request(regex=SAID, stop=("two",), max_new_tokens=6))
    assert (output.finish_reason, output.matched_stop, output.stop_tokens) == ("length", None, 0)


@pytest.mark.parametrize(
    ("stops", "why"),
    [
        ({"stop_regex": ("a(?=b)",)}, "looking ahead or behind is not supported"),
        ({"stop_token_sequences": ((5, 320),)}, "sampling.stop_token_sequences has \\(5, 320\\): .*0 to 319"),
    ],
)
async def test_refused_by_name(text_engine: RemoteEngine, stops: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestRefused, match=why):
        await text_engine.generate(request(**stops))
