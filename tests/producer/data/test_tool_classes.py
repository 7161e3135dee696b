"""Tool classes in VERL's form: made with (config, tool_schema), and created, executed and released for each call."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.model.tools import ToolCall
from rolloutmq.producer.data import ToolRegistry, from_openai, run_tool_calls

PNG, MP4 = b"\x89PNG\r\n\x1a\n" + bytes(8), b"\0\0\0\x18ftypmp42" + bytes(12)
SCHEMA = {
    "type": "function",
    "function": {
        "name": "check",
        "description": "Checks an answer.",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    },
}


class Response(BaseModel):
    """What VERL's tools return: text, images, video."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class Check:
    """Written as VERL's own examples are: what an instance knows is kept under its id."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.truth: dict[str, Any] = {}
        self.released: list[str] = []
        self.running = asyncio.Event()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Response]:
        assert instance_id is not None
        self.truth[instance_id] = kwargs["create_kwargs"].get("truth")
        return instance_id, Response()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Response, float, dict[str, Any]]:
        answer = parameters["answer"]
        match answer:
            case "hang":
                self.running.set()
                await asyncio.Event().wait()
            case "break":
                raise KeyError("broken")
            case "image":
                return Response(image=[b""]), 0.0, {}
            case "path":
                return Response(image=["/etc/passwd"]), 0.0, {}
            case "show":
                return Response(text="Look.", image=[PNG, None, PNG], video=[MP4]), 0.0, {}
            case "only":
                return Response(image=[PNG]), 0.0, {}
        right = answer == self.truth[instance_id]
        return Response(text=f"{answer}: {right}"), self.config["step"], {"right": right}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 1.0 if self.truth[instance_id] == "42" else 0.25

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.truth[instance_id]
        self.released.append(instance_id)


class Forgetful(Check):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Response]:
        raise KeyError("nothing to create")


class Plain(Check):
    def release(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        """Not a coroutine function."""


class Described(Check):
    """Has a schema of its own, as VERL's BaseTool allows."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        from rolloutmq.messages.model.tools import Tool  # noqa: PLC0415

        super().__init__(config, tool_schema or Tool.model_validate(SCHEMA))


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"class_name": f"{__name__}.{name}", "config": {"type": "native", "step": -0.5}, **more}


def load(tmp_path: Path, *entries: dict[str, Any], alone: bool = False) -> ToolRegistry:
    file = tmp_path / "tools.yaml"
    file.write_text(json.dumps(list(entries) if alone else {"tools": list(entries)}))
    return ToolRegistry.load(file)


def call(answer: str) -> ToolCall:
    return ToolCall(id=f"call_{answer}", name="check", arguments={"answer": answer})


def instance(registry: ToolRegistry) -> Any:
    return registry.runner("check").tool  # type: ignore[union-attr]


@pytest.mark.parametrize("alone", [False, True])
async def test_a_tool_class_is_created_executed_and_released_for_each_call(tmp_path: Path, alone: bool) -> None:
    registry = load(tmp_path, entry("Check", tool_schema=SCHEMA), alone=alone)
    assert [tool.rendered() for tool in registry.tools] == [SCHEMA]
    kwargs = {"check": {"create_kwargs": {"truth": "42"}}}
    right, wrong = await run_tool_calls([call("42"), call("41")], registry, tools_kwargs=kwargs)
    assert (right.content, right.reward, right.state_reward) == ("42: True", -0.5, 1.0)
    assert (wrong.content, wrong.metrics) == ("41: False", {"right": False})
    (other,) = await run_tool_calls([call("42")], registry)
    assert (other.content, other.state_reward) == (
        "42: False",
        0.25,
    )  # the arguments of one turn are not the next one's
    tool = instance(registry)
    assert len(set(tool.released)) == 3
    assert not tool.truth


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("break", "KeyError"),
        ("image", "image='bytes': 1 to"),
        ("path", "which the tool has read"),
        ("hang", "did not answer within"),
    ],
)
async def test_an_instance_is_released_however_its_call_ends(tmp_path: Path, answer: str, says: str) -> None:
    registry = load(tmp_path, entry("Check", tool_schema=SCHEMA))
    (outcome,) = await run_tool_calls([call(answer)], registry, timeout=0.05 if answer == "hang" else 10)
    assert says in (outcome.error or "")
    assert (outcome.reward, outcome.state_reward) == (None, None)
    assert len(instance(registry).released) == 1


async def test_pictures_and_videos_of_an_answer_are_shown_with_the_tools_message(tmp_path: Path) -> None:
    registry = load(tmp_path, entry("Check", tool_schema=SCHEMA))
    shown, only = await run_tool_calls([call("show"), call("only")], registry)
    assert [(one.kind, one.data) for one in shown.media] == [("image", PNG), ("image", PNG), ("video", MP4)]
    chat, media = from_openai([shown.as_message(), only.as_message()])
    assert [message.media for message in chat] == [("image", "image", "video"), ("image",)]
    assert chat[0].rendered()["content"][-1] == {"type": "text", "text": "Look."}
    assert (chat[0].role, chat[0].tool_call_id, chat[0].name) == ("tool", "call_show", "check")
    assert len(chat[1].rendered()["content"]) == 1
    assert media == (*shown.media, *only.media)


async def test_an_instance_is_released_when_the_turn_is_cancelled(tmp_path: Path) -> None:
    registry = load(tmp_path, entry("Check", tool_schema=SCHEMA))
    turn = asyncio.create_task(run_tool_calls([call("hang")], registry))
    await instance(registry).running.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert len(instance(registry).released) == 1


async def test_a_release_that_fails_costs_no_answer_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = load(tmp_path, entry("Forgetful", tool_schema=SCHEMA))
    with caplog.at_level(logging.WARNING):
        (outcome,) = await run_tool_calls([call("42")], registry)
    assert outcome.error == "check: KeyError: 'nothing to create'"
    assert "release" in caplog.text


def test_a_class_may_have_its_schema_itself(tmp_path: Path) -> None:
    registry = load(tmp_path, entry("Described"))
    assert [tool.rendered() for tool in registry.tools] == [SCHEMA]


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("Plain", {"tool_schema": SCHEMA}, "release has to be a coroutine function"),
        ("Check", {}, "tool_schema is needed"),
        ("Check", {"mcp": {"mcp_servers_config_path": "servers.json"}, "tool_schema": None}, "unknown beside mcp"),
    ],
)
def test_what_cannot_run_is_refused_with_its_place(tmp_path: Path, name: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"tools\.0: .*{says}"):
        load(tmp_path, entry(name, **more))
