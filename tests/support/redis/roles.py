"""The users that docs/redis.md tells people to create, and what each of them runs."""

from __future__ import annotations

import re
from pathlib import Path

from support.redis.deployments import plain

from rolloutmq.ops.redis.embedded import EmbeddedRedis

DOCS = Path(__file__).parents[3] / "docs" / "redis.md"
LINES = dict(re.findall(r"^ACL SETUSER rolloutmq-(\w+) (.*)$", DOCS.read_text(), re.MULTILINE))
ROLES = {
    "producer": (
        "enqueue", "cancel", "cancel_client", "stop", "ack", "overdue", "record_turn", "recent_turns", "take_session",
        "forget_session",
    ),
    "gateway": (
        "enqueue", "cancel", "cancel_client", "stop", "ack", "overdue", "begin_request", "finish_request",
        "beat_gateway", "inherit_gateway", "leave_gateway", "record_turn", "recent_turns", "take_session",
        "admit", "settle",
    ),
    "worker": (
        "claim", "complete", "checkpoint", "heartbeat", "release", "dead", "expire", "reap", "leave", "report",
        "take_command", "answer_command", "cancel", "learn",
    ),
    "publisher": ("announce", "close", "learn"),
    "operator": (
        "enqueue", "dead_page", "drop_letter", "cancel", "cancel_client", "ack", "overdue", "command", "audit_jobs",
        "audit_keys", "audit_members", "audit_totals", "begin_again",
    ),
}  # fmt: skip
ONLY_OPERATORS = {"xrange"}
"""In `enqueue`, for a job that replaces a dead letter; the first thing it does, so that nothing is half done."""
FOR_REPLICAS = "+wait +eval +set"
FOR_DISK = {(6, 2): "+eval +set +config", (7, 0): "+eval +set +config|get", (7, 2): "+waitaof +eval +set"}
"""By the oldest version of the server for which it holds."""


def create(server: EmbeddedRedis, role: str, pool: str, more: str = "") -> str:
    """Create a user as the docs say; its URL."""
    rules = LINES[role].replace("POOL", pool).replace("PASSWORD", "secret") + " " + more
    with plain(server) as admin:
        admin.execute_command("ACL", "SETUSER", f"{role}-{pool}", *rules.split())
    return f"redis://{role}-{pool}:secret@127.0.0.1:{server.port}/0"
