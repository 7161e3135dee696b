"""`rolloutmq dead`, as an operator types it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import Result
from support.pools.operations import DEAD, load_jobs, write_letters
from typer.testing import CliRunner

from rolloutmq.messages.broker.dead_letters import successor_id
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.operations.rq_queue import OperationQueue


@pytest.fixture
def dead(redis_db: str) -> Any:
    def run(*arguments: str, answer: str | None = None) -> Result:
        return CliRunner().invoke(app, ["dead", *arguments, "--redis", redis_db], input=answer)

    return run


def left(queue: OperationQueue) -> list[str]:
    return [entry.decode() for entry, _ in queue.redis.xrange(DEAD)]


def test_list_newest_first_and_filtered(dead: Any, queue: OperationQueue) -> None:
    ids = write_letters(queue, 3) + write_letters(queue, 2, cause="Poison \x1b[31m")
    shown = dead("list")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines() if " job " in line] == ids[::-1]
    assert "5 of 5 dead letters" in shown.stdout
    assert "\x1b" not in shown.stdout  # what a letter says does not steer the terminal
    listed = json.loads(dead("list", "--cause", "poison", "--limit", "1", "--json").stdout)
    assert [(one["entry_id"], one["attempts"], one["at"]) for one in listed] == [(ids[-1], 1, 5.0)]
    assert len(json.loads(dead("list", "--since", "1h", "--json").stdout)) == 5
    assert json.loads(dead("list", "--since", "2999-01-01", "--json").stdout) == []


def test_show_the_job_or_why_there_is_none(dead: Any, queue: OperationQueue) -> None:
    (good,), (bad,) = write_letters(queue, 1), write_letters(queue, 1, payload=b"\xde\xad\xbe\xef")
    shown = json.loads(dead("show", good, "--json").stdout)
    assert (shown["job"], shown["why_not_requeued"]) == ({"token_ids": "3 token ids"}, None)
    shown = json.loads(dead("show", bad, "--json").stdout)
    assert (shown["head"], shown["size"]) == ("deadbeef", 4)
    assert "UnsupportedVersion" in shown["why_not_requeued"]
    people = dead("show", bad)
    assert people.exit_code == 0
    assert "deadbeef" in people.stdout
    assert "1970-01-01 00:00:05Z" in people.stdout


def test_requeue_by_id_asks_and_says_what_could_not_be(dead: Any, queue: OperationQueue) -> None:
    (good, other), (bad,) = write_letters(queue, 2), write_letters(queue, 1, payload=b"?")
    assert dead("requeue", good, answer="n\n").exit_code == 1
    assert load_jobs(queue) == 0
    done = dead("requeue", good, bad, "1-1", answer="y\n")
    assert done.exit_code == 1
    assert f"{good} is job " in done.stdout
    assert "CannotRequeue" in done.stderr
    assert "no dead letter 1-1" in done.stderr
    assert left(queue) == [other, bad]
    assert load_jobs(queue) == 1
    done = json.loads(dead("requeue", other, bad, "--yes", "--reply-to", "me", "--json").stdout)
    assert (done["requeued"], done["refused"], list(done["jobs"])) == (1, 1, [other])
    assert [one["entry_id"] for one in done["refusals"]] == [bad]
    assert queue.redis.scard("rmq:{default}:client:me") == 1


def test_requeue_all_with_a_filter(dead: Any, queue: OperationQueue) -> None:
    good = write_letters(queue, 70)
    poison = write_letters(queue, 2, cause="poison")
    asked = dead("requeue", "--all", "--cause", "refused", answer="y\n")
    assert asked.exit_code == 0, asked.stderr
    assert "requeue 70 dead letters of pool default?" in asked.stderr
    assert "requeued 70, refused 0" in asked.stdout
    assert left(queue) == poison
    jobs = {name.decode().rpartition(":")[2] for name in queue.redis.scan_iter("rmq:{default}:job:*")}
    assert len(jobs) == 70
    assert all(any(job[:12] == successor_id(entry, "")[:12] for entry in good) for job in jobs)
    write_letters(queue, 1, payload=b"?")
    over = dead("requeue", "--all", "--limit", "3", "--yes")
    assert (over.exit_code, len(left(queue))) == (1, 1)
    assert "MalformedMessage" in over.stderr
    again = json.loads(dead("requeue", "--all", "--yes", "--json").stdout)
    assert (again["requeued"], again["refused"]) == (0, 1)


def test_drop(dead: Any, queue: OperationQueue) -> None:
    keep, (poison,) = write_letters(queue, 3), write_letters(queue, 1, cause="poison")
    assert dead("drop", "--all", "--cause", "POISON", answer="n\n").exit_code == 1
    assert len(left(queue)) == 4
    dropped = dead("drop", "--all", "--cause", "POISON", answer="y\n")
    assert (dropped.exit_code, left(queue)) == (0, keep)
    assert "drop 1 dead letters" in dropped.stderr
    gone = dead("drop", poison, keep[0], "--yes", "--json")
    told = json.loads(gone.stdout)
    assert (gone.exit_code, told["dropped"], [one["entry_id"] for one in told["refusals"]]) == (1, 1, [poison])
    assert left(queue) == keep[1:]
    assert dead("drop", "--all", "--yes").exit_code == 0
    assert left(queue) == []
    assert "dropped 0 of 0" in dead("drop", "--all").stdout  # nothing to ask about


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("requeue",), "ConfigError: say which"),
        (("requeue", "1-1", "--all"), "ConfigError: say which"),
        (("drop", "1-1", "--cause", "x"), "ConfigError: say which"),
        (("drop",), "ConfigError: say which"),
        (("list", "1-1"), "ConfigError: say which"),
        (("list", "--reply-to", "me"), "ConfigError: --reply-to is for requeue"),
        (("show",), "ConfigError: say which"),
        (("show", "1-1", "1-2"), "ConfigError: say which"),
        (("show", "nonsense"), "InvalidField: entry_id='nonsense'"),
        (("show", "1-1"), "NoSuchDeadLetter: no dead letter 1-1"),
        (("list", "--since", "yesterday"), "InvalidField: since='yesterday'"),
        (("list", "--pool", "a b"), "InvalidField: pool='a b'"),
        (("requeue", "--all", "--yes", "--reply-to", "a b"), "InvalidField: reply_to='a b'"),
        (("list", "--redis", "redis://127.0.0.1:1/0"), "RedisUnavailable"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], says: str, redis_db: str) -> None:
    at = () if "--redis" in arguments else ("--redis", redis_db)
    ended = CliRunner().invoke(app, ["dead", *arguments, *at])
    assert (ended.exit_code, "Traceback" in ended.stderr) == (2, False)
    assert says in ended.stderr
