"""SGLang's parsers of tool calls, for text that a model wrote. Imports SGLang where a job has tools, and nowhere else.

The text is the model's, so anything may stand in it. A parser that fails on it has read nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from ...messages.model import Tool

logger = logging.getLogger(__name__)
logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)  # a result has the error of its call
Raw = tuple[str | None, str]
"""Name and arguments of a call. The arguments are JSON text."""


def parser_names() -> Iterable[str]:
    """Return the names of the parsers in this release of SGLang."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser  # noqa: PLC0415

    names: Iterable[str] = FunctionCallParser.ToolCallParserEnum
    return names


class ToolParser:
    """One of SGLang's parsers, by name. Raises whatever SGLang raises for one that needs more than name and tools.

    opening, closing: tags around a call as the parser has them, "" for none. begin, end: the same as the model was
    trained to write them. Some parsers need the line breaks.
    """

    def __init__(self, name: str, tools: Sequence[Tool] = ()) -> None:
        self._name, self._tools = name, [_sglang_tool(tool) for tool in tools]
        detector = self._made().detector
        self._detector = detector
        self.begin = str(getattr(detector, "bot_token", "") or "")
        self.end = str(getattr(detector, "eot_token", "") or "")
        self.opening = (self.begin or getattr(detector, "tool_call_start_token", "") or "").strip()
        self.closing = (self.end or getattr(detector, "tool_call_end_token", "") or "").strip()

    def sees_call(self, text: str) -> bool:
        """Whether there seems to be a call in `text`."""
        return bool(self._detector.has_tool_call(text))

    def read(self, text: str) -> list[Raw]:
        """Return the calls in `text`, also of tools that do not exist. Returns none if the parser fails."""
        from sglang.srt.environ import envs  # noqa: PLC0415

        parser = self._made()  # a parser keeps state: a new one for each text
        with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
            try:
                return [(item.name, item.parameters) for item in parser.parse_non_stream(text)[1]]
            except Exception as error:  # parsers expect well-formed text, and models write any
                logger.debug("a parser of SGLang failed", exc_info=error)
                return []

    def _made(self) -> Any:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser  # noqa: PLC0415

        return FunctionCallParser(self._tools, self._name)


def _sglang_tool(tool: Tool) -> Any:
    from sglang.srt.entrypoints.openai import protocol  # noqa: PLC0415

    return protocol.Tool(type="function", function=protocol.Function(**tool.rendered()["function"]))
