"""What is in Redis is described once: scripts, readers and the page have it from there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rolloutmq.messages.redis import JOB, KEYS, Keys
from rolloutmq.messages.scripts import source

TOOL = Path(__file__).resolve().parents[3] / "tools" / "redis_tables.py"


def test_the_page_has_the_tables() -> None:
    spec = importlib.util.spec_from_file_location("redis_tables", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text() == tool.page(), "run tools/redis_tables.py"


def test_each_key_is_of_one_kind() -> None:
    keys, names = Keys("p"), [name for key in KEYS for name in key.names]
    assert len({*names}) == len(names)
    assert (keys.load, keys.job("1"), keys.later[2]) == ("rmq:{p}:load", "rmq:{p}:job:1", "rmq:{p}:later:2")


def test_no_field_has_two_names() -> None:
    fields = [field for name, field in vars(JOB).items() if name[0] != "_"]
    assert len({*fields}) == len(fields)


def test_a_word_that_nothing_in_redis_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read(path).replace("JOB.state", "JOB.states"))
    with pytest.raises(KeyError, match=r"JOB\.states"):
        source._read("stop")
