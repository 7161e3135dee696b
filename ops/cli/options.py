"""What commands share: options, how results and errors are printed, and commands derived from models."""

from __future__ import annotations

import inspect
import json as json_module
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..terminal import printable

if TYPE_CHECKING:
    from ..flags import Flag


def finite(value: float | None) -> float | None:
    """For options that are seconds: a bound lets NaN pass."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def seconds(about: str, least: float = 0.0, most: float | None = None, *, name: str | None = None) -> Any:
    """An option that is a finite number of seconds. name: of its flag, where that is not the parameter's."""
    names = () if name is None else (name,)
    return typer.Option(*names, min=least, max=most, callback=finite, help=about)


RedisUrl = Annotated[
    str,
    typer.Option(
        envvar="ROLLOUTMQ_REDIS", help="URL: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://."
    ),
]
Pool = Annotated[str, typer.Option(envvar="ROLLOUTMQ_POOL", help="Name of the pool.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
Target = Annotated[float, seconds("Seconds in which workers that are wanted do what waits.", 1.0)]
Stabilise = Annotated[float, seconds("Seconds for which a worker that leaves was not needed.")]
StartTakes = Annotated[float, seconds("Seconds from a worker's start until it serves.", name="--start-takes")]
LEVELS = ("debug", "info", "warning", "error")


def group(about: str, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """A command that has commands. Help is plain text: rich would take longer to import than most commands to run."""
    return typer.Typer(help=about, cls=cls, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def alone(function: Callable[..., None], name: str) -> Any:
    """The click command that a function is."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name)(function)
    return typer.main.get_command(app)


EXTRA_OF = {
    **dict.fromkeys(("psutil", "safetensors", "transformers"), "worker"),
    **dict.fromkeys(("sglang", "torch"), "sglang"),
    **dict.fromkeys(("orjson", "sse_starlette", "starlette", "uvicorn"), "gateway"),
    **{"matplotlib": "demo", "pyarrow": "parquet", "zstandard": "journal", "rq": "ops", "prometheus_client": "metrics"},
}
"""Libraries that some commands import -> what brings them. Other errors of missing libraries say it themselves."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """End the command with one line on stderr instead of a traceback. Exit code 130 for Ctrl-C, else 2.

    Errors raised on purpose, Redis' own and the operating system's are such lines, and so is a library that is not
    installed. Others are bugs and keep theirs.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.secho("interrupted", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        from redis.exceptions import RedisError

        from ...messages.errors import RolloutMQError

        library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if library in EXTRA_OF:
            needs = f"this needs {library}, which is not installed: pip install 'rolloutmq[{EXTRA_OF[library]}]'"
            typer.secho(needs, fg="red", err=True)
            raise typer.Exit(2) from error
        if not isinstance(error, RolloutMQError | RedisError | OSError) or isinstance(error, BrokenPipeError):
            raise
        told = printable(str(error), keep="\n")
        typer.secho(f"{type(error).__name__}: {told}", fg="red", err=True)
        raise typer.Exit(2) from error


class Plain(TyperGroup):
    """Errors of any command end in one line."""

    def invoke(self, ctx: Any) -> Any:
        with plain_errors():
            return super().invoke(ctx)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PERIOD = r"(\d{1,9}(?:\.\d+)?)([smhd])"


def moment(option: str, text: str, now: float | None = None) -> float:
    """Unix seconds: such a number, an age back from `now`, or a date, in UTC unless it says a zone.

    now: by default by this machine's clock. Raises InvalidField.
    """
    if re.fullmatch(_PERIOD, text):
        return max(0.0, (time.time() if now is None else now) - period(option, text))
    if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text):
        return float(text)
    try:
        date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        from ...messages.errors import InvalidField

        allowed = "an age such as 90s, 30m, 2h, 7d, a date such as 2026-01-31T08:00, or seconds since 1970"
        raise InvalidField(option, text, allowed) from None


def period(option: str, text: str) -> float:
    """Seconds of a text such as 90s, 30m, 2h or 1d. Raises InvalidField."""
    if match := re.fullmatch(_PERIOD, text):
        return float(match[1]) * _UNITS[match[2]]
    from ...messages.errors import InvalidField

    raise InvalidField(option, text, "a time such as 90s, 30m, 2h or 1d")


def ids(option: str, text: str, what: str = "token ids such as 5,17,3") -> list[int]:
    """Integers with commas or spaces between them. what: they are, for the InvalidField that this raises."""
    parts = text.replace(",", " ").split()
    if not parts or not all(re.fullmatch("[0-9]{1,10}", part) and int(part) < 1 << 31 for part in parts):
        from ...messages.errors import InvalidField

        raise InvalidField(option, text, f"{what}, each below {1 << 31}")
    return [int(part) for part in parts]


def say(state: object, lines: Iterable[str], json: bool) -> None:
    """Print `state` as one line of JSON for programs, or `lines` for people."""
    for line in [json_module.dumps(state, ensure_ascii=False)] if json else map(printable, lines):
        typer.echo(line)


def log_to_stderr(level: str) -> None:
    """Set up logging for the process of a command. Raises InvalidField for a level that there is not."""
    if level.lower() not in LEVELS:
        from ...messages.errors import InvalidField

        raise InvalidField("log_level", level, f"one of {', '.join(LEVELS)}")
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def parameter(flag: Flag, *, argument: bool = False, **settings: Any) -> inspect.Parameter:
    """The command-line parameter for a field of a model. settings: of typer.Option, beside its help."""
    info: Any = typer.Argument(metavar=flag.name.upper(), help=flag.help) if argument else None
    info = info or typer.Option(help=flag.help, **settings)
    kind: Any = list[flag.kind] if flag.many else flag.kind  # type: ignore[name-defined]
    default = inspect.Parameter.empty if flag.required else flag.default
    return given(flag.name, kind if default is not None else kind | None, info, default)


def given(name: str, kind: Any, info: Any = None, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """A parameter of a derived command. kind: its type, annotated already if `info` is None."""
    annotation = kind if info is None else Annotated[kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def derived(run: Callable[..., None], parameters: Iterable[inspect.Parameter], about: str) -> Callable[..., None]:
    """`run` as typer sees a function that is written with these parameters and this docstring."""
    ordered = sorted(parameters, key=lambda one: one.default is not inspect.Parameter.empty)
    run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in ordered}
    run.__doc__ = about
    return run
