"""The command line as a newcomer meets it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.pools.pool import eventually, status, worker

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, connect
from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.ops.cli.options import as_config, parse_extra
from rolloutmq.ops.status import _table, pool_state, show_status
from rolloutmq.worker.config import WorkerConfig

COMMAND = [sys.executable, "-m", "rolloutmq.ops.entry"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command_and_loads_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; sys.argv = ['rolloutmq', '--help']\n"
        "from rolloutmq.ops.entry import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'sglang', 'transformers'} & sys.modules.keys()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert all(name in shown.stdout for name in ("worker", "submit", "status", "redis", "tiny-model", "demo", "bench"))


def test_a_bare_producer_install_is_told_what_the_command_needs() -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom rolloutmq.ops.entry import main; main()"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
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
    assert ended.returncode == 2
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


def test_status_prints_for_people_and_for_scripts(redis_db: str) -> None:
    people = run("status", "--redis", redis_db)
    assert people.returncode == 0
    assert "no workers" in people.stdout
    assert json.loads(run("status", "--redis", redis_db, "--json").stdout)["open_jobs"] == 0


async def test_status_shows_any_text_and_the_dead_where_nobody_works(
    redis_db: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    letter = {"id": "j", "cause": "c", "error": "[/INST] [bold]", "host": "h", "attempts": 1, "at": 1, "payload": b""}
    async with connect(redis_db) as db:
        await db.xadd(Broker(db, "default").keys.dead, letter)
    await asyncio.to_thread(show_status, redis_db, "default", as_json=False)
    shown = capsys.readouterr().out
    assert "no workers" in shown
    assert "dead j: c: [/INST] [bold]" in shown


def test_status_shows_workers_of_any_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    named = status("w[/x]", engine="sglang[/y]", device="[z]").model_dump() | {"alive": True}
    Console().print(_table([named]))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("w[/x]", "sglang[/y] on [z]"))


def test_the_readme_shows_the_example_that_is_tested() -> None:
    root = Path(__file__).parents[3]
    assert f"```python\n{(root / 'examples' / 'trainer.py').read_text()}```" in (root / "README.md").read_text()
