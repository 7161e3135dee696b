"""Who may do what over HTTP: everybody looks, who has the token requeues, and no other site's page does anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.pools.dashboards import TOKEN, Dashboard, dashboard, running
from support.pools.pool import worker
from support.specimens.messages import tokens
from typer.testing import CliRunner

from rolloutmq.messages import Broker
from rolloutmq.messages.broker import DeadLetters
from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.journal import Journal
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.dashboard import Rollouts, load, read_token, recorded_application
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def kept(broker: Broker) -> int:
    """Dead letters of all shards."""
    return sum([await DeadLetters(part).count() for part in broker.parts])


async def requeue(page: Dashboard, group: str, **headers: str) -> httpx.Response:
    usual = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    given = {name: value for name, value in (usual | headers).items() if value}
    return await page.http.post("/requeue", content=f'{{"cause": "{group}"}}', headers=given)


@pytest.fixture
async def letters(broker: Broker, joined: Any) -> list[str]:
    """Five dead jobs: four of one cause, with numbers of their own, and one of another."""
    lease = await joined("w1")
    ids = []
    for error in [*(f"token {n} of /models/{n} is out of range" for n in range(4)), "no such adapter"]:
        job = tokens(reply_to="someone")
        await broker.enqueue([job])
        (claim,) = await lease.claim(1, 8, 0)
        assert await lease.bury(claim.job_id, claim.attempt, "engine request refused", "a-host", error)
        ids.append(job.id)
    await lease.leave()
    return ids


async def test_a_group_is_requeued_exactly(redis_db: str, letters: list[str], broker: Broker) -> None:
    async with dashboard(redis_db, TOKEN) as page:
        state = await page.until(lambda it: len(it["failures"]) == 2)
        assert state["can_act"]
        group, other = state["failures"]
        assert (group["count"], group["requeueable"]) == (4, True)
        assert group["cause"] == "engine request refused: token <n> of <path> is out of range"
        assert set(group["jobs"]) == set(letters[:4])
        answer = await requeue(page, group["id"])
        assert (answer.status_code, answer.json()) == (200, {"requeued": 4, "refused": 0, "left": 0, "why": ""})
        assert await kept(broker) == 1
        state = await page.until(lambda it: [one["id"] for one in it["failures"]] == [other["id"]])
        assert state["flow"]["queued"] == 4
        assert (await requeue(page, group["id"])).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": TOKEN}, 401),
        ({"origin": "https://elsewhere.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
async def test_nobody_else_requeues(
    redis_db: str, letters: list[str], broker: Broker, headers: dict[str, str], status: int
) -> None:
    async with dashboard(redis_db, TOKEN) as page:
        state = await page.until(lambda it: it["failures"])
        answer = await requeue(page, state["failures"][0]["id"], **headers)
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True)
        assert await kept(broker) == len(letters)


async def test_our_own_page_may(redis_db: str, letters: list[str]) -> None:
    async with dashboard(redis_db, TOKEN) as page:
        state = await page.until(lambda it: it["failures"])
        assert (await requeue(page, state["failures"][0]["id"], origin=page.url)).status_code == 200
        assert letters


async def test_without_a_token_the_page_is_only_looked_at(redis_db: str, letters: list[str], broker: Broker) -> None:
    async with dashboard(redis_db) as page:
        state = await page.until(lambda it: it["failures"])
        assert not state["can_act"]
        assert (await requeue(page, state["failures"][0]["id"])).status_code == 403
        assert await kept(broker) == len(letters)


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b'{"cause": 5}', b'{"cause": ""}', b"[" * 3000, b"x" * 5000])
async def test_bodies_that_are_no_request_are_refused(redis_db: str, body: bytes) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    async with dashboard(redis_db, TOKEN) as page:
        answer = await page.http.post("/requeue", content=body, headers=headers)
        assert answer.status_code == (413 if len(body) > 4096 else 400)


async def test_every_answer_says_what_a_browser_may_do_with_it(redis_db: str) -> None:
    async with dashboard(redis_db) as page:
        statuses = {"/": 200, "/state": 200, "/page/main.js": 200, "/nothing": 404, "/page/app.py": 404}
        for path, status in statuses.items():
            answer = await page.http.get(path)
            assert answer.status_code == status, path
            assert answer.headers["content-security-policy"].startswith("default-src 'self'"), path
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == ("no-cache" if status == 200 and path != "/state" else "no-store")
        tag = (await page.http.get("/page/main.js")).headers["etag"]
        assert (await page.http.get("/page/main.js", headers={"if-none-match": tag})).status_code == 304


async def test_another_name_for_this_host_is_refused(redis_db: str) -> None:
    """A page of another site may give its own name our address."""
    async with dashboard(redis_db) as page:
        for host, status in (("evil.example", 421), (f"localhost:{page.server.port}", 200), ("[::1]:80", 200)):
            assert (await page.http.get("/state", headers={"host": host})).status_code == status, host


@pytest.mark.parametrize("path", ["/state?at=nan", "/state?at=x", "/rollouts?limit=1e999", "/rollouts?before=x"])
async def test_numbers_that_are_none_are_named(redis_db: str, path: str) -> None:
    async with dashboard(redis_db) as page:
        answer = await page.http.get(path)
        assert answer.status_code == 400
        assert "a finite number is expected" in answer.json()["error"]["message"]


async def test_jobs_that_run_and_dead_ones_are_listed_and_shown(redis_db: str, letters: list[str], client: Any) -> None:
    async with dashboard(redis_db) as page, worker(redis_db, engine=ScriptedEngine(tokens_per_s=1.0)) as busy:
        handle = await client.submit(tokens(sampling={"max_new_tokens": 500}))
        await page.until(lambda it: it["flow"]["running"] and it["failures"])
        rows = (await page.http.get("/rollouts?limit=50")).json()["rows"]
        assert {row["state"] for row in rows} == {"running", "dead"}
        (row,) = (await page.http.get(f"/rollouts?worker={busy.id}")).json()["rows"]
        assert (row["job_id"], row["worker"]) == (handle.job_id, busy.id)
        assert len((await page.http.get("/rollouts?outcome=dead&limit=3")).json()["rows"]) == 3
        shown = (await page.http.get(f"/rollout/{letters[0]}")).json()
        assert shown["facts"]["cause"] == "engine request refused"
        assert (await page.http.get(f"/rollout/{handle.job_id}")).json()["prompt"]["ids"]
        assert (await page.http.get("/rollout/none")).status_code == 404


async def test_jobs_that_wait_are_listed_with_what_for(redis_db: str, client: Any) -> None:
    async with dashboard(redis_db) as page:
        first = await client.submit(tokens())
        await page.until(lambda it: it["flow"]["queued"] == 1)
        told = (await page.http.get("/rollouts?outcome=waiting")).json()
        assert [(row["job_id"], row["state"]) for row in told["rows"]] == [(first.job_id, "waiting")]
        assert told["rows"][0]["why"].startswith("for its turn: the pool has no worker")
        assert (told["next"], told["left"]) == (None, 0)
        async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1e6)):
            await page.until(lambda it: it["flow"]["done"] == 1)
            asks = await client.submit(tokens(min_version=7))
            await page.until(lambda it: it["flow"]["queued"] == 1)
            (row,) = (await page.http.get("/rollouts?outcome=waiting")).json()["rows"]
            assert (row["job_id"], row["why"]) == (asks.job_id, "for weights version 7")


async def test_a_recorded_run_is_served_and_never_changed(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.job(tokens(reply_to="me"))
    history = load(str(tmp_path))
    served = recorded_application(history, Rollouts(str(tmp_path), history), "127.0.0.1")
    async with running(served) as (_, http):
        assert (await http.get("/state")).json()["mode"] == "journal"
        assert (await http.get("/events")).status_code == 404
        answer = await http.post("/requeue", json={"cause": "x"}, headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 403


@pytest.mark.parametrize(
    ("text", "mode"), [("short", 0o600), (TOKEN * 400, 0o600), (TOKEN, 0o604), ("\x07" * 20, 0o600)]
)
def test_a_token_file_that_protects_nothing_is_refused(tmp_path: Path, text: str, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="--token-file"):
        read_token(file)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--export", "x.html"], "--export needs --journal alone"),
        (["--journal", "none", "--token-file", "none"], "--token-file is for a live pool"),
        (["--journal", "none", "--tls-cert", "none"], "both, or none"),
        (["--journal", "none"], "no such folder"),
    ],
)
def test_options_that_do_not_fit_are_named(arguments: list[str], says: str) -> None:
    ended = CliRunner().invoke(app, ["dashboard", *arguments])
    assert (ended.exit_code, says in ended.output) == (2, True), ended.output
