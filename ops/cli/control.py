"""`rolloutmq control`: commands to workers, and what each of them answered.

One command for every action of `messages.model.ACTIONS`: help, arguments and flags come from the action's model, the
default timeout from PoolControl's method.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from ...messages.model import ACTIONS
from ...messages.redis import DEFAULT_URL
from ...producer.control import Answers, PoolAudit, PoolControl
from ..files import check_out, writing
from ..flags import flags_of
from ..redis import reach
from .options import Json, Pool, RedisUrl, derived, finite, given, group, parameter, say

app = group("Tell workers to do something, and wait for each one's answer. Exit code 1 if one did not do it.")
Worker = Annotated[str, typer.Option("--worker", help="Id of the worker; default: all that are alive.")]
Out = Annotated[Path | None, typer.Option(help="Write traces here, on this machine: small ones (8 MiB).")]

NAMES = {"audit": "audit-weights"}
"""Commands that are not called like their action: `ops run audit-broker` is another audit."""
OPTIONAL_ARGUMENTS = {("journal", "folder"), ("unload_adapter", "version")}
"""Fields that are arguments although they have a default; required fields are arguments anyway."""
FETCH_BYTES = 8 << 20


def _add(action: str, model: type[BaseModel]) -> None:
    flags = {flag.name: flag for flag in flags_of(model) if flag.field != "fetch_bytes"}
    timeout = inspect.signature(getattr(PoolControl, action)).parameters["timeout"].default
    parameters = [
        parameter(flag, argument=flag.required or (action, flag.field) in OPTIONAL_ARGUMENTS) for flag in flags.values()
    ]
    parameters += [
        given("redis", RedisUrl, None, DEFAULT_URL),
        given("pool", Pool, None, "default"),
        given("worker", Worker, None, ""),
        given("timeout", float, typer.Option(min=0.1, callback=finite, help="Seconds to wait for answers."), timeout),
        given("json", Json, None, False),
    ]
    if action == "stop_profile":
        parameters.append(given("out", Out, None, None))

    def run(
        *, redis: str, pool: str, worker: str, timeout: float, json: bool, out: Path | None = None, **typed: Any
    ) -> None:
        params = {flags[name].field: value for name, value in typed.items() if value is not None}
        if out is not None:
            check_out("--out", out, folder=True)
            params["fetch_bytes"] = FETCH_BYTES
        reach(redis, pool)
        answers = asyncio.run(_ask(redis, pool, action, params, worker, timeout))
        _audited(answers, json) if isinstance(answers, PoolAudit) else _answered(answers, json, out)

    app.command(NAMES.get(action, action.replace("_", "-")))(derived(run, parameters, inspect.getdoc(model) or ""))


async def _ask(
    redis: str, pool: str, action: str, params: dict[str, Any], worker: str, timeout: float
) -> Answers | PoolAudit:
    async with PoolControl(redis, pool) as control:
        answers: Answers | PoolAudit = await getattr(control, action)(**params, worker_id=worker, timeout=timeout)
        return answers


for _action, _model in ACTIONS.items():
    _add(_action, _model)


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
    return "; ".join(f"{kind}: {', '.join(result[kind])}" for kind in ("wrong", "nonfinite", "zero") if result[kind])
