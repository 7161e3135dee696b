"""What an operation is: a name, parameters that are checked before it starts, and a `run` that may be repeated.

Every module of this room is imported when the operations are first asked for.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from redis.asyncio import Redis

from ....messages.errors import InvalidField
from ....messages.model import as_invalid_field

PROGRESS_EVERY_S = 0.5
"""Seconds between two writes of the progress, at least."""

_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")


class Params(BaseModel):
    """Base of an operation's parameters: plain data, every name known."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class NoParams(Params):
    """The parameters of an operation that takes none."""


P = TypeVar("P", bound=Params)
T = TypeVar("T")
Check = Callable[[], None]


@dataclass(slots=True)
class Context:
    """The surroundings of a running operation.

    redis: the pool's, for idempotent commands only (a lost reply makes redis-py send them again). redis_url: for an
    operation that opens a client of its own.
    notes: what an earlier run of the same job wrote down with `note` before it was cut off; empty the first time.
    """

    redis: Redis
    pool: str
    report: Callable[[dict[str, Any]], None] = lambda _: None
    notes: dict[str, Any] = field(default_factory=dict)
    redis_url: str = ""
    _shown: dict[str, Any] = field(default_factory=dict)
    _at: float = float("-inf")

    def progress(self, done: int, total: int | None = None, message: str = "", *, now: bool = False) -> None:
        """Report `done` of `total` (None: unknown). It is written at most every 0.5 s, or at once with `now`."""
        self._shown = {"done": done, "total": total, "message": message}
        if now or time.monotonic() - self._at >= PROGRESS_EVERY_S:
            self._write()

    def note(self, **facts: str | int | float | bool | None) -> None:
        """Write down facts for a repeated run. Notes are kept with the job and written at once."""
        self.notes.update(facts)
        self._write()

    async def blocking(self, work: Callable[[Check], T]) -> T:
        """Run work that blocks in a thread, so that the operation can be cancelled meanwhile.

        `work` should call its argument often: it raises once the operation is cancelled. Until then this waits for it.
        """
        cancelled = threading.Event()

        def check() -> None:
            if cancelled.is_set():
                raise asyncio.CancelledError

        running = asyncio.ensure_future(asyncio.to_thread(work, check))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait({running})
            raise

    def _write(self) -> None:
        self._at = time.monotonic()
        self.report({"progress": self._shown, "notes": self.notes})


class Operation(ABC, Generic[P]):
    """One kind of operator work; the first line of its docstring is its help text.

    `run` may be cut off anywhere and started again, and may run twice at once, so it must not repeat what is done.
    It returns its result as plain data. It raises RolloutMQError for errors that a repeat would not change.
    """

    name: ClassVar[str]
    params: ClassVar[type[Params]] = NoParams
    timeout_s: ClassVar[int] = 3600

    @abstractmethod
    async def run(self, context: Context, params: P) -> dict[str, Any]:
        """Do it."""

    def found_trouble(self, result: dict[str, Any]) -> bool:
        """Whether a command that waited for this result exits with 1."""
        return False

    @classmethod
    def help(cls) -> str:
        return (cls.__doc__ or "").strip().partition("\n")[0]


REGISTRY: dict[str, Operation[Any]] = {}
Kind = TypeVar("Kind", bound=type[Operation[Any]])


def operation(kind: Kind) -> Kind:
    """Class decorator that registers the operation under its name."""
    name = kind.name
    if not _NAME.fullmatch(name):
        raise InvalidField("name", name, "lower-case letters, digits and '-', a letter first, at most 40")
    if name in REGISTRY and type(REGISTRY[name]).__qualname__ != kind.__qualname__:
        raise InvalidField("name", name, f"a name not taken; {type(REGISTRY[name]).__qualname__} has it")
    REGISTRY[name] = kind()
    return kind


@cache
def _load_catalog() -> None:
    room = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(sys.modules[room].__path__):
        importlib.import_module(f"{room}.{module.name}")


def operations() -> dict[str, Operation[Any]]:
    """All of them, by name."""
    _load_catalog()
    return dict(sorted(REGISTRY.items()))


def checked(name: object, params: object) -> tuple[Operation[Any], Params]:
    """The operation and its parameters. Raises InvalidField naming what is not allowed and what is."""
    known = operations()
    if not isinstance(name, str) or name not in known:
        raise InvalidField("operation", name, f"one of {', '.join(known)}")
    chosen = known[name]
    if not isinstance(params, dict):
        raise InvalidField("params", params, "a map of parameters")
    if unknown := [key for key in params if key not in chosen.params.model_fields]:
        allowed = ", ".join(chosen.params.model_fields) or "nothing: it has no parameters"
        raise InvalidField(str(unknown[0]), params[unknown[0]], f"no parameter of {name}; it takes {allowed}")
    try:
        return chosen, chosen.params.model_validate(params)
    except ValidationError as error:
        raise as_invalid_field(error) from None
