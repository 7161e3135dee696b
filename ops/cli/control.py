"""`rolloutmq control`: commands to workers, and what each of them answered.

Every action of `messages.model.ACTIONS` has a command, or shares one with its opposite. Help, arguments and flags come
from the actions' models.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...messages.errors import ConfigError
from ...messages.model import ACTIONS, check_params
from ...messages.redis import DEFAULT_URL
from ...producer.control import Answers, PoolAudit, PoolControl
from ..files import check_out, writing
from ..flags import Flag, flags_of
from ..redis import reach
from .options import Json, Pool, RedisUrl, derived, given, group, parameter, say, seconds

app = group("Tell workers to do something, and wait for each one's answer. Exit code 1 if one did not do it.")
Worker = Annotated[str, typer.Option("--worker", help="Id of the worker; default: all that are alive.")]
Timeout = Annotated[float | None, seconds("Seconds to wait for answers; default: PoolControl's for this action.", 0.1)]
Out = Annotated[Path | None, typer.Option(help="Write traces here, on this machine: small ones (8 MiB).")]

WORDS: dict[str, tuple[str, str]] = {
    "version": ("version", "show"),
    "set_version": ("version", "set"),
    "adapters": ("adapters", "list"),
    "load_adapter": ("adapters", "load"),
    "unload_adapter": ("adapters", "unload"),
    "flush_cache": ("cache", "flush"),
    "clear_storage": ("cache", "clear"),
    "start_profile": ("profile", "start"),
    "stop_profile": ("profile", "stop"),
    "audit": ("audit-weights", ""),  # `ops run audit-broker` is another audit
}
"""Action -> its command and its word there, where the command is not called like the action."""
COMMANDS: dict[str, dict[str, str]] = {}
"""Command -> word -> action. "show" and "list" need not be typed."""
for _action in ACTIONS:
    _name, _word = WORDS.get(_action, (_action, ""))
    COMMANDS.setdefault(_name, {})[_word] = _action
ARGUMENTS = {("journal", "folder")}
"""Fields that are arguments although they have a default; required fields are arguments anyway."""
FETCH_BYTES = 8 << 20


def _parameters(words: Mapping[str, str], flags: Mapping[str, Flag]) -> Iterator[inspect.Parameter]:
    first, *others = words
    if others:
        kind: Any = Literal[tuple(words)]
        told = " ".join(f"{word}: {inspect.getdoc(ACTIONS[action])}" for word, action in words.items())
        default: Any = first if first in {"show", "list"} else inspect.Parameter.empty
        yield given("do", kind, typer.Argument(metavar="ACTION", help=told), default)
    for flag in flags.values():  # what one action needs, another one may not take
        argument = flag.required or any((action, flag.field) in ARGUMENTS for action in words.values())
        yield parameter(replace(flag, required=flag.required and not others), argument=argument)
    yield given("redis", RedisUrl, None, DEFAULT_URL)
    yield given("pool", Pool, None, "default")
    yield given("worker", Worker, None, "")
    yield given("timeout", Timeout, None, None)
    yield given("json", Json, None, False)
    if "stop_profile" in words.values():
        yield given("out", Out, None, None)


def _add(name: str, words: Mapping[str, str]) -> None:
    flags: dict[str, Flag] = {}
    for action in words.values():
        flags = {flag.name: flag for flag in flags_of(ACTIONS[action]) if flag.field != "fetch_bytes"} | flags

    def run(
        *, redis: str, pool: str, worker: str, timeout: float | None, json: bool, do: str = "", out: Path | None = None,
        **typed: Any,
    ) -> None:  # fmt: skip
        action = words[do]
        params = {flags[one].field: value for one, value in typed.items() if value not in (None, flags[one].default)}
        if out is not None:
            check_out("--out", out, folder=True)
            params["fetch_bytes"] = FETCH_BYTES
        if unknown := sorted(params.keys() - ACTIONS[action].model_fields.keys()):
            raise ConfigError(f"control {name} {do} takes no {unknown[0]}")
        check_params(action, params)
        reach(redis, pool)
        answers = asyncio.run(_ask(redis, pool, action, params, worker, timeout))
        _audited(answers, json) if isinstance(answers, PoolAudit) else _answered(answers, json, out)

    about = inspect.getdoc(ACTIONS[next(iter(words.values()))]) or ""
    app.command(name)(derived(run, _parameters(words, flags), about))


async def _ask(
    redis: str, pool: str, action: str, params: dict[str, Any], worker: str, timeout: float | None
) -> Answers | PoolAudit:
    async with PoolControl(redis, pool) as control:
        waits = {} if timeout is None else {"timeout": timeout}
        answers: Answers | PoolAudit = await getattr(control, action)(**params, worker_id=worker, **waits)
        return answers


for _name, _words in COMMANDS.items():
    _add(_name, _words)


def _answered(answers: Answers, json: bool, out: Path | None) -> None:
    if out is not None:
        for one, result in answers.results.items():
            for name, content in dict(result.get("fetched", {})).items():
                target = out / _file_name(one) / _file_name(name)
                with writing("--out", target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
    lines = [f"{one.worker_id}  {_told(one.result)}" if one.ok else _failed(one) for one in answers.values()]
    say(_plain(answers), lines or [answers.told()], json)
    raise typer.Exit(int(not answers.ok))


def _audited(found: PoolAudit, json: bool) -> None:
    lines = [
        f"{one.worker_id}  version {one.result['version']}  {_findings(one.result)}" if one.ok else _failed(one)
        for one in found.answers.values()
    ]
    lines += [f"not the same weights: {', '.join(group)}" for group in found.apart]
    state = {"clean": found.clean, "apart": found.apart, "workers": _plain(found.answers)}
    say(state, lines or [found.answers.told()], json)
    raise typer.Exit(int(not found.clean))


def _plain(answers: Answers) -> dict[str, Any]:
    return {
        worker: {"ok": one.ok, "result": _text(one.result)} | ({} if one.ok else {"kind": one.kind, "error": one.error})
        for worker, one in answers.items()
    }


def _text(value: Any) -> Any:
    """Without the bytes of fetched files."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return {name: _text(each) for name, each in value.items()} if isinstance(value, dict) else value


def _file_name(told: str) -> str:
    """A name that leads nowhere else: others than the worker may write what a worker is called in Redis."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", told).lstrip(".") or "_"


def _told(result: Any) -> str:
    told = [f"{name}={_text(value)}" for name, value in result.items() if value not in ("", (), [], {})]
    return "  ".join(told) or "done"


def _failed(one: Any) -> str:
    return f"{one.worker_id}  {one.kind}: {one.error}"


def _findings(result: Any) -> str:
    if result["clean"]:
        compared = f"{result['compared']} tensors as the trainer sent them" if result["compared"] else ""
        return f"clean: {compared or 'nothing to compare with (' + str(result['not_compared']) + ')'}"
    return "; ".join(f"{kind}: {', '.join(result[kind])}" for kind in ("wrong", "nan", "inf", "zero") if result[kind])
