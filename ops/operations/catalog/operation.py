"""What an operation is: a function that may be repeated. Its name and its parameters, which are checked before it
starts, are read from its signature.

Every module of this room is imported when the operations are first asked for.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from redis.asyncio import Redis

from ....messages.errors import InvalidField
from ....messages.model import as_invalid_field

PROGRESS_EVERY_S = 0.5
"""Seconds between two writes of the progress, at least."""

T = TypeVar("T")
Check = Callable[[], None]
HostPath = Annotated[str, Field(pattern="^/")]
"""Of a file or folder on the worker's host."""
Commas = BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
"""A parameter with several values may be one text, with commas between them."""


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
    redis_url: str = field(default="", repr=False)
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


Run = Callable[..., Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of operator work.

    run: may be cut off anywhere and started again, and may run twice at once, so it must not repeat what is done. It
    returns its result as plain data. It raises RolloutMQError for errors that a repeat would not change.
    params: plain data, every name known. found_trouble: whether a command that waited for this result exits with 1.
    """

    name: str
    run: Run
    params: type[BaseModel]
    timeout_s: int
    found_trouble: Callable[[dict[str, Any]], bool]

    @property
    def help(self) -> str:
        return (inspect.getdoc(self.run) or "").partition("\n")[0]


REGISTRY: dict[str, Operation] = {}


def operation(
    *, timeout_s: int = 3600, found_trouble: Callable[[dict[str, Any]], bool] = lambda _: False
) -> Callable[[Run], Run]:
    """Decorator that registers a function: `do_this(context, *, …)` is the operation do-this.

    Its keyword parameters are the operation's, as pydantic checks them.
    """

    def register(run: Run) -> Run:
        name = run.__name__.replace("_", "-")
        if name in REGISTRY:
            raise InvalidField("name", name, f"a name not taken; {REGISTRY[name].run.__module__} has it")
        kinds = get_type_hints(run, include_extras=True)
        fields: dict[str, Any] = {
            one.name: (kinds[one.name], ... if one.default is one.empty else one.default)
            for one in inspect.signature(run).parameters.values()
            if one.kind is one.KEYWORD_ONLY
        }
        plain = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)
        params: type[BaseModel] = create_model(name, __config__=plain, **fields)
        REGISTRY[name] = Operation(name, run, params, timeout_s, found_trouble)
        return run

    return register


@cache
def _load_catalog() -> None:
    room = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(sys.modules[room].__path__):
        importlib.import_module(f"{room}.{module.name}")


def operations() -> dict[str, Operation]:
    """All of them, by name."""
    _load_catalog()
    return dict(sorted(REGISTRY.items()))


def checked(name: object, params: object) -> tuple[Operation, BaseModel]:
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
