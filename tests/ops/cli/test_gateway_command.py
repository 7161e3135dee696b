"""`rolloutmq gateway` on a terminal: its settings, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutmq.ops.cli import app
from rolloutmq.ops.gateway.tenants import Tenants


def test_a_new_key_opens_the_gateway_with_its_line(tmp_path: Path) -> None:
    made = json.loads(CliRunner().invoke(app, ["gateway", "--new-key", "--json"]).stdout)
    file = tmp_path / "keys.toml"
    file.write_text(f"[tenants.a]\nkeys = ['{made['line']}']\n")
    file.chmod(0o600)
    assert Tenants.load(file).of([(b"x-api-key", made["key"].encode())]).name == "a"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "0.0.0.0"], "need --keys"),
        (["--tls-cert", "x.pem"], "both, or none"),
        (["--defaults", "[1]"], "a JSON object"),
        (["--defaults", "{"], "no JSON"),
        (["--defaults", '{"temprature": 1}'], "temperature"),
        (["--redis", "redis://127.0.0.1:1"], "RedisUnavailable"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_listens(words: list[str], says: str) -> None:
    found = CliRunner().invoke(app, ["gateway", "--port", "0", *words])
    assert found.exit_code == 2
    assert says in found.output
    assert "listening" not in found.output


def test_files_that_are_not_there_are_named(redis_url: str) -> None:
    for words in (["--keys", "/nowhere.toml"], ["--tokenizer", "/nowhere"]):
        found = CliRunner().invoke(app, ["gateway", "--port", "0", "--redis", redis_url, *words])
        assert found.exit_code == 2
        assert "/nowhere" in found.output
        assert "listening" not in found.output
