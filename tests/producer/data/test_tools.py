"""Tools: declared in the job, called by the model, run by the trainer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.messages import GenerateJob, decode, encode
from rolloutmq.messages.errors import ConfigError, InvalidField, RequestRefused
from rolloutmq.messages.model.chat import MAX_CALLS, MAX_TEXT, ChatMessage
from rolloutmq.messages.model.tools import Tool, ToolCall, why_invalid
from rolloutmq.producer.data import ToolRegistry, run_tool_calls

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}},
            "required": ["city"],
        },
    },
}
TOOL = Tool(**WEATHER)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def find_calls() -> Any:
    """Needs SGLang's parsers."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    from rolloutmq.worker.cpu_support import prepare_engine  # noqa: PLC0415

    prepare_engine()
    from rolloutmq.worker.text.tool_calls import find_calls  # noqa: PLC0415

    return find_calls


def tag(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


XML = "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("json", "Let me see. " + tag('{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}')),
        ("json", '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'),
        ("xml", tag(XML)),
        ("function", '[get_weather(city="Rome", days=2)]'),
        ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]'),
    ],
)
def test_calls_are_read_in_json_xml_and_function_syntax(find_calls: Any, parser: str, text: str) -> None:
    (call,) = find_calls(text, [TOOL], parser)
    assert (call.name, call.arguments, call.error) == ("get_weather", {"city": "Rome", "days": 2}, None)


@pytest.mark.parametrize("parser", ["json", "xml", "function", "llama3"])
def test_text_without_a_call_has_none(find_calls: Any, parser: str) -> None:
    assert find_calls("It is 20 degrees [in the shade], and x < 3.", [TOOL], parser) == []


@pytest.mark.parametrize(
    ("parser", "text", "why"),
    [
        ("json", tag('{"name": "get_weather", "arguments": {"city": '), "makes no call"),
        ("json", tag('{"name": "get_weather", "arguments": {"city": "Rome"}}')[:-12], "not finished"),
        ("json", tag('{"name": "get_weather", "arguments": {}}'), "without city"),
        ("json", tag('{"name": "get_weather", "arguments": {"city": 5}}'), "city=5 is no string"),
        ("json", tag('{"name": "rm", "arguments": {}}'), "no tool 'rm', only get_weather"),
        ("xml", tag("<function=rm>\n<parameter=x>\n1\n</parameter>\n</function>"), "no tool 'rm'"),
        ("xml", tag("<functio"), "makes no call"),
        ("function", "[get_weather(city=)]", "makes no call"),
        ("function", "[rm(x=1)]", "no tool 'rm'"),
    ],
)
def test_a_call_that_is_none_is_reported_with_the_reason(find_calls: Any, parser: str, text: str, why: str) -> None:
    good = {"json": tag('{"name": "get_weather", "arguments": {"city": "Rome"}}'), "xml": tag(XML)}.get(parser, "")
    *before, call = find_calls(good + text, [TOOL], parser)
    assert [one.valid for one in before] == ([True] if good else [])  # its neighbour is not lost
    assert not call.valid
    assert why in (call.error or "")
    assert call.text


@pytest.mark.parametrize("body", ["a=1, " * 40 + "!", "a=," * 30 + "!", "city='it's', " * 20, "[" * 20_000])
def test_a_text_that_only_begins_like_calls_is_read_at_once(find_calls: Any, body: str) -> None:
    began = time.process_time()
    (call,) = find_calls(f"[get_weather(city='Rome', {body}", [TOOL], "function")
    assert not call.valid
    assert time.process_time() - began < 1.0  # SGLang's expression for it would take longer than anybody lives


def test_function_syntax_may_stand_anywhere_and_have_brackets_in_it(find_calls: Any) -> None:
    text = """In [f(x)], see: [get_weather(city="a ] (b", days=-1), rm(x={'y': [1]})] and [get_weather(city='c\\'')]."""
    first, second, third = find_calls(text, [TOOL], "function")
    assert (first.arguments, first.error) == ({"city": "a ] (b", "days": -1}, None)
    assert second.arguments == {"x": {"y": [1]}}
    assert third.arguments == {"city": "c'"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"city": 123456789012345678901234567890}', "64 bits"),
        ('{"city": "\\ud800"}', "half a character"),
        ('{"\\ud800": 1}', "half a character"),
        ('{"city": ' + "[" * 600 + "]" * 600 + "}", "nested"),
    ],
)
def test_what_no_message_can_hold_is_reported_and_takes_no_sample_along(
    find_calls: Any, arguments: str, why: str
) -> None:
    (call,) = find_calls(tag(f'{{"name": "get_weather", "arguments": {arguments}}}'), [TOOL], "json")
    assert why in (call.error or "")
    assert ToolCall(**json.loads(call.model_dump_json())) == call


def test_a_name_no_tool_could_have_can_stand_in_the_next_prompt(find_calls: Any) -> None:
    for name in ("x" * 300, "\\ud800"):
        (call,) = find_calls(tag(f'{{"name": "{name}", "arguments": {{}}}}'), [TOOL], "json")
        assert "there is no tool" in (call.error or "")
        assert call.as_chat().function.name == call.name


def test_a_turn_has_as_many_calls_as_a_message_can_hold(find_calls: Any) -> None:
    from rolloutmq.worker.text.tool_calls import calls_in  # noqa: PLC0415

    job = GenerateJob(token_ids=[1], tools=(TOOL,))
    text = tag('{"name": "get_weather", "arguments": {"city": "Rome"}}')
    calls = calls_in(text * 200, job, 3)
    assert [call.valid for call in calls] == [True] * (MAX_CALLS - 1) + [False]
    assert "200 calls" in (calls[-1].error or "")
    assert len({call.id for call in calls}) == MAX_CALLS
    ChatMessage(role="assistant", tool_calls=tuple(call.as_chat() for call in calls))


def test_a_parser_that_fails_costs_no_sample(find_calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolloutmq.worker.text import tool_calls  # noqa: PLC0415

    def fails(*_: Any) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(tool_calls, "_parts", fails)
    (call,) = tool_calls.calls_in("text", GenerateJob(token_ids=[1], tools=(TOOL,)), 0)
    assert "RecursionError" in (call.error or "")
    assert call.text == "text"


def test_a_schema_that_is_none_checks_nothing() -> None:
    parameters = {"required": 5, "properties": {"x": {"type": 7}, "y": {"type": ["integer", 3]}}}
    tool = Tool(function={"name": "f", "parameters": parameters})  # type: ignore[arg-type]
    assert why_invalid(tool, {"x": 1}) is None
    assert why_invalid(tool, {"y": "z"}) == "f: y='z' is no integer"


def test_a_parser_that_does_not_exist_is_refused_with_those_that_do(find_calls: Any) -> None:
    from rolloutmq.worker.text.tool_calls import check_parser  # noqa: PLC0415

    check_parser("xml")
    with pytest.raises(RequestRefused, match=r"tool_parser='yaml': json, xml, function, or one of .*qwen25"):
        check_parser("yaml")


def test_tools_travel_with_the_job_and_a_call_with_the_next_prompt() -> None:
    job = GenerateJob(messages=[{"role": "user", "content": "hi"}], tools=[WEATHER], tool_parser="xml")
    assert decode(encode(job), GenerateJob) == job
    assert job.features_used() == ["tools"]
    assert job.tools[0].rendered() == WEATHER
    call = ToolCall(id="call_1", name="get_weather", arguments={"city": "Rome"})
    message = ChatMessage(role="assistant", tool_calls=(call.as_chat(),))
    assert message.rendered()["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"city": "Rome"}, None),
        ({"city": "Rome", "days": None}, None),
        ({"city": "Rome", "more": 1}, None),
        ({"city": "Rome", "days": True}, "days=True is no integer or null"),
        ({"days": 1}, "without city"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments: dict[str, Any], why: str | None) -> None:
    found = why_invalid(TOOL, arguments)
    assert (found is None) if why is None else (found is not None and why in found)


# --- running them -----------------------------------------------------------------------------------------------------


class Counter:
    """What test_a_file_... loads by class_path."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def __call__(self, city: str) -> dict[str, Any]:
        return {"city": city, "n": self.start}


def shout(city: str) -> str:
    return city.upper()


def call(name: str, index: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call_{index}", name=name, arguments=arguments)


def schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def test_calls_run_at_the_same_time_and_come_back_in_order() -> None:
    here = asyncio.Barrier(2)
    there = threading.Barrier(2, timeout=10)

    async def meet(k: int) -> str:
        await here.wait()  # returns only if the other call runs, too
        return f"async {k}"

    def gather(k: int) -> str:
        there.wait()
        return f"plain {k}"

    registry = ToolRegistry()
    registry.add(schema("meet"), meet)
    registry.add(schema("gather"), gather)
    calls = [call(name, i, k=i) for i, name in enumerate(["meet", "gather", "meet", "gather"])]
    outcomes = await run_tool_calls(calls, registry, timeout=10)
    assert [outcome.content for outcome in outcomes] == ["async 0", "plain 1", "async 2", "plain 3"]
    assert outcomes[1].as_message().rendered() == {
        "role": "tool",
        "content": "plain 1",
        "tool_call_id": "call_1",
        "name": "gather",
    }


async def test_what_goes_wrong_is_an_answer_and_takes_no_neighbour_along() -> None:
    release = threading.Event()

    async def slow() -> str:
        await asyncio.Event().wait()
        return "never"

    def broken() -> str:
        raise KeyError("x")

    registry = ToolRegistry()
    for name, runner in (("slow", slow), ("hangs", release.wait), ("broken", broken), ("fine", lambda: [1])):
        registry.add(schema(name), runner)
    invalid = ToolCall(id="i", name="fine", error="the arguments are no JSON")
    calls = [call("slow"), call("hangs"), call("broken"), invalid, call("unknown"), call("fine", wrong=1), call("fine")]
    try:
        outcomes = await run_tool_calls(calls, registry, timeout=0.2)
    finally:
        release.set()
    assert [outcome.ok for outcome in outcomes] == [False] * 6 + [True]
    expected = ["within 0.2 s", "within 0.2 s", "KeyError", "no JSON", "no tool 'unknown'", "TypeError"]
    for outcome, text in zip(outcomes, expected, strict=False):
        assert text in outcome.content
        assert outcome.content.startswith("Error: ")
    assert outcomes[-1].content == "[1]"


async def test_an_answer_that_no_message_can_hold_is_an_error_or_made_to_fit() -> None:
    class Silent:
        def __str__(self) -> str:
            raise KeyError("no words")

    registry = ToolRegistry()
    for name, runner in (("long", lambda: "x" * (MAX_TEXT + 1)), ("silent", Silent), ("half", lambda: "a\ud800")):
        registry.add(schema(name), runner)
    long, silent, half = await run_tool_calls([call("long"), call("silent"), call("half")], registry)
    assert "characters: at most" in (long.error or "")
    assert "no words" in (silent.error or "")
    assert [outcome.as_message().content for outcome in (long, half)] == [long.content, "a?"]


def test_arguments_that_are_nested_without_end_are_shown_as_they_were_written() -> None:
    function = {"name": "f", "arguments": "[" * 100_000}
    message = ChatMessage(role="assistant", tool_calls=[{"function": function}])  # type: ignore[list-item]
    assert message.rendered()["tool_calls"][0]["function"] == function


async def test_a_cancelled_turn_cancels_its_calls() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    registry = ToolRegistry()
    registry.add(schema("waits"), waits)
    turn = asyncio.create_task(run_tool_calls([call("waits")], registry))
    await started.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert ended.is_set()


def test_a_file_names_classes_and_functions_with_their_schemas(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(
        f"""
tools:
  - class_path: {__name__}.Counter
    config: {{start: 3}}
    schema: {json.dumps(WEATHER)}
  - class_name: {__name__}:shout
    tool_schema: {json.dumps(schema("shout"))}
"""
    )
    registry = ToolRegistry.load(file)
    assert [tool.function.name for tool in registry.tools] == ["get_weather", "shout"]
    outcomes = asyncio.run(run_tool_calls([call("get_weather", city="a"), call("shout", city="a")], registry))
    assert [outcome.content for outcome in outcomes] == ['{"city": "a", "n": 3}', "A"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tools: []", "at least one tool"),
        ("tools: [{class_path: os.nothing, schema: {function: {name: a}}}]", "cannot be imported"),
        ("tools: [{class_path: nowhere_at_all.x, schema: {function: {name: a}}}]", "cannot be imported"),
        ("tools: [{class_path: os.sep, schema: {function: {name: a}}}]", "callable"),
        ("tools: [{class_path: os.getpid}]", "class_path and schema"),
        ("tools: [{class_path: os.getpid, schema: {function: {name: 'a b'}}}]", r"tools\.0: schema\.function\.name"),
        ("tools: [{class_path: os.getpid, schema: {function: {name: a}}, confg: {}}]", "confg is unknown"),
        ("tools: {", "not YAML"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        ToolRegistry.load(file)


def test_two_tools_have_two_names() -> None:
    registry = ToolRegistry()
    registry.add(schema("a"), print)
    with pytest.raises(InvalidField, match="no other tool"):
        registry.add(schema("a"), print)
