"""The queue benchmark runs end to end, small; its tally lets nothing wrong through; RQ's script works where RQ is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import redis

from benchmarks import harness
from benchmarks.broker.bench import Plan
from benchmarks.broker.environments import PEERS, PEERS_PATH, peer_systems
from benchmarks.broker.turn import System, take_turn
from benchmarks.parts import BenchFailed
from benchmarks.peers.load import Load, Tally
from rolloutmq.messages import ConfigError

KEYS = {
    "rolloutmq", "rq", "arq", "taskiq", "raw", "ratio_rq", "ratio_best_peer", "ratio_raw", "p50_ms", "p99_ms",
    "redis_us_per_lifecycle", "redis_us_per_heartbeat", "payload_256k", "rounds", "host", "command",
}  # fmt: skip


@pytest.mark.slow
def test_a_small_run_without_peers(
    redis_db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUTMQ_REDIS", redis_db)
    with redis.Redis.from_url(redis_db) as client:
        client.set("precious", 1)
    out = tmp_path / "results" / "queue.json"
    plan = Plan("none", 1, 0.2, workers="1,3", lifecycles=64, durable="everysec,disk", journals=True)
    figures = harness.run(plan, out, quiet=True)
    assert figures.keys() >= KEYS
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures == json.loads(out.read_text())
    assert figures["rq"] is figures["arq"] is figures["taskiq"] is figures["ratio_rq"] is None
    assert figures["ratio_raw"] == pytest.approx(figures["rolloutmq"] / figures["raw"], abs=1e-4)
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert figures["payload_256k"].keys() == {"rolloutmq", "raw"}
    for costs in (figures["redis_us_per_lifecycle"], figures["redis_us_per_heartbeat"]):
        assert costs.keys() == {"1", "3"}
        assert all(0 < cost < 10_000 for cost in costs.values())
    assert figures["growth"]["3"]["jobs_held"] == 3 * 256
    assert figures["durability"].keys() == {"everysec", "disk"}
    assert figures["journal"]["ratio"].keys() == {"client", "both"}
    assert all(spent > 0 for spent in figures["journal"]["client_us"].values())
    for level in figures["durability"].values():
        assert level["per_s"] > 0
        assert 0 < level["p50_ms"] <= level["p99_ms"]
    # Turns empty the Redis they run on, so it is one of their own, whatever the environment names.
    with redis.Redis.from_url(redis_db) as client:
        assert client.get("precious") == b"1"
    assert figures["host"].keys() >= {"cpu", "cores", "memory_gb", "python", "redis", "packages"}
    kibibytes = int(Path("/proc/meminfo").read_text().split()[1])
    assert figures["host"]["memory_gb"] == round(kibibytes * 1024 / 1e9, 1)


def test_names_are_checked() -> None:
    assert harness.names("--peers", "none", PEERS, none=True) == harness.names("--peers", "", PEERS, none=True) == []
    assert harness.names("--peers", "rq, arq", PEERS) == ["rq", "arq"]
    for text in ("rq,celery", "none,celery"):
        with pytest.raises(ConfigError, match=r"--peers .*some of rq, arq, taskiq, or none; unknown: .*'celery'"):
            harness.names("--peers", text, PEERS, none=True)
    with pytest.raises(ConfigError, match="some of rq, arq, taskiq; unknown"):
        harness.names("--peers", "", PEERS)


def test_another_variant_begins_each_round() -> None:
    assert list(harness.turns("abc", 4)) == [(0, [*"abc"]), (1, [*"bca"]), (2, [*"cab"]), (3, [*"abc"])]


def test_rq_takes_its_turn(redis_db: str) -> None:
    pytest.importorskip("rq")
    load = Load(seconds=0.2, warmup_s=0.1, window=16, variant="simple")
    turn = take_turn(System("rq", sys.executable, "peers.rq_peer", 16, 16, "simple", PEERS_PATH), redis_db, load)
    assert turn["jobs"] >= 16
    assert turn["seconds"] > 0


def test_a_turn_that_fails_says_what_was_said(redis_db: str) -> None:
    with pytest.raises(BenchFailed, match="no_such_module"):
        take_turn(System("broken", sys.executable, "no_such_module", 1, 1), redis_db, Load())


def test_the_tally_refuses_what_is_wrong() -> None:
    load = Load()
    tally = Tally(load)
    tally.sent("a", 1)
    tally.sent("b", 2)
    tally.answered("a", load.payload(1)[:128])
    with pytest.raises(SystemExit, match="twice"):
        tally.answered("a", load.payload(1)[:128])
    with pytest.raises(SystemExit, match="1 jobs were never answered"):
        tally.figures()
    with pytest.raises(SystemExit, match="answered with"):
        tally.answered("b", load.payload(1)[:128])


def test_without_a_package_index_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_NO_CACHE_DIR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ConfigError, match="package index"):
        peer_systems(["arq"], tmp_path / "cache", say=lambda text: None)
