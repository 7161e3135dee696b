"""`rolloutmq generate`: prompt the pool from a terminal, for whole answers, as a stream, or turn by turn."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ...messages.codec import MAX_STR
from ...messages.errors import ConfigError, InvalidField
from ...messages.model import RolloutResult, SamplingParams
from ...messages.redis import DEFAULT_URL
from ...producer.calls import Session
from ...producer.client import RolloutClient
from ..files import SHOWN
from ..flags import as_config
from ..redis import reach
from ..terminal import printable
from .options import Json, Pool, RedisUrl, ids, log_to_stderr, say, seconds


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="A text. With --session each line of stdin is a turn too.")
    ] = None,
    token_ids: Annotated[str | None, typer.Option(help="Instead of a text: ids, such as 5,17,3.")] = None,
    system: Annotated[str | None, typer.Option(help="System message; makes it a chat.")] = None,
    chat: Annotated[bool, typer.Option(help="The text is a user's message, in the model's chat template.")] = False,
    stream: Annotated[bool, typer.Option(help="Print tokens as they are generated.")] = False,
    session: Annotated[bool, typer.Option(help="Every further line of stdin is a turn, until it ends.")] = False,
    n: Annotated[int, typer.Option(min=1, help="Samples; more than one neither with --stream nor with --session.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a sample, or of a turn.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a sample; repeatable.")] = None,
    lora: Annotated[str | None, typer.Option(help="LoRA adapter to sample with.")] = None,
    timeout: Annotated[float, seconds("Give up when nothing comes for so many seconds.")] = 300.0,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    json: Json = False,
) -> None:
    """Generate in the pool and print the answer. A prompt of ids is answered with ids.

    \b
    rolloutmq generate "Once upon a time" --n 4
    rolloutmq generate --chat --session --system "Be brief." --stream
    rolloutmq generate --token-ids 5,17,3 --json
    """
    fields: dict[str, Any] = {
        "sampling": as_config(
            SamplingParams, max_new_tokens=max_new_tokens, temperature=temperature, stop=tuple(stop or ())
        )
    }
    if lora is not None:
        fields["lora"] = lora
    if n != 1 and (stream or session):
        raise ConfigError(f"--n {n}: with --stream and --session only 1")
    first: list[Any] = [prompt] if prompt is not None else []
    first += [ids("--token-ids", token_ids)] if token_ids is not None else []
    if len(first) > 1 or not (first or session):
        raise ConfigError("give a text, or --token-ids")
    turns = _turns(first, session)
    reach(redis, pool)
    log_to_stderr("warning")
    logging.getLogger("rolloutmq.producer.diagnosis").setLevel("INFO")  # why nothing comes, also if it only takes long
    how = _How(system, chat, stream, n, timeout, json, fields)
    asyncio.run(_converse(RolloutClient(redis, pool), turns, how))


@dataclass(frozen=True, slots=True)
class _How:
    """The options beside the prompts. fields: of each job."""

    system: str | None
    chat: bool
    stream: bool
    n: int
    timeout: float
    json: bool
    fields: dict[str, Any]


async def _turns(first: list[Any], session: bool) -> AsyncIterator[Any]:
    for turn in first:
        yield turn
    if session and sys.stdin is not None:
        async for line in _typed():
            if line:
                yield line


async def _typed() -> AsyncIterator[str]:
    """The lines of stdin as they come. A thread that waits for the next one would hold up Ctrl-C until it comes.

    Raises InvalidField for a line that is too long.
    """
    loop, ready, rest, ended = asyncio.get_running_loop(), asyncio.Event(), b"", False
    try:
        descriptor = sys.stdin.fileno()
        loop.add_reader(descriptor, ready.set)
    except OSError:  # a file, or a test's text: it never lets us wait
        while line := sys.stdin.buffer.readline(MAX_STR + 2):
            yield _text(line.rstrip(b"\r\n"))
        return
    try:
        while not ended:
            await ready.wait()
            ready.clear()
            more = os.read(descriptor, 1 << 16)
            ended = not more
            *lines, rest = (rest + more).split(b"\n")
            for line in [*lines, rest] if ended else lines:
                yield _text(line)
            if len(rest) > MAX_STR:  # its end may never come
                _text(rest)
    finally:
        loop.remove_reader(descriptor)


def _text(line: bytes) -> str:
    """The line as text. Raises InvalidField if it is longer than the text of a job may be."""
    text = line.decode(errors="replace")
    if len(line) > MAX_STR:
        raise InvalidField("stdin", text[:SHOWN], f"a line must have at most {MAX_STR:,} bytes")
    return text


async def _converse(client: RolloutClient, turns: AsyncIterator[Any], how: _How) -> None:
    async with client:
        if how.n > 1:
            await _samples(client, await anext(turns), how)
            return
        async with client.session(system=how.system, chat=how.chat, **how.fields) as session:
            async for turn in turns:
                if how.stream:
                    await _stream(session, turn, how)
                else:
                    _show(await session.generate(turn, timeout=how.timeout), how.json)


async def _samples(client: RolloutClient, prompt: Any, how: _How) -> None:
    if isinstance(prompt, str) and (how.chat or how.system is not None):
        opening = [] if how.system is None else [{"role": "system", "content": how.system}]
        prompt = [*opening, {"role": "user", "content": prompt}]
    (group,) = await client.generate([prompt], n=how.n, timeout=how.timeout, **how.fields)
    for result in group.results:
        _show(result, how.json, f"[{result.sample}] ")
    for failure in group.failures:
        raise ConfigError(str(failure))


async def _stream(session: Session, turn: Any, how: _How) -> None:
    shown = False
    async for delta in session.stream(turn, timeout=how.timeout):
        if how.json:
            ids = [int(token) for token in delta.token_ids]
            say({"restarted": delta.restarted, "text": delta.text, "token_ids": ids}, [], True)
            continue
        if delta.restarted:
            typer.echo("\n[begins again]")
        if delta.text is not None:
            typer.echo(_clean(delta.text), nl=False)
        elif len(delta.token_ids):
            typer.echo((" " if shown else "") + " ".join(map(str, delta.token_ids)), nl=False)
            shown = True
        sys.stdout.flush()
    if not how.json:
        typer.echo()


def _show(result: RolloutResult, json: bool, before: str = "") -> None:
    if json:
        told = {"sample": result.sample, "text": result.text, "token_ids": result.token_ids.tolist()}
        say(told | {"finish_reason": result.finish_reason, "versions": list(result.versions)}, [], True)
    else:
        typer.echo(before + _shown(result))


def _shown(result: RolloutResult) -> str:
    return _clean(result.text) if result.text is not None else " ".join(map(str, result.token_ids))


def _clean(text: str) -> str:
    """Without control characters, line by line: a model may generate some."""
    return "\n".join(printable(line) for line in text.split("\n"))
