"""The package with one of its safeguards taken out, in every process of the suite: which scenarios find it?

CHAOS_SABOTAGE names it. Each entry says how the safeguard is taken out, and which scenario has to notice that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

VARIABLE = "CHAOS_SABOTAGE"


@dataclass(frozen=True, slots=True)
class Sabotage:
    """take_out: done once in each process. scenario: what finds it. says: a pattern of one of its violations."""

    take_out: Callable[[], None]
    scenario: str
    says: str


def _script(script: str, pattern: str, instead: str) -> Callable[[], None]:
    """Another text in a Lua script ("lib", "lib_pieces" and "lib_base": in all that have it)."""

    def take_out() -> None:
        from rolloutmq.messages.scripts import runner  # noqa: PLC0415
        from rolloutmq.messages.scripts.source import LIBRARIES  # noqa: PLC0415

        real = runner.script_source

        def source(name: str, *preamble: str) -> str:
            text = real(name, *preamble)
            if script not in {*LIBRARIES, name}:
                return text
            text, count = re.subn(pattern, lambda _: instead, text)
            assert count or name != script, f"{script}.lua has no {pattern} any more: find another way to take it out"
            return text

        source(script)  # told here: where a script runs, a worker's end would look like what the scenario is to find
        runner.script_source = source

    return take_out


def _replaced(module: str, name: str, instead: object) -> Callable[[], None]:
    """Something else under this name (Class.method) of a module of the package."""

    def take_out() -> None:
        found = import_module(f"rolloutmq.{module}")
        *owners, last = name.split(".")
        for owner in owners:
            found = getattr(found, owner)
        assert hasattr(found, last), f"{module} has no {name} any more: find another way to take it out"
        setattr(found, last, instead)

    return take_out


def _all(*take_outs: Callable[[], None]) -> Callable[[], None]:
    """Several safeguards against the same."""
    return lambda: [one() for one in take_outs] and None


async def _whole_batch(batch: list[Any], send: Callable[[list[Any]], Awaitable[None]], _give_up: object) -> None:
    await send(batch)


async def _read_by_anybody(broker: Any, *args: Any, owner: str = "", **named: Any) -> Any:
    from rolloutmq.messages.broker.broker import Broker  # noqa: PLC0415

    return await Broker.real_read_replies(broker, *args, **named)  # type: ignore[attr-defined]


def _nobody_owns_a_stream() -> None:
    from rolloutmq.messages.broker.broker import Broker  # noqa: PLC0415

    Broker.real_read_replies = Broker.read_replies  # type: ignore[attr-defined]
    Broker.read_replies = _read_by_anybody  # type: ignore[method-assign]


_ACKS_OF_ANYBODY = _script("ack", r"if owner ~= ''", "if false")


async def _only_cancelled(core: Any, job_ids: list[str]) -> None:
    await core.broker.cancel(list(job_ids), "its caller gave up")


_BELIEVED = """local function tick(heard, passed)
  local believed = redis_ms()
  redis.call('HSET', clock_key, 'at', believed, 'seen', believed, 'slept', 0)
  the_clock = nil
  if believed then return believed, 0, 0 end
"""

SABOTAGES: dict[str, Sabotage] = {
    "eight dead workers a call": Sabotage(
        _script("reap", r"'LIMIT', 0, most\)", "'LIMIT', 0, 8)"), "five_hundred_workers_die", "recovered after"
    ),
    "nothing is set aside, no entry is isolated": Sabotage(
        _all(
            _script("lib_base", r"  mend\(answer\.err, \.\.\.\)\n", ""),
            _script("lib_base", r"local fine, answer = pcall\(f, \.\.\.\)", "local fine, answer = true, f(...)"),
            _replaced("worker.lease.outbox", "each", _whole_batch),
        ),
        "reply_stream_that_takes_nothing",
        "not within|WaitTimeout",
    ),
    "a damaged record is given to a worker, no job is isolated": Sabotage(
        _all(
            _script("lib", r"return not payload and 'p'(.|\n)*? or nil\n", "return nil\n"),
            _script("lib_base", r"local fine, answer = pcall\(f, \.\.\.\)", "local fine, answer = true, f(...)"),
        ),
        "garbage_in_records",
        "not within|WaitTimeout",
    ),
    "the bell is read as UTF-8": Sabotage(
        _all(
            _replaced("messages.redis.bell", "text", bytes.decode),
            _replaced("worker.worker", "undisturbed", lambda loop: loop()),
        ),
        "garbage_in_the_pools_keys",
        "a worker ended|exit codes",
    ),
    "the clock of Redis is believed": Sabotage(
        _script("lib_base", r"local function tick\(heard, passed\)\n", _BELIEVED),
        "redis_clock_steps_forward",
        "lost its lease|jobs failed",
    ),
    "what Ctrl-C cut off is not given back": Sabotage(
        _replaced("producer.inbox.handover", "Crossing.lose", lambda crossing: None),
        "ctrl_c_in_a_plain_loop",
        "never handed|nothing is outstanding",
    ),
    "loops wait for what belongs to other calls": Sabotage(
        _replaced("producer.inbox.inbox", "Inbox.free", property(lambda inbox: inbox.jobs)),
        "a_call_keeps_what_it_asked_for",
        "waited for a session",
    ),
    "jobs of a call that ended are cancelled, and not given up": Sabotage(
        _replaced("producer.core", "ClientCore.give_up", _only_cancelled),
        "a_call_keeps_what_it_asked_for",
        ".",
    ),
    "a job id may belong to two": Sabotage(
        _script("enqueue", r"if #taken > 0 then", "if false then"), "a_job_id_that_is_taken", "was accepted"
    ),
    "another job may have the id of one that ended": Sabotage(
        _script("enqueue", r"\(digest or ARGV\[i \+ 11\]\) == ARGV\[i \+ 11\]", "true"),
        "a_job_id_that_is_taken",
        "other content under a known id was accepted",
    ),
    "a client that was replaced acknowledges": Sabotage(
        _ACKS_OF_ANYBODY, "two_processes_with_one_client_id", "the second process never had it"
    ),
    "a client that was replaced reads on": Sabotage(
        _all(_nobody_owns_a_stream, _ACKS_OF_ANYBODY), "two_processes_with_one_client_id", "the first one was not told"
    ),
    "published samples are not counted": Sabotage(
        _all(
            _script("lib_pieces", r"if found ~= tonumber\(said\) then error\(UNEVEN\) end", ""),
            _script("claim", r"if published ~= .* then error\(UNEVEN\) end", ""),
        ),
        "garbage_in_records",
        "queued:1|was claimed|not within|WaitTimeout",
    ),
    "the clock of another host is believed": Sabotage(
        _script("lib_base", r"local function tick\(heard, passed\)\n", _BELIEVED),
        "failover_to_a_clock_ahead",
        "lost its lease|jobs expired|jobs failed",
    ),
    "nobody waits for the disk": Sabotage(
        _replaced("messages.redis.url", "Durability.waits", property(lambda durability: False)),
        "slow_disk_durable",
        "knows nothing of it|WaitTimeout",
    ),
    "results do not wait for a checkpoint": Sabotage(
        _replaced("producer.training.keeping", "Keeping.unneeded", lambda keeping, replies: keeping._ack(replies)),
        "trainer_dies_before_its_checkpoint",
        "generated anew, though they waited",
    ),
    "a checkpoint's books are not restored": Sabotage(
        _replaced("producer.training.books", "Books.load_state_dict", lambda books, state: None),
        "trainer_dies_before_its_checkpoint",
        "trained twice|trained, by the books|counted are",
    ),
    "the owner is not checked": Sabotage(
        _script("complete", r"or owner ~= worker or current ~= attempt\n", "\n"),
        "freeze_worker_past_lease",
        "it belonged to|was published in state",
    ),
    "a tombstone without TTL": Sabotage(
        _script("lib", r"redis.call\('EXPIRE', key, remembered_s\(\)\)", ""),
        "kill_matrix",
        "no TTL, and not on the list",
    ),
}


def adopt() -> None:
    """Take out what the environment names. Before clients and workers are made."""
    if name := os.environ.get(VARIABLE):
        SABOTAGES[name].take_out()
