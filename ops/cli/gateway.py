"""`rolloutmq gateway`: a pool over HTTP."""

from __future__ import annotations

import asyncio
from json import loads
from pathlib import Path
from typing import Annotated

import typer

from ...messages.defaults import DEFAULT_URL
from .options import LogLevel, RedisUrl, log_to_stderr, say

Pools = Annotated[
    str, typer.Option(envvar="ROLLOUTMQ_POOL", help="The pool that all tenants use; of several (a,b) `model` chooses.")
]
Host = Annotated[str, typer.Option(help="Address to listen on; other hosts need --keys.")]


def gateway(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    keys: Annotated[Path | None, typer.Option(help="File of tenants and their keys; see docs/security.md.")] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Print a new key and its line for that file.")] = False,
    served_model_name: Annotated[str, typer.Option(help="The model's name for clients; default: the workers'.")] = "",
    defaults: Annotated[str, typer.Option(help="JSON object: fields of bodies that leave them out.")] = "{}",
    tokenizer: Annotated[str | None, typer.Option(help="Path or name; default: the model's, if it is here.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key in PEM.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Serve only clients with a certificate of it.")] = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pools = "default",
    tenant: Annotated[str | None, typer.Option(help="Who sends no key is this tenant of --keys.")] = None,
    weights_from: Annotated[Path | None, typer.Option(help="Tenants' weights and adapters are below it.")] = None,
    snapshots: Annotated[str, typer.Option(help="Save their versions here, in a folder a pool.")] = "",
    receiver_device: Annotated[str, typer.Option(help="Where trainers' broadcasts arrive: cpu, or cuda:0.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print where it listens as one line of JSON.")] = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve the pool to clients of OpenAI's API. Until SIGTERM or Ctrl-C; any number of them may run side by side.

    \b
    rolloutmq gateway --port 8000
    curl http://127.0.0.1:8000/v1/models
    """
    from ...messages.errors import ConfigError, InvalidField
    from ...producer.openai import chat_request
    from ...worker.garbage import settle
    from ..gateway import Gateway, HttpServer, Settings, Tls, application
    from ..gateway import new_key as made_key
    from ..redis import reach

    if new_key:
        key, line = made_key()
        say({"key": key, "line": line}, [f"key   {key}", f"line  {line}"], json)
        return
    if keys is None and host not in {"127.0.0.1", "localhost", "::1"}:
        raise ConfigError(f"--host {host}: other hosts than this one need --keys, so that not everybody is served")
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key: both, or none")
    try:
        given = loads(defaults)
    except ValueError as error:
        raise ConfigError(f"--defaults {defaults}: no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--defaults {defaults}: a JSON object is expected")
    try:
        chat_request({"messages": [{"role": "user", "content": "-"}]} | given)
    except InvalidField as error:  # else every request would be told, who did not say it
        raise ConfigError(f"--defaults: {error}") from None
    tls = None if tls_cert is None or tls_key is None else Tls(tls_cert, tls_key, tls_client_ca)
    log_to_stderr(log_level)
    pools = tuple(name.strip() for name in pool.split(","))
    reach(redis, pools[0])
    served = Gateway(
        Settings(
            redis, pools, served_model_name, tokenizer, keys, given,
            tenant=tenant, weights_from=weights_from, snapshots=Path(snapshots) if snapshots else None,
            receiver_device=receiver_device,
        )
    )  # fmt: skip
    if tokenizer is not None:
        served.first.texts.load()
    settle()
    served.loaded = settle
    server = HttpServer(application(served), host, port, tls=tls)
    where = f"{'https' if tls else 'http'}://{host}:{server.port}/v1"
    say({"url": where}, [f"listening on {where}"], json)
    asyncio.run(server.serve())
