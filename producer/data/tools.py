"""Tools that a trainer runs for its model: a registry loaded from the trainer's file, and runs of a turn's calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ...messages.arguments import whole_number
from ...messages.errors import ConfigError, InvalidField
from ...messages.model import MAX_TEXT, ChatMessage, Medium, Tool, ToolCall
from .either import call_either, told
from .mcp_server import McpServer
from .tool_class import ToolAnswer, ToolClass
from .tool_files import read_tool, read_tool_file

Runner = Callable[..., Any]
TruncateSide = Literal["left", "middle", "right"]


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The outcome of one call. content: the tool's answer, or the error as text for the model. seconds: duration.

    reward, state_reward, metrics: of a tool class in VERL's form, what its `execute` and `calc_reward` returned; else
    None, None and {}. media: what the answer shows the model beside its text.
    """

    call: ToolCall
    content: str
    error: str | None = None
    seconds: float = 0.0
    reward: float | None = None
    state_reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Medium, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the tool ran and answered."""
        return self.error is None

    def as_message(self) -> ChatMessage | dict[str, Any]:
        """The message of the next prompt that answers the call; with media, in OpenAI's form, media before text."""
        about = {"role": "tool", "tool_call_id": self.call.id, "name": self.call.name}
        if not self.media:
            return ChatMessage(content=self.content, **about)
        text = [{"type": "text", "text": self.content}] if self.content else []
        return {**about, "content": [*({"type": one.kind, one.kind: one} for one in self.media), *text]}


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """How much tools may do and say in a turn, in VERL's terms. Raises InvalidField.

    max_parallel_calls: calls of a turn that run. The others are told to the model as errors. None: all of them run.
    max_response_length: characters of an answer that the model is shown. None: all of them.
    truncate_side: what is shown of a longer answer: "left" its beginning, "right" its end, "middle" both.
    """

    max_parallel_calls: int | None = None
    max_response_length: int | None = None
    truncate_side: TruncateSide = "middle"

    def __post_init__(self) -> None:
        for name in ("max_parallel_calls", "max_response_length"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))
        if self.truncate_side not in get_args(TruncateSide):
            raise InvalidField("truncate_side", self.truncate_side, '"left", "middle" or "right"')

    def shown(self, text: str) -> str:
        """What the model is shown of an answer."""
        most = self.max_response_length
        if most is None or len(text) <= most:
            return text
        if self.truncate_side == "middle":
            return f"{text[: most // 2]}...(truncated)...{text[len(text) - most // 2 :]}"
        return f"{text[:most]}...(truncated)" if self.truncate_side == "left" else f"(truncated)...{text[-most:]}"


class ToolRegistry:
    """Tools by name. Each has a description for the model and a runner. limits: for the calls of a turn.

    A runner is called with the arguments by name. It may be a coroutine function. Several calls may run at once.
    """

    def __init__(
        self,
        tools: Mapping[str, tuple[Tool, Runner]] | None = None,
        limits: ToolLimits = ToolLimits(),
    ) -> None:
        self._tools, self.limits = dict(tools or {}), limits
        self._servers: list[McpServer] = []

    def add(self, tool: Tool | Mapping[str, Any], runner: Runner) -> None:
        """Add a tool. Raises InvalidField for a wrong description or a name that is in use."""
        whole = tool if isinstance(tool, Tool) else read_tool("tool", tool)
        if whole.function.name in self._tools:
            raise InvalidField("function.name", whole.function.name, "a name that no other tool has")
        self._tools[whole.function.name] = whole, runner

    @property
    def tools(self) -> tuple[Tool, ...]:
        """For `GenerateJob.tools`."""
        return tuple(tool for tool, _ in self._tools.values())

    def runner(self, name: str | None) -> Runner | None:
        """The runner of the tool of that name, or None."""
        return self._tools[name][1] if name in self._tools else None

    @classmethod
    def load(cls, path: str | Path, limits: ToolLimits = ToolLimits()) -> ToolRegistry:
        """The tools of a YAML (or JSON) file:

            tools:
              - class_path: my_project.tools.Search   # a class, made with `config`, or a plain function
                config: {index: /data/index}
                schema: {type: function, function: {name: search, description: …, parameters: {…}}}

        VERL's files work too: its names class_name and tool_schema, its tool classes (see `ToolClass`), and the list
        without `tools:` around it. An entry with `mcp` has the tools of MCP servers (see `McpServer`). This connects to
        them, and blocks until they have named their tools; `close` disconnects them. The file decides which code runs
        in this process, so it must be the trainer's own. No message can change it. Raises ConfigError.
        """
        registry = cls(limits=limits)
        try:
            for where, tool, runner in read_tool_file(Path(path), registry._servers):
                try:
                    registry.add(tool, runner)
                except (InvalidField, ConfigError) as error:
                    raise ConfigError(f"{where}: {error}") from error
        except BaseException:
            registry.close()
            raise
        return registry

    def close(self) -> None:
        """Disconnect from MCP servers, and wait until their programs have ended. Other tools stay as they are."""
        for server in self._servers:
            server.close()


async def run_tool_calls(
    calls: Sequence[ToolCall],
    registry: ToolRegistry,
    timeout: float | None = None,
    tools_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[ToolOutcome]:
    """Run the calls of a turn at the same time. Returns their outcomes in the order of the calls.

    timeout: seconds for each call. A plain function cannot be stopped: after the timeout it runs on in its thread, and
    its answer is dropped. An invalid call and a tool's exception each become an outcome with an error.
    tools_kwargs: for tool classes in VERL's form, its data field of that name: `{tool: {"create_kwargs": {...}}}`.
    """
    kwargs, most = tools_kwargs or {}, registry.limits.max_parallel_calls
    runs = [place for place, call in enumerate(calls) if call.error is None and registry.runner(call.name)]
    too_many = set(runs[most:] if most is not None else ())
    error = f"only the first {most} calls of a turn are run"

    async def outcome(place: int, call: ToolCall) -> ToolOutcome:
        if place in too_many:
            return ToolOutcome(call, f"Error: {error}", error)
        return await _run(call, registry, timeout, kwargs)

    return list(await asyncio.gather(*(outcome(place, call) for place, call in enumerate(calls))))


async def _run(
    call: ToolCall, registry: ToolRegistry, timeout: float | None, kwargs: Mapping[str, Mapping[str, Any]]
) -> ToolOutcome:
    runner = registry.runner(call.name)
    if isinstance(runner, ToolClass):
        runner = runner.created_with(kwargs.get(runner.name, {}).get("create_kwargs", {}))
    if call.error is not None or runner is None:
        error = call.error or f"there is no tool {call.name!r}"
        return ToolOutcome(call, f"Error: {error}", error)
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            answer = await call_either(runner, **(call.arguments or {}))
            said = answer if isinstance(answer, ToolAnswer) else ToolAnswer(answer)
            text = _as_text(said.content, registry.limits)
    except TimeoutError:
        error = f"{call.name} did not answer within {timeout:g} s" if timeout else f"{call.name}: TimeoutError"
    except Exception as raised:  # a tool may raise anything; the other calls go on
        error = f"{call.name}: {told(raised)}"
    else:
        seconds = time.monotonic() - began
        return ToolOutcome(call, text, None, seconds, said.reward, said.state_reward, said.metrics, said.media)
    return ToolOutcome(call, f"Error: {error}", error, time.monotonic() - began)


def _as_text(answer: Any, limits: ToolLimits) -> str:
    """The answer as the text of a message, cut to the limits. Raises ValueError if it is too long even so."""
    if isinstance(answer, str):
        text = answer
    else:
        try:
            text = json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(answer)
    text = limits.shown(text)
    if len(text) > MAX_TEXT:
        raise ValueError(f"an answer of {len(text)} characters: at most {MAX_TEXT} fit a message")
    return text.encode(errors="replace").decode()  # a lone surrogate cannot be encoded
