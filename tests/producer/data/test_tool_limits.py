"""How many calls of a turn run, and how much of an answer the model is shown."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutmq.messages.errors import InvalidField
from rolloutmq.messages.model import Tool, ToolCall
from rolloutmq.producer.data import ToolLimits, ToolRegistry, run_tool_calls

TOOL = Tool.model_validate({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}})


async def test_calls_beyond_the_limit_do_not_run_and_the_model_is_told() -> None:
    ran: list[str] = []
    registry = ToolRegistry(limits=ToolLimits(max_parallel_calls=2))

    def visit(city: str) -> None:
        ran.append(city)

    registry.add(TOOL, visit)
    calls = [ToolCall(id=city, name="get_weather", arguments={"city": city}) for city in ("Rome", "Oslo", "Bonn")]
    calls[1:1] = [ToolCall(id="1", error="not JSON"), ToolCall(id="2", name="strange")]  # they would not run anyway
    outcomes = await run_tool_calls(calls, registry)
    assert sorted(ran) == ["Oslo", "Rome"]
    assert [outcome.call.id for outcome in outcomes] == ["Rome", "1", "2", "Oslo", "Bonn"]
    assert [outcome.ok for outcome in outcomes] == [True, False, False, True, False]
    assert outcomes[4].as_message().content == "Error: only the first 2 calls of a turn are run"


@pytest.mark.parametrize(
    ("most", "side", "shown"),
    [
        (10, "left", "0123456789"),
        (4, "left", "0123...(truncated)"),
        (4, "right", "(truncated)...6789"),
        (4, "middle", "01...(truncated)...89"),
        (1, "middle", "...(truncated)..."),
    ],
)
async def test_a_long_answer_is_shown_in_part(most: int, side: Any, shown: str) -> None:
    """With VERL's marks, and VERL's words for the side that is kept."""
    registry = ToolRegistry(limits=ToolLimits(max_response_length=most, truncate_side=side))
    registry.add(TOOL, lambda city: "0123456789")
    (outcome,) = await run_tool_calls([ToolCall(id="1", name="get_weather", arguments={"city": "x"})], registry)
    assert (outcome.ok, outcome.content) == (True, shown)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_parallel_calls": 0}, "max_parallel_calls=0: an integer, at least 1"),
        ({"max_response_length": 2.5}, "max_response_length=2.5: an integer, at least 1"),
        ({"truncate_side": "top"}, 'truncate_side=\'top\': "left", "middle" or "right"'),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidField) as caught:
        ToolLimits(**limits)
    assert str(caught.value) == says
