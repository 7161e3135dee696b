"""A Redis that answers what it is told to: the decoders behind it get the same broken answer from every command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any


class Answers:
    """answers: by command, in lower case, what it answers; a function of the command's arguments, or the answer."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self._answers = answers

    def __getattr__(self, command: str) -> Callable[..., Awaitable[Any]]:
        if command not in self._answers:
            raise AttributeError(command)

        async def call(*args: Any, **_: Any) -> Any:
            await asyncio.sleep(0)
            return self._answer(command, args)

        return call

    def _answer(self, command: str, args: tuple[Any, ...]) -> Any:
        answer = self._answers[command]
        return answer(*args) if callable(answer) else answer

    async def sscan_iter(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        for member in self._answers["smembers"]:
            yield member

    async def hscan_iter(self, key: Any, **_: Any) -> AsyncIterator[Any]:
        for item in self._answer("hgetall", (key,)).items():
            yield item

    def pipeline(self, **_: Any) -> Pipeline:
        return Pipeline(self)


class Pipeline:
    def __init__(self, redis: Answers) -> None:
        self._redis = redis
        self._answers: list[Any] = []

    def __getattr__(self, command: str) -> Callable[..., None]:
        return lambda *args: self._answers.append(self._redis._answer(command, args))

    async def execute(self, **_: Any) -> list[Any]:
        return self._answers

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None
