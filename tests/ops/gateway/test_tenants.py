"""The file of keys: who is served, what is refused in it, and that it is read again."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from rolloutmq.messages import ConfigError
from rolloutmq.ops.gateway import tenants
from rolloutmq.ops.gateway.tenants import Tenants, new_key
from rolloutmq.ops.http import Refused

KEY = f"rmq-{'k' * 43}"  # the same in all processes that share these tests
DIGEST = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
TOML = f"""

[tenants.team-a]
keys = ["{DIGEST}"]
requests_per_minute = 60
tokens_per_day = 1_000_000
max_running = 8
priority = "low"

[tenants.team-b]
keys = []
"""


def written(folder: Path, text: str, name: str = "keys.toml", mode: int = 0o640) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return path


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"h"), (b"authorization", f"Bearer {key}".encode())]


def test_a_key_names_its_tenant_in_either_header(tmp_path: Path) -> None:
    known = Tenants.load(written(tmp_path, TOML))
    tenant = known.of(bearer(KEY))
    assert (tenant.name, tenant.requests_per_minute, tenant.tokens_per_minute) == ("team-a", 60, None)
    assert (tenant.tokens_per_day, tenant.max_running, tenant.priority) == (1_000_000, 8, "low")
    assert known.of([(b"x-api-key", KEY.encode())]) == tenant
    assert known.of([(b"authorization", b"bearer  " + KEY.encode() + b" ")]) == tenant
    assert DIGEST not in repr(tenant)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer("wrong"),
        bearer(DIGEST),
        bearer(KEY[:-1]),
        bearer(KEY + "x" * 10_000),
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Basic " + KEY.encode())],
        [*bearer("wrong"), (b"x-api-key", KEY.encode())],
        [*bearer("wrong"), *bearer(KEY)],
        [(b"authorization", b"Bearer \xff\xfe")],
    ],
)
def test_who_has_no_key_is_401(tmp_path: Path, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Refused) as caught:
        Tenants.load(written(tmp_path, TOML)).of(headers)
    refused = caught.value
    assert (refused.status, refused.code, refused.kind) == (401, "invalid_api_key", "authentication_error")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert KEY not in str(refused)


def test_without_a_file_everybody_is_the_default_tenant() -> None:
    for headers in ([], bearer("anything")):
        tenant = Tenants.load(None).of(headers)
        assert (tenant.name, tenant.requests_per_minute) == ("default", None)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602, 0o601])
def test_a_file_that_others_may_read_or_the_group_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, TOML, mode=mode)
    with pytest.raises(ConfigError, match=rf"{path}: its mode is {mode:04o}.*chmod 640"):
        Tenants.load(path)


@pytest.mark.parametrize(
    ("text", "name", "complaint"),
    [
        (f'[tenants.a]\nkeys = ["{KEY}"]', "keys.toml", r"tenants\.a\.keys\.0: .*sha256:"),
        (f'admin = "{KEY}"', "keys.toml", "admin: Extra"),
        (f'[tenants.a]\nkeys = ["{DIGEST}"]\nrequests = 5', "keys.toml", r"tenants\.a\.requests: Extra"),
        (f'[tenants.a]\nkeys = ["{DIGEST}"]\nadmin = true', "keys.toml", r"tenants\.a\.admin: Extra"),
        (f'[tenants.a]\nkeys = ["{DIGEST}"]\nmax_running = 0', "keys.toml", r"tenants\.a\.max_running: .*greater than"),
        (f'[tenants.a]\nkeys = ["{DIGEST}"]\nmax_running = true', "keys.toml", r"tenants\.a\.max_running: .*integer"),
        (f'[tenants.a]\nkeys = ["{DIGEST}"]\npriority = "top"', "keys.toml", r"tenants\.a\.priority: .*'high'"),
        (f'[tenants."a/b"]\nkeys = ["{DIGEST}"]', "keys.toml", r"tenants\.a/b.*pattern"),
        (f'[tenants.a]\nkeys = ["{DIGEST}"]\n[tenants.b]\nkeys = ["{DIGEST}"]', "keys.toml", "more than once"),
        ("", "keys.toml", "no key"),
        (f"tenants = {KEY}", "keys.toml", r"no TOML \(line 1"),
        ("#" * (1 << 20) + "\n", "keys.toml", "1048576 bytes at most"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_place_and_without_a_key(
    tmp_path: Path, text: str, name: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        Tenants.load(written(tmp_path, text, name))
    assert str(tmp_path / name) in str(caught.value)
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml: No such file"):
        Tenants.load(tmp_path / "keys.toml")


def test_the_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that another replaces, as Kubernetes does it; and one that is wrong changes nothing."""
    monkeypatch.setattr(tenants, "LOOK_S", 0.0)
    path = tmp_path / "keys.toml"
    path.symlink_to(written(tmp_path, TOML, "first.toml"))
    known = Tenants.load(path)
    newer, digest = new_key()
    os.replace(_link(tmp_path, written(tmp_path, f'[tenants.new]\nkeys = ["{digest}"]', "second.toml")), path)
    assert known.of(bearer(newer)).name == "new"
    with pytest.raises(Refused):
        known.of(bearer(KEY))
    caplog.set_level(logging.ERROR)
    written(tmp_path, "broken", "second.toml")
    for _ in range(3):
        assert known.of(bearer(newer)).name == "new"
    path.unlink()
    assert known.of(bearer(newer)).name == "new"
    assert [one.getMessage().partition(" (")[0] for one in caplog.records] == [
        f"the old keys stay: file of keys {path}: it is no TOML",
        f"the old keys stay: file of keys {path}: No such file or directory",
    ]


def _link(folder: Path, to: Path) -> Path:
    link = folder / "link"
    link.symlink_to(to)
    return link
