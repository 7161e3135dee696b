"""The page of metrics has each metric, and each metric follows Prometheus' conventions."""

from __future__ import annotations

import re
from pathlib import Path

from support.pools.metric_names import exporter_metrics, names, worker_metrics

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_the_page_has_every_metric_and_no_other() -> None:
    listed = re.findall(r"^\| `(rolloutmq_\w+)` \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == names(exporter_metrics()) | names(worker_metrics())


def test_names_follow_the_conventions() -> None:
    found = [*exporter_metrics(), *worker_metrics()]
    assert len({metric.name for metric in found}) == len(found)
    for metric in found:
        assert re.fullmatch(r"rolloutmq_[a-z_]+", metric.name)
        assert not re.search(r"_(ms|millis|gb|mb|kb|percent|count|total)$", metric.name)
        assert metric.documentation.endswith(".")
