"""deploy/sentinel/redis.sh alone: what a server starts as, by what its sentinels answer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.manifests import ROOT

ME, OTHER = "redis-0.redis-pods.pool.svc 6379", "redis-1.redis-pods.pool.svc 6379"
MISSED, REPLACED = "flags s_down,master", "flags s_down,o_down,failover_in_progress,master"
CLIENT = """#!/bin/sh
# The n-th answer of this sentinel to this question: line n of the question's file, or its last one.
for word; do
  case $word in
  get-master-addr-by-name | master) question=$word ;;
  sentinel-*) who=$word ;;
  esac
done
echo >>"$STUB/$question.$who"
n=$(wc -l <"$STUB/$question.$who") most=$(wc -l <"$STUB/$question")
sed -n "$((n < most ? n : most))p" "$STUB/$question" | tr ' ' '\\n'
"""


def started(folder: Path, named: list[str], flags: list[str], **stubs: str) -> subprocess.Popen[str]:
    """The script, with sentinels that answer so, look after look."""
    for name, text in {"valkey-cli": CLIENT, "valkey-server": '#!/bin/sh\necho "$@"\n', **stubs}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name, answers in (("get-master-addr-by-name", named), ("master", flags)):
        (folder / name).write_text("".join(f"{answer}\n" for answer in answers))
    own = {"STUB": str(folder), "HOSTNAME": "redis-0", "NAMESPACE": "pool", "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["sh", str(ROOT / "deploy/sentinel/redis.sh")],
        env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("named", "flags", "waits", "follows"),
    [
        ([ME], ["flags master"], 0, ""),
        ([ME], ["NOPERM this user has no permissions"], 0, ""),
        ([OTHER], [], 0, OTHER),
        (["", ME], ["flags master"], 1, ""),
        ([ME], ["", "flags master"], 1, ""),
        ([ME], [MISSED], 1, ""),
        ([ME], [REPLACED, MISSED], 2, ""),
        ([ME, ME, ME, OTHER], [REPLACED], 3, OTHER),
        ([ME, OTHER], [MISSED], 1, OTHER),
    ],
)
def test_a_server_is_what_its_sentinels_say(
    tmp_path: Path, named: list[str], flags: list[str], waits: int, follows: str
) -> None:
    process = started(tmp_path, named, flags, sleep="#!/bin/sh\n")
    starts, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.count("waits") == waits
    name, port = ME.split()
    own = f"/etc/redis/redis.conf --replica-announce-ip {name} --replica-announce-port {port}"
    assert starts.strip() == (f"{own} --replicaof {follows}" if follows else own)


def test_a_server_that_waits_ends_on_sigterm(tmp_path: Path) -> None:
    process = started(tmp_path, [""], [])
    assert process.stderr is not None
    assert "waits" in process.stderr.readline()
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143, "by the trap: process 1 has no other way"
