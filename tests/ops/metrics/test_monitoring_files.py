"""deploy/monitoring: rules, their tests and the dashboard, read by Prometheus' own tools and a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.pools.metric_names import exporter_metrics, names, worker_metrics
from support.pools.pool import Running, eventually
from support.prometheus import needs_prometheus, needs_promtool, prometheus, promtool
from support.specimens.messages import SHORT
from support.specimens.messages import job as new_job

from rolloutmq.messages import Broker
from rolloutmq.ops.metrics.exporter import Exporter
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.main import with_metrics
from rolloutmq.worker.metrics import MetricsServer
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "monitoring"
RULES = {rule["alert"]: rule for rule in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"][0]["rules"]}
TESTS = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())


def queries() -> list[str]:
    """The dashboard's, as Grafana would send them."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    assert len(found) > 20
    return [query.replace("$pool", "default").replace("$__rate_interval", "1m") for query in found]


def metrics_in(expression: str) -> set[str]:
    return {re.sub("_(bucket|sum)$", "", name) for name in re.findall(r"\brolloutmq_\w+", expression)}


def test_every_metric_of_rules_tests_and_dashboard_exists() -> None:
    there = names(exporter_metrics()) | names(worker_metrics())
    series = [series["series"] for test in TESTS for series in test["input_series"]]
    for expression in [*queries(), *series, *(rule["expr"] for rule in RULES.values())]:
        assert metrics_in(expression) <= there, expression


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_what_to_do_and_fires_in_a_test(name: str) -> None:
    annotations = RULES[name]["annotations"]
    assert annotations.keys() == {"summary", "action", "runbook"}
    assert annotations["action"].endswith(".")
    page, _, anchor = annotations["runbook"].partition("#")
    headings = re.findall(r"^### (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {heading.lower() for heading in headings}
    cases = [case for test in TESTS for case in test["alert_rule_test"] if case["alertname"] == name]
    assert sorted(len(case.get("exp_alerts", [])) for case in cases) == [0, 1]  # in a healthy pool, and in trouble


def test_the_dashboard_has_panels_with_numbers_of_their_own() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(places) == len(set(places))


@needs_promtool
def test_promtool_finds_the_rules_right_and_each_alert_fires(tmp_path: Path) -> None:
    promtool("check", "rules", "rules.yml", cwd=FOLDER)
    promtool("check", "config", "prometheus.yml", cwd=FOLDER)
    promtool("test", "rules", "rules_test.yml", cwd=FOLDER)
    recorded = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    promtool("check", "rules", "queries.yml", cwd=tmp_path)


@needs_prometheus
async def test_a_real_prometheus_reads_a_pool_and_evaluates_the_rules(
    redis_db: str, broker: Broker, tmp_path: Path
) -> None:
    exporter, engine = Exporter(redis_db, "default", 0.1), ScriptedEngine()
    config = WorkerConfig(redis_url=redis_db, drain_s=0.0, lease_s=1.0, metrics_port=0, metrics_host="127.0.0.1")
    worker, worker_server = with_metrics(config, engine, NoTokenizer())
    assert isinstance(worker_server, MetricsServer)
    looking = asyncio.create_task(exporter.run())
    running = Running(worker, engine)
    try:
        with MetricsServer("127.0.0.1", 0, exporter.collect) as server, worker_server:
            targets = {"rolloutmq-exporter": server.port, "rolloutmq-workers": worker_server.port}
            with prometheus(_config(targets), tmp_path) as watching:
                await eventually(lambda: watching.port, what="Prometheus listens")

                async def sees(expression: str, values: list[float]) -> None:
                    async def same() -> bool:
                        return await asyncio.to_thread(watching.query, expression) == values

                    await eventually(same, what=expression)

                await sees('rolloutmq_up{pool="default"}', [1.0])
                await sees("rolloutmq_worker_ready", [1.0])
                await sees('sum by (pool) (rolloutmq_workers{state="serving"})', [1.0])
                await sees("min(up)", [1.0])
                await sees('sum(rolloutmq_sample_staleness_versions_bucket{le="+Inf"})', [0.0])

                async def evaluated() -> bool:
                    return set((await asyncio.to_thread(watching.rules)).values()) == {"ok"}

                await eventually(evaluated, what="each rule was evaluated")
                assert (await asyncio.to_thread(watching.rules)).keys() == RULES.keys()
                empty = set(queries())

                async def all_have_series() -> bool:
                    await broker.enqueue([new_job(sampling=SHORT)])  # rates of some need a pool that works
                    empty.difference_update([one for one in empty if await asyncio.to_thread(watching.query, one)])
                    return not empty

                await eventually(all_have_series, what="a series for each query of the dashboard")
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        await running.stop()


def _config(targets: dict[str, int]) -> str:
    """That of deploy/monitoring, with these ports, and faster."""
    config: Any = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    config["rule_files"] = [str(FOLDER / "rules.yml")]
    assert [job["job_name"] for job in config["scrape_configs"]] == list(targets)
    for job in config["scrape_configs"]:
        job["static_configs"][0]["targets"] = [f"127.0.0.1:{targets[job['job_name']]}"]
    return yaml.safe_dump(config)
