"""Which logit processors a worker has, by name; needs no engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rolloutmq.messages.errors import ConfigError, RequestRefused
from rolloutmq.messages.model.sampling import LogitProcessor
from rolloutmq.worker.logit_processors import Registry, known_processors

BUILT_IN = ["action_mask", "disallowed_tokens", "forced_tokens", "min_new_tokens", "temperature_schedule"]
MASK = LogitProcessor(name="action_mask", params={"token_ids": [1]})


def test_processors_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By configuration, and from an installed package."""
    (tmp_path / "ours.py").write_text(
        "from rolloutmq.worker.logit_processors import LogitProcessor\n"
        "class Mine(LogitProcessor): pass\n"
        "class Other: pass\n"
    )
    installed = tmp_path / "ours-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[rolloutmq.logit_processors]\npackaged = ours:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ours", raising=False)
    assert known_processors({"mine": "ours:Mine"}) == sorted([*BUILT_IN, "mine", "packaged"])
    registry = Registry({"mine": "ours:Mine"})
    registry.load_own()
    assert registry.names() == known_processors({"mine": "ours:Mine"})
    assert type(registry.get("mine")) is type(registry.get("packaged"))
    registry.check([LogitProcessor(name="mine", params={"any": 1}), MASK], 10)
    with pytest.raises(
        RequestRefused, match=r"logit_processors\[1\].name='yours': this worker has action_mask, .*, mine,"
    ):
        registry.check([MASK, LogitProcessor(name="yours")], 10)


def test_a_greedy_job_has_no_temperature_to_change() -> None:
    pytest.importorskip("torch")
    schedule = LogitProcessor(name="temperature_schedule", params={"points": [[0, 1.0]]})
    Registry().check([schedule, MASK], 10)
    Registry().check([MASK], 10, greedy=True)
    with pytest.raises(RequestRefused, match=r"logit_processors\[1\] temperature_schedule: sampling.temperature=0.0"):
        Registry().check([MASK, schedule], 10, greedy=True)


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"action_mask": "ours:Mine"}, "logit_processors='action_mask': every worker has one of that name"),
        ({"mine": "nowhere:Mine"}, r"logit processor 'mine' \(nowhere:Mine\) cannot be loaded: ModuleNotFoundError"),
        ({"mine": "json"}, "cannot be loaded"),
        ({"mine": "json:JSONDecoder"}, "not a subclass of LogitProcessor"),
    ],
)
def test_mistakes_show_at_the_start(own: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Registry(own).load_own()
