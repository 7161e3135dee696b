"""The command line as a newcomer meets it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from support.pools.fixtures import MakeLease
from support.pools.pool import eventually, status, worker
from support.specimens.turns import turn
from typer.testing import CliRunner

import rolloutmq
from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Lease, connect
from rolloutmq.messages.broker import RecordedSessions
from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.ops.cli.main import COMMANDS, GROUPS, app, load
from rolloutmq.ops.flags import as_config, parse_extra
from rolloutmq.ops.status import pool_state, status_lines
from rolloutmq.ops.tiny_model import load_tiny_model
from rolloutmq.worker.config import WorkerConfig


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command_and_imports_none() -> None:
    code = (
        "import sys; sys.argv = ['rolloutmq', '--help']\n"
        "before = set(sys.modules)\n"
        "import rolloutmq.ops.cli.options\n"
        "from rolloutmq.ops.entry import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'sglang', 'transformers', 'rich'} & sys.modules.keys()\n"
        "rooms = {name for name in sys.modules if name.startswith('rolloutmq.ops.')}\n"
        "assert rooms <= {f'rolloutmq.ops.{name}' for name in ('cli', 'cli.main', 'cli.options', 'entry', 'terminal')}"
    )
    shown = python(code)
    assert shown.returncode == 0, shown.stderr
    assert all(f"\n  {name} " in shown.stdout for name in COMMANDS)
    assert {f"\n{heading}:\n" in shown.stdout for heading in GROUPS} == {True}
    lines = [line for *_, line in COMMANDS.values()]
    assert all(line in shown.stdout for line in lines), "every line fits"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_how_its_help_begins(name: str) -> None:
    assert load(name).help.replace("\n", " ").startswith(COMMANDS[name][2])


def every_command() -> Iterator[tuple[str, Any]]:
    for name in COMMANDS:
        command = load(name)
        for inner, below in getattr(command, "commands", {"": command}).items():
            yield f"{name} {inner}".strip(), below


def test_a_flag_means_one_thing_in_every_command() -> None:
    kinds: dict[str, dict[str, list[str]]] = {}
    for name, command in every_command():
        for option in command.params:
            kind = str(option.type_descriptor.annotation)
            for spelled in (one for one in option.opts if one.startswith("--")):
                kinds.setdefault(spelled, {}).setdefault(kind, []).append(name)
    assert {spelled: found for spelled, found in kinds.items() if len(found) > 1} == {}
    assert kinds["--keep"] == {str(int): ["snapshots"]}
    assert [commands for found in (kinds["--steps"], kinds["--training-steps"]) for commands in found.values()] == [
        ["control profile"],
        ["demo"],
    ]


def test_every_command_that_prints_has_json() -> None:
    silent = {"worker", "exporter", "ops worker"}  # they log
    without = {name for name, command in every_command() if not any("--json" in one.opts for one in command.params)}
    assert without == silent


def test_version() -> None:
    assert run("--version").stdout == f"rolloutmq {rolloutmq.__version__}\n"


def test_a_command_that_there_is_not_is_told_the_nearest() -> None:
    shown = run("statsu")
    assert shown.exit_code == 2
    assert "Did you mean 'status'?" in shown.stderr


def test_a_bare_producer_install_is_told_what_the_command_needs() -> None:
    shown = python("import sys; sys.modules['typer'] = None\nfrom rolloutmq.ops.entry import main; main()")
    assert shown.returncode == 1
    assert "pip install 'rolloutmq[cli]'" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("status", "--redis", "redis://127.0.0.1:1/0"), "RedisUnavailable"),
        (("status", "--redis", "http://127.0.0.1"), "ConfigError"),
        (("status", "--pool", "no pool"), "InvalidField: pool='no pool'"),
        (("worker", "--model", "m", "--max-running", "0"), "InvalidField: max_running=0"),
        (("worker", "--model", "m", "--dtype", "int4"), "InvalidField: dtype='int4'"),
        (("worker", "--model", "m", "--sglang", "nonsense"), "ConfigError: 'nonsense'"),
        (("worker", "--model", "m", "--lease", "0"), "InvalidField: lease_s=0"),
    ],
)
def test_a_bad_setting_is_one_line_on_stderr_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_extra_arguments_are_json_where_they_can_be() -> None:
    assert parse_extra(["a=1", "b=x", 'c={"d": [2]}', "e="]) == {"a": 1, "b": "x", "c": {"d": [2]}, "e": ""}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_extra(["1x=2"])
    with pytest.raises(InvalidField, match="drain_s"):
        as_config(WorkerConfig, redis_url="redis://h", drain_s=-1)


async def test_status_tells_queue_workers_and_dead_letters(redis_db: str) -> None:
    assert (await pool_state(redis_db, "default"))["workers"] == []
    async with RolloutClient(redis_db) as client:
        await client.submit(token_ids=[1], priority="high")
        assert (await pool_state(redis_db, "default"))["queued"] == {"high": 1, "normal": 0, "low": 0}
        async with worker(redis_db) as running:
            await client.submit(token_ids=[1], sampling={"max_new_tokens": 1 << 20})

            async def ended() -> bool:
                return (await client.load()).open_jobs == 0

            await eventually(ended)
            state = await pool_state(redis_db, "default")
            assert [(w["worker_id"], w["alive"]) for w in state["workers"]] == [(running.id, True)]
            assert state["ended"] == {"done": 1, "cancelled": 0, "expired": 0, "dead": 1}
            assert "max_new_tokens" in state["dead_letters"][0]["error"]
            json.dumps(state)


async def test_status_tells_of_sessions_that_nobody_took(redis_db: str, broker: Broker) -> None:
    await RecordedSessions(broker).record("default", "kept", "k", turn([1], [2]))
    await RecordedSessions(broker, idle_s=0.001).record("default", "lost", "k", turn([1], [2]))

    async def ended() -> bool:
        await broker.end_overdue()
        return (await broker.load()).sessions_expired == 1

    await eventually(ended)
    state = await pool_state(redis_db, "default")
    told = f"recorded sessions: {state['session_bytes']:,} bytes; 1 ended that nobody took"
    assert state["session_bytes"] > 0
    assert told in list(status_lines(state))


async def test_status_tells_shares_and_how_even_loads_are(redis_db: str, joined: MakeLease) -> None:
    await joined("new")
    for name, held in (("full", 12), ("idle", 0)):
        lease = await joined(name)
        lease.holds = lambda held=held: held
        await lease.heartbeat(status(name, held=held))
        await lease.claim(9, 9, 0)
    state = await pool_state(redis_db, "default")
    assert state["imbalance"] == 2.0
    assert {it["worker_id"]: it["share"] for it in state["workers"]} == {"new": None, "full": 6.0, "idle": 6.0}
    lines = "\n".join(status_lines(state))
    assert "imbalance: 2.00 (samples of the fullest worker beside its share; 1 is even)" in lines
    assert all(said in lines for said in ("12 held of a share of 6 ", " 0 held of a share of 6 ", " 0 held   "))


async def test_status_prints_workers_and_how_long_their_start_took(redis_db: str) -> None:
    async def shown(*options: str) -> str:
        done = await asyncio.to_thread(run, "status", "--redis", redis_db, *options)
        assert done.exit_code == 0, done.output
        return done.stdout

    phases = {"process": 2.0, "imports": 7.5, "weights": 0.5, "first_answer": 9.0}
    assert "no workers" in await shown()
    assert json.loads(await shown("--json"))["open_jobs"] == 0
    async with connect(redis_db) as redis:
        await Lease(redis, "default", "w1", 10.0).join(status("w1", startup=phases))
        await Lease(redis, "default", "w2", 10.0).join(status("w2"))
    assert "worker w1" in await shown()
    first, second, third = (line.split("   ") for line in (await shown("--startup")).splitlines())
    assert first == ["worker w1", "served after 10.0 s"]
    assert second[-4:] == [" process 2.0 s", "imports 7.5 s", "weights 0.5 s", "first_answer 9.0 s"]
    assert third == ["worker w2", "does not serve yet"]
    one, _ = json.loads(await shown("--startup", "--json"))
    assert one == {"worker_id": "w1", "host": "h", "startup": phases}


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("cancel", "0" * 32),
        ("control", "version"),
        ("dead", "list"),
        ("weights", "list"),
        ("generate", "hello"),
        ("score", "a", "--prompt", "b"),
        ("ops", "run", "audit-broker", "--here"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_without_a_redis_a_command_tries_once_and_says_what_to_do(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    async def connect(self: Connection) -> None:
        attempts.append(self)
        raise RedisConnectionError("Connection refused")

    monkeypatch.setattr(Connection, "_connect", connect)
    shown = run(*arguments, "--redis", "redis://127.0.0.1:1/0")
    assert (shown.exit_code, len(attempts)) == (2, 1)
    assert len(shown.stderr.splitlines()) == 1
    assert all(word in shown.stderr for word in ("127.0.0.1:1", "rolloutmq redis", "--redis", "ROLLOUTMQ_REDIS"))


async def test_status_shows_any_text_and_the_dead_where_nobody_works(redis_db: str) -> None:
    letter = {
        "id": "j",
        "cause": "c",
        "error": "[/INST] a\x1b[2Jb",
        "host": "h",
        "attempts": 1,
        "at": 1,
        "payload": b"",
    }
    async with connect(redis_db) as db:
        await db.xadd(Broker(db, "default").keys.dead, letter | {"payload": b""})
    shown = list(status_lines(await pool_state(redis_db, "default")))
    assert shown[-2].startswith("no workers")
    assert shown[-1] == "dead j: c: [/INST] a\ufffd[2Jb"


async def test_status_fits_80_columns_and_cuts_no_word(redis_db: str) -> None:
    state = await pool_state(redis_db, "default")
    state["pool"] = "math-and-code-rollouts-of-the-second-curriculum-stage"
    named = status(
        "worker-7c9f6d5b8-xk2lp.rollouts.svc.cluster-europe-west4.internal-0192f6",
        engine="sglang 0.5.23",
        device="NVIDIA H200 141GB HBM3e",
        model="/models/checkpoints/Qwen3-30B-A3B-Instruct-2507-after-supervised-warm-up",
        generated_tokens=123_456_789_012,
        max_running=65536,
    )
    letter = {"job_id": "f" * 32, "cause": "the worker was lost three times", "error": "no longer there " * 9}
    state |= {
        "workers": [named.model_dump() | {"alive": True, "share": 65536.5}] * 2,
        "dead_letters": [letter],
        "unread_bytes": 10**12,
    }
    lines = list(status_lines(state))
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    for text in (state["pool"], named.worker_id, named.model, named.engine, named.device, letter["error"]):
        assert set(text.split()) <= set(words)


async def test_status_says_why_a_worker_does_not_serve_or_what_it_warns_of(redis_db: str) -> None:
    async with connect(redis_db) as redis:
        await Lease(redis, "default", "quiet", 10.0).join(status("quiet"))
        await Lease(redis, "default", "warns", 10.0).join(
            status("warns", why="the snapshot of version 1 is\x1b damaged")
        )
    lines = list(status_lines(await pool_state(redis_db, "default")))
    warns = next(at for at, line in enumerate(lines) if line.startswith("worker warns"))
    assert lines[warns + 3] == "    the snapshot of version 1 is\ufffd damaged"
    assert len([line for line in lines if line.startswith("    ")]) == 5


@pytest.mark.parametrize("name", ["trl_grpo", "trl_async_grpo", "lora"])
def test_an_example_without_its_model_says_so_in_one_line(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parents[3] / "examples" / f"{name}.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "out/tiny has no model: start the commands at the top of this file\n"


def test_a_tiny_model_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiny has no model: `rolloutmq tiny-model .*tiny` writes one"):
        load_tiny_model(tmp_path / "tiny")
