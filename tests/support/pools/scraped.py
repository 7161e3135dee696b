"""What a metrics server shows, as numbers by name and labels."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def fetched(port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET on this host."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def numbers(text: str) -> dict[str, float]:
    """Every sample of the text format: name{label="value",…} -> number."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def scraped(port: int) -> dict[str, float]:
    """What /metrics shows now."""
    status, text = fetched(port, "/metrics")
    assert status == 200
    return numbers(text)
