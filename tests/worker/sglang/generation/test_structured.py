"""Structured output in real SGLang that runs without its own tokenizer, in one leg and in several."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from support.engines.remote import RemoteEngine
from support.engines.text_requests import EOS, ids_of, in_legs, request, text_of

from rolloutmq.messages.errors import RequestRefused
from rolloutmq.messages.model.sampling import LogitProcessor
from rolloutmq.worker.engine.protocol import Wanted
from rolloutmq.worker.sglang.inside.grammar import nothing_left

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["ann", "bob"]}, "on": {"type": "boolean"}, "size": {"enum": [1, 20, 300]}},
        "required": ["name", "on", "size"],
        "additionalProperties": False,
    }
)
REGEX = r"[a-f]{20}-[0-9]{3,5}"
EBNF = 'root ::= item (", " item){2}\nitem ::= "x" [0-9] | "y" [a-c] "€"'
NO_SPACE = {"logit_bias": dict.fromkeys(ids_of(" \t\n\r"), -1000.0)}
"""A schema allows any number of spaces, of which a random model may be fond."""


def check_json(text: str) -> None:
    found = json.loads(text)
    assert (set(found), type(found["on"])) == ({"name", "on", "size"}, bool)
    assert found["name"] in ("ann", "bob")
    assert found["size"] in (1, 20, 300)


def check_regex(text: str) -> None:
    assert re.fullmatch(REGEX, text)


def check_ebnf(text: str) -> None:
    assert re.fullmatch(r"(x[0-9]|y[a-c]€)(, (x[0-9]|y[a-c]€)){2}", text)


GRAMMARS = {"json_schema": (SCHEMA, check_json), "regex": (REGEX, check_regex), "ebnf": (EBNF, check_ebnf)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cuts", [(), (1,), (5, 6), (12,)])
@pytest.mark.parametrize("name", list(GRAMMARS))
async def test_the_text_follows_the_grammar_to_its_end(
    text_engine: RemoteEngine, name: str, cuts: tuple[int, ...], temperature: float
) -> None:
    grammar, check = GRAMMARS[name]
    bias = NO_SPACE if name == "json_schema" else {}
    output = await in_legs(text_engine, request(temperature=temperature, **{name: grammar}, **bias), *cuts)
    assert (output.finish_reason, output.matched_stop) == ("stop", EOS)
    check(text_of(output.token_ids))


async def test_legs_make_no_difference(text_engine: RemoteEngine) -> None:
    whole = await text_engine.generate(request(regex=REGEX))
    for cut in range(1, len(whole.token_ids)):
        assert (await in_legs(text_engine, request(regex=REGEX), cut)).token_ids.tolist() == whole.token_ids.tolist()


async def test_others_in_the_batch_are_free(text_engine: RemoteEngine) -> None:
    free = request(max_new_tokens=30, ignore_eos=True)
    alone = await text_engine.generate(free)
    asked = [request(**{name: grammar}, **NO_SPACE) for name, (grammar, _) in GRAMMARS.items()]
    again = request(max_new_tokens=30, ignore_eos=True)
    *outputs, beside = await asyncio.gather(*map(text_engine.generate, [*asked, again]))
    for output, (_, check) in zip(outputs, GRAMMARS.values(), strict=True):
        check(text_of(output.token_ids))
    assert beside.token_ids.tolist() == alone.token_ids.tolist()


async def test_a_grammar_that_ends_before_the_least_length_wins(text_engine: RemoteEngine) -> None:
    output = await text_engine.generate(request(regex="ab", min_new_tokens=50))
    assert output.token_ids.tolist()[2:] == [EOS]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"regex": "("}, "sampling.regex: Failed to compile regex grammar"),
        ({"json_schema": '{"type": "strin"}'}, "sampling.json_schema: Failed to compile json grammar"),
        ({"ebnf": "root ::= nothing"}, "sampling.ebnf: Failed to compile ebnf grammar"),
    ],
)
async def test_a_grammar_that_is_none_is_refused_and_nothing_else_suffers(
    text_engine: RemoteEngine, bad: dict[str, Any], why: str
) -> None:
    refused, good = await asyncio.gather(
        text_engine.generate(request(**bad)), text_engine.generate(request(regex=REGEX)), return_exceptions=True
    )
    assert isinstance(refused, RequestRefused)
    assert re.search(why, str(refused))
    assert not isinstance(good, BaseException)
    check_regex(text_of(good.token_ids))
    with pytest.raises(RequestRefused, match=why):  # a second time, from the backend's cache
        await text_engine.generate(request(**bad))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("stuck", "why"),
    [
        ({"ebnf": "root ::= a\na ::= root"}, "sampling.ebnf: Grammar: it comes to where no token may follow"),
        ({"ebnf": 'root ::= "ab" b\nb ::= b'}, "sampling.ebnf: Grammar: it comes to where no token may follow"),
        ({"json_schema": '{"$ref": "#"}'}, "sampling.json_schema: Grammar: it comes to where no token may follow"),
    ],
)
async def test_a_grammar_that_leads_nowhere_is_refused_and_nothing_else_suffers(
    text_engine: RemoteEngine, stuck: dict[str, Any], why: str, temperature: float
) -> None:
    neighbour = request(temperature=1.0, top_p=0.9, max_new_tokens=20, ignore_eos=True)
    refused, good = await asyncio.gather(
        text_engine.generate(request(temperature=temperature, **stuck)),
        text_engine.generate(neighbour),
        return_exceptions=True,
    )
    assert isinstance(refused, RequestRefused)
    assert re.search(why, str(refused))
    assert not isinstance(good, BaseException)
    assert len(good.token_ids) == 20


async def test_a_processor_that_forbids_what_the_grammar_allows_is_refused(text_engine: RemoteEngine) -> None:
    mask = LogitProcessor(name="action_mask", params={"token_ids": list(ids_of("ax"))})
    asked = replace(request(regex="abc"), wanted=Wanted(logit_processors=(mask,)))
    with pytest.raises(RequestRefused, match=r"sampling\.regex: Grammar: no token that follows it was left"):
        await text_engine.generate(asked)


async def test_bits_beyond_the_vocabulary_are_no_tokens() -> None:
    torch = pytest.importorskip("torch")
    for words, expected in (([0, 0], True), ([0, 1 << 5], False), ([0, -1 << 6], True)):
        assert nothing_left(torch.tensor(words, dtype=torch.int32), 32 + 6) is expected
    assert nothing_left(torch.tensor([0], dtype=torch.int32), 32)
    assert not nothing_left(torch.tensor([-(1 << 31)], dtype=torch.int32), 32)
