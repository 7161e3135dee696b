"""A run with four faults in it: each is an alarm with its cause, on the page and in the report. And its history."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pools.planted_faults import BATCH, DEATHS, FLIPPED, VERSIONS, Planted, run_with_faults
from typer.testing import CliRunner

from rolloutmq.messages.journal import read
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.dashboard import Rollouts, as_page, load, page_of, report_of
from rolloutmq.ops.dashboard.rollouts import rows_of
from rolloutmq.ops.redis.embedded import EmbeddedRedis


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    """In a thread: Playwright, if it was used before, keeps an event loop in this one."""
    with EmbeddedRedis() as server, ThreadPoolExecutor(1) as thread:
        folder = tmp_path_factory.mktemp("planted")
        yield thread.submit(asyncio.run, run_with_faults(server.url, folder)).result()


@pytest.fixture(scope="module")
def history(run: Planted) -> Any:
    return load(str(run.journal))


def alarm(state: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [one for one in state["alarms"] if one["id"] == kind]
    return dict(found)


def test_each_planted_fault_is_an_alarm(run: Planted, history: Any) -> None:
    state = history.state()
    fell = alarm(state, "reward-fell")
    assert fell["title"] == "The reward changed its sign"
    assert f"up to version {FLIPPED}, -0.8" in fell["evidence"]
    assert run.late in alarm(state, "snapshot-broken")["evidence"]
    dying = alarm(state, "workers-die")
    assert (dying["title"], dying["severity"]) == ("Workers die again and again", "error")
    assert dying["evidence"].startswith(f"{len(DEATHS)} on ")
    assert dying["since"] == history.deaths[0].at
    paused = alarm(state, "why-paused")
    assert "were left paused" in paused["evidence"]
    assert paused["since"] < state["at"] - 0.5
    assert f"{len(run.asking)} jobs that ask for seed" in alarm(state, "never-claimed")["evidence"]
    assert state["verdict"]["title"] == "The run is over, with 5 errors"
    assert len(state["verdict"]["todo"]) == 5
    assert state["verdict"]["since"] == min(it["since"] for it in state["alarms"] if it["severity"] == "error")


def test_the_slider_shows_the_run_as_it_was(run: Planted, history: Any) -> None:
    assert {one.worker for one in history.deaths} == set(run.dead)
    before = history.state(history.deaths[0].at - 1e-3)
    assert "workers-die" not in [one["id"] for one in before["alarms"]]
    assert {it["alive"] for it in before["workers"].values()} == {True}
    assert {name for name, it in history.state()["workers"].items() if not it["alive"]} == set(run.dead)
    assert history.state(history.began - 5, brief=True)["at"] == history.began
    assert history.state(math.inf, brief=True)["at"] == history.ended
    flows = [history.state(at, brief=True)["flow"] for at in (history.began, history.deaths[1].at, history.ended)]
    assert [one["done"] for one in flows] == sorted(one["done"] for one in flows)
    end = history.state()
    assert end["flow"]["queued"] == len(run.asking)
    assert end["versions"].keys() == {str(version) for version in range(1, VERSIONS + 1)}
    assert sum(one["samples"] for one in end["versions"].values()) == len(list(read(run.journal, events="result")))
    assert [(version, state) for _, version, state, _ in end["publishes"]] == [
        (version, "ok") for version in range(1, VERSIONS + 1)
    ]


def test_since_is_when_it_began_wherever_the_slider_is(run: Planted, history: Any) -> None:
    last = history.deaths[-1].at
    seen = [history.state(at, brief=True) for at in np.linspace(last, history.ended, 9).tolist()]
    assert {alarm(one, "workers-die")["since"] for one in seen} == {history.deaths[0].at}
    times = [history.state(at, brief=True)["verdict"] for at in np.linspace(history.began, last, 50).tolist()]
    assert all(one["since"] < history.ended for one in times)
    by_spell: dict[float, set[str]] = {}
    for one in times:
        by_spell.setdefault(one["since"], set()).add(one["title"].partition(":")[0])
    assert len(by_spell) < len(times), "moments of one spell have one beginning"


def test_lanes_have_the_versions_that_each_worker_served(run: Planted, history: Any) -> None:
    lanes = history.state()["lanes"]
    whole = [lane for lane in lanes.values() if [it[1] for it in lane["ticks"]].count("sync") == VERSIONS]
    assert len(whole) == 2, "those that were there from the beginning to the end"
    served = [it[2] for it in whole[0]["spans"]]
    assert served == sorted(served)
    assert {it[1] for it in lanes[run.dead[0]]["ticks"]} >= {"join", "death"}
    assert any("refused" in it[3] for it in lanes[run.late]["ticks"] if it[1] == "fault")


def test_series_are_over_the_whole_run(run: Planted, history: Any) -> None:
    series = history.state()["series"]
    assert len(series["at"]) == 900
    assert {len(values) for values in series.values()} == {900}
    assert series["done"][-1] == history.state()["flow"]["done"]
    assert series["consumed"][-1] == history.state()["flow"]["consumed"]
    assert series["queued"][-1] == len(run.asking)
    assert max(series["serving"]) >= 3


def test_rollouts_are_listed_and_shown_with_their_tokens(run: Planted, history: Any) -> None:
    rollouts = Rollouts(str(run.journal), history, str)
    page, seen = rows_of(history, 50), list[tuple[str, int]]()
    while True:
        seen += [(row["job_id"], row["sample"]) for row in page["rows"]]
        if page["next"] is None:
            break
        page = rows_of(history, 50, page["next"])
        assert page["rows"]
    assert len(seen) == len(set(seen)) == history.recording.counts["result"]
    bad = rows_of(history, 500, version=FLIPPED + 1, outcome="trained")["rows"]
    assert len(bad) == BATCH
    assert {row["reward"] < 0 for row in bad} == {True}
    waiting = rows_of(history, 2, outcome="waiting")
    assert {row["job_id"] for row in waiting["rows"]} < set(run.asking)
    assert waiting["rows"][0]["why"] == "for a worker that has seed, never claimed"
    assert (waiting["left"], waiting["next"]) == (len(run.asking) - 2, None)
    assert rows_of(history, 2, repr(history.began), outcome="waiting")["rows"] == []
    row = bad[0]
    told = rollouts.one(row["job_id"], row["sample"])
    assert told is not None
    assert [token["version"] for token in told["tokens"]] == [FLIPPED + 1] * row["tokens"]
    assert told["tokens"][0]["text"] == str(told["tokens"][0]["id"])
    assert told["prompt"]["ids"][0] == 5
    assert {"trained", "reward"} <= told["notes"][0].keys()
    assert len(told["events"]) >= 3
    assert rollouts.one("f" * 32) is None


def test_the_report_is_one_screen_and_names_the_faults(run: Planted) -> None:
    ended = CliRunner().invoke(app, ["report", str(run.journal)])
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 100
    text = " ".join(ended.stdout.split())
    for words in ("REWARD FELL", "A version on disk is damaged", "ask for seed", "again and again", *run.dead):
        assert words in text


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        (("--max-deaths", len(DEATHS)), 0),
        (("--max-deaths", len(DEATHS) - 1), 1),
        (("--max-stale-share", 1.0), 0),
        (("--max-failed-share", 0.0), 0),
        (("--max-idle-share", 0.0), 1),
    ],
)
def test_limits_decide_the_exit_code(run: Planted, limit: tuple[str, float], code: int) -> None:
    ended = CliRunner().invoke(app, ["report", str(run.journal), *map(str, limit), "--json"])
    assert ended.exit_code == code, ended.output
    assert bool(json.loads(ended.stdout)["broken"]) == bool(code)


def test_gpu_seconds_and_idle_share_are_of_the_workers_time(history: Any) -> None:
    one, two = report_of(history).data, report_of(history, gpus=2).data
    assert 0 <= one["idle_share"] < 1
    assert one["busy_s"] <= one["present_s"]
    assert two["gpu_s_per_1000"] == pytest.approx(2 * one["gpu_s_per_1000"])
    assert one["gpu_s_per_1000"] == pytest.approx(1000 * one["present_s"] / one["consumed"])


def test_the_exported_page_has_the_run(run: Planted, history: Any) -> None:
    told = page_of(history, Rollouts(str(run.journal), history))
    assert len(told["frames"]) == 200
    assert told["frames"][0]["at"] < told["frames"][-1]["at"] == told["state"]["at"]
    assert len(run.asking) < len(told["rows"]) <= 200 + len(run.asking)
    assert [(one["job_id"], one["sample"]) for one in told["rollouts"]] == [
        (one["job_id"], one["sample"]) for one in told["rows"] if one["state"] != "waiting"
    ]
    assert {one["job_id"] for one in told["rows"] if one["state"] == "waiting"} == set(run.asking)


def test_the_exported_file_shows_each_cause_in_a_browser(
    run: Planted, history: Any, visit: Callable[..., Any], tmp_path: Path
) -> None:
    """It needs no server, and its own policy lets it work."""
    file = tmp_path / "run.html"
    file.write_text(as_page(page_of(history, Rollouts(str(run.journal), history))))
    page = visit(file.as_uri())
    assert page.locator("#verdict-title").inner_text() == "The run is over, with 5 errors"
    shown = page.locator("#alarms").inner_text()
    for words in ("changed its sign", "on disk is damaged", "again and again", "ask for seed"):
        assert words in shown
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator("#rollouts-rows button").first.click()
    page.get_by_text("reward", exact=False).first.wait_for()


def test_a_served_journal_has_a_slider(run: Planted, history: Any, visit: Callable[..., Any]) -> None:
    command = [
        sys.executable,
        "-c",
        "from rolloutmq.ops.entry import main; main()",
        "dashboard",
        "--port",
        "0",
        "--json",
    ]
    with subprocess.Popen([*command, "--journal", str(run.journal)], stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        page = visit(json.loads(served.stdout.readline())["url"])
        assert "changed its sign" in page.locator("#alarms").inner_text()
        page.locator("#history-at").evaluate(
            "(it, at) => { it.value = at; it.dispatchEvent(new Event('input')); }", history.began + 0.01
        )
        page.locator("#alarms", has_not_text="changed its sign").wait_for()
        page.close()
        served.terminate()
        assert served.wait(30) == 0
