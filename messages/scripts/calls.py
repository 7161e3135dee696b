"""Every script as a typed function that builds one call: `await scripts.run(calls.expire(worker, job_id, attempt))`.

A function has the script's name, and its parameters are the arguments that the script's header names, in that order.
Both are compared when this module is imported. What an argument means, what is in a row, and what a script returns, is
in its header.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

from .source import script_path

Arg = str | int | float | bytes
P = ParamSpec("P")


class Call(NamedTuple):
    """One call of a script; args: what follows the pool's prefix."""

    script: str
    args: tuple[Arg, ...]


class Submission(NamedTuple):
    """A job to be accepted."""

    job_id: str
    payload: bytes
    n: int
    priority: int
    client: str
    min_version: int | str
    max_staleness: int | str
    deadline_ms: int | str
    group: str
    adapter: str
    prefers: str
    digest: bytes
    needs: str


def _header(name: str) -> str:
    """The arguments that the script's header names, behind the prefix."""
    found = re.search(r"^-- ARGV: prefix(?:, ((?:.*,\n--\s+)*.*))?$", script_path(name).read_text(), re.MULTILINE)
    return re.sub(r" \([^)]*\)", "", re.sub(r"\s*\n--\s*", " ", found[1] or "")) if found else "no arguments"


def _call(declared: Callable[P, None]) -> Callable[P, Call]:
    """Makes the declaration a builder of calls. Raises TypeError if its parameters are not those of the header."""
    name, signature = declared.__name__, inspect.signature(declared)
    shown = ", ".join(str(it).partition(":")[0] for it in signature.parameters.values())
    if shown != _header(name):
        raise TypeError(f"{name}.lua takes {_header(name)}; here it is declared with {shown}")

    def call(*args: P.args, **named: P.kwargs) -> Call:
        given: tuple[Any, ...] = signature.bind(*args, **named).args if named else args
        flat: list[Arg] = []
        for arg in given:
            flat.extend(arg) if isinstance(arg, tuple) else flat.append(arg)
        return Call(name, tuple(flat))

    return call


# jobs


@_call
def enqueue(max_jobs: int, max_bytes: int, max_unread: int, letter: str, *jobs: Submission) -> None: ...
@_call
def cancel(cause: str, *job_ids: str) -> None: ...
@_call
def cancel_client(client: str, group: str, cause: str, cursor: int, count: int) -> None: ...
@_call
def stop(cause: str, *job_ids: str) -> None: ...
@_call
def overdue(most: int, heard: int | str, passed: int, client: str) -> None: ...
@_call
def ack(client: str, owner: str, *entries: tuple[str, int]) -> None: ...
@_call
def claim(
    worker: str,
    claim: int,
    max_jobs: int,
    max_samples: int,
    version: int,
    can: str,
    holds: int | str,
    pace: str,
    waited: int,
    *adapters: tuple[str, int],
) -> None: ...
@_call
def checkpoint(worker: str, *pieces: tuple[Arg, ...]) -> None: ...
@_call
def complete(worker: str, *samples: tuple[str, int, int, bytes]) -> None: ...
@_call
def release(worker: str, max_lost: int, to: str, *jobs: tuple[Arg, ...]) -> None: ...
@_call
def expire(worker: str, job_id: str, attempt: int) -> None: ...
@_call
def dead(worker: str, job_id: str, attempt: int, cause: str, host: str, error: str) -> None: ...
@_call
def drop_letter(letter: str) -> None: ...
@_call
def dead_page(newest_first: int, begin: str, end: str, most: int, head_bytes: int) -> None: ...


# tenants


@_call
def admit(
    tenant: str,
    request: str,
    tokens: int,
    requests_per_minute: int,
    tokens_per_minute: int,
    tokens_per_day: int,
    max_running: int,
    lease_ms: int,
) -> None: ...
@_call
def settle(tenant: str, lease_ms: int, *requests: tuple[str, int | str, int]) -> None: ...


# workers


@_call
def heartbeat(
    worker: str, lease_ms: int, status: bytes, join: int, heard: int | str, passed: int, can: str
) -> None: ...
@_call
def leave(worker: str) -> None: ...
@_call
def reap(max_lost: int, most: int, heard: int | str, passed: int) -> None: ...


# weights


@_call
def announce(epoch: int, version: int | str, announcement: bytes, remember_s: int, told: str, digest: str) -> None: ...
@_call
def reserve(version: int, given_to: str, remember_s: int) -> None: ...
@_call
def report(
    epoch: int, worker: str, report: str, serves: int, version: int | str, remember_s: int, digest: str, holder: str
) -> None: ...
@_call
def close(epoch: int, version: int | str, state: str, remember_s: int, digest: str, holder: str, lost: str) -> None: ...


@_call
def learn(committed: int, *adapters: tuple[str, int]) -> None: ...


@_call
def begin_again(version: int) -> None: ...


# recorded sessions


@_call
def record_turn(
    session: str, turn_key: str, frame: bytes, ends: str, begins: str, begins_ends: str, tokens: int, idle_ms: int,
    max_turns: int, max_tokens: int, max_bytes: int, max_pool: int,
) -> None: ...  # fmt: skip
@_call
def recent_turns(session: str, most: int) -> None: ...
@_call
def take_session(session: str, start: int, idle_ms: int) -> None: ...
@_call
def forget_session(session: str) -> None: ...


# commands


@_call
def command(command_id: str, worker: str, command: bytes, lasts_ms: int) -> None: ...
@_call
def take_command(command_id: str, worker: str, token: str) -> None: ...
@_call
def answer_command(command_id: str, worker: str, reply: bytes, keep_s: int, most: int) -> None: ...


# gateways


@_call
def begin_request(
    request: str, digest: bytes, owner: str, seed: str, prompts: bytes, most_bytes: int, lasts_ms: int, about: bytes
) -> None: ...
@_call
def finish_request(request: str, seed: str, answer: bytes, keep_ms: int) -> None: ...
@_call
def beat_gateway(gateway: str, alive_ms: int, joins: str, *clients: str) -> None: ...
@_call
def inherit_gateway(client: str, heir: str) -> None: ...
@_call
def leave_gateway(client: str, heir: str, to: str) -> None: ...


# audit


@_call
def audit_keys(*keys: tuple[bytes, str | bytes]) -> None: ...
@_call
def audit_jobs(search: int, *job_ids: bytes) -> None: ...
@_call
def audit_members(index: str, *job_ids: bytes) -> None: ...
@_call
def audit_totals(most: int, *clients: bytes) -> None: ...
