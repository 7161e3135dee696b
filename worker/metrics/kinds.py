"""Prometheus' kinds of metrics, each made in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from .histogram import Histogram


def gauge(name: str, about: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, about, value=value)


def counter(name: str, about: str, value: float) -> Metric:
    """A counter without labels. name: with `_total`."""
    return CounterMetricFamily(name, about, value=value)


def gauges(name: str, about: str, label: str, values: Mapping[Any, float]) -> Metric:
    """A gauge with one label. values: by the label's value."""
    family = GaugeMetricFamily(name, about, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def counters(name: str, about: str, label: str, values: Mapping[Any, float]) -> Metric:
    """A counter with one label, as `gauges`."""
    family = CounterMetricFamily(name, about, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def distribution(name: str, about: str, seen: Histogram) -> Metric:
    """A histogram without labels."""
    return HistogramMetricFamily(name, about, buckets=seen.buckets(), sum_value=seen.total)
