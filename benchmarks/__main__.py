"""`python -m benchmarks queue` and the others: each says on stderr what it does, and ends with one line of JSON."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rolloutmq.ops.cli.options import Plain, alone, finite, group, log_to_stderr

from .harness import BENCHMARKS, run

OUT = Annotated[Path | None, typer.Option(help="Write the figures here, too.")]
QUIET = Annotated[bool, typer.Option("--json", help="Say nothing but the figures.")]


class Commands(Plain):
    """Imports a benchmark when it is run: some of them need torch."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in BENCHMARKS else placeholder, rest


def load(name: str) -> Any:
    """The click command of a benchmark, with the fields of its Plan as options."""
    module = import_module(f".{BENCHMARKS[name][0]}", __package__)
    kinds = get_type_hints(module.Plan)

    def start(*, out: Path | None = None, json: bool = False, **options: Any) -> None:
        log_to_stderr("error")
        run(module.Plan(**options), out, quiet=json)

    given = [_parameter(one, kinds[one.name]) for one in fields(module.Plan) if one.metadata]
    keyword = inspect.Parameter.KEYWORD_ONLY
    given += [inspect.Parameter("out", keyword, annotation=OUT, default=None)]
    given += [inspect.Parameter("json", keyword, annotation=QUIET, default=False)]
    start.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    start.__annotations__ = {one.name: one.annotation for one in given}
    start.__doc__ = module.measure.__doc__
    return alone(start, name)


def _parameter(one: Field[Any], kind: Any) -> inspect.Parameter:
    settings = dict(one.metadata)
    about, named, argument = settings.pop("about"), settings.pop("name", one.name), settings.pop("argument", False)
    default = one.default if one.default_factory is MISSING else one.default_factory()
    flag = f"--{named.replace('_', '-')}"
    if kind in (float, float | None):
        settings["callback"] = finite
    flag += f"/--no{flag[1:]}" if default is True else ""
    info = typer.Argument(help=about) if argument else typer.Option(flag, help=about, **settings)
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info], default=default
    )


def _placeholder() -> None: ...


app = group("Measure queue, engine, sync or a fleet; prints JSON last.", Commands)
for _name, (_, _line) in BENCHMARKS.items():
    app.command(_name, help=_line)(_placeholder)

if __name__ == "__main__":
    app()
