"""What a run simulates: a fleet, its load, and how workers come and go. Read from a TOML, YAML or JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rolloutmq.messages.model import Float, Int
from rolloutmq.ops.config import read_document
from rolloutmq.ops.flags import as_config

MOST_BLOCKS = 1 << 19
"""Of all samples of a worker. Each block is a token of a real message."""
DAY: tuple[float, ...] = (
    *(0.25, 0.2, 0.2, 0.2, 0.2, 0.25, 0.35, 0.5, 0.65, 0.75, 0.8, 0.8),
    *(0.75, 0.8, 0.85, 0.85, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3),
)
"""Hour by hour: quiet at night, busy by day, never more than the fleet can do."""


class Scenario(BaseModel):
    """Every field has a default, so a file names what it changes.

    Durations are seconds of simulated time. A median with a spread is a log-normal distribution; the spread is its
    sigma, and 0 gives the median every time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    minutes: Float = Field(default=1440.0, ge=0.5, le=100_000)
    """Minutes of load and pre-emptions. What is open then runs out without further ones."""
    min_workers: Int = Field(default=0, ge=0)
    """Fewest workers."""
    max_workers: Int = Field(default=1000, ge=1, le=20_000)
    """Most workers."""
    slots: Int = Field(default=4, ge=1, le=1024)
    """Samples that a worker generates at once."""
    tokens_per_s: Float = Field(default=40.0, gt=0)
    """Tokens a second of one sample, the median of all workers."""
    tokens_per_s_spread: Float = Field(default=0.1, ge=0, le=3)
    """Spread of that between workers."""
    tokens: Float = Field(default=24_000.0, ge=1)
    """Tokens of a sample, the median."""
    tokens_spread: Float = Field(default=0.7, ge=0, le=3)
    """Spread of that between samples."""
    most_tokens: Int = Field(default=98_304, ge=1)
    """Longest sample."""
    block: Int = Field(default=64, ge=1)
    """So many generated tokens are one token in Redis. Lengths are rounded to blocks."""
    group: Int = Field(default=4, ge=1, le=4096)
    """Samples of a job."""
    load: tuple[Float, ...] = Field(default=DAY, min_length=1)
    """Work that arrives, as a share of what max_workers can generate. The values divide the run into equal parts."""
    start_s: Float = Field(default=90.0, ge=0)
    """From the order for a worker until it claims, the median."""
    start_spread: Float = Field(default=0.4, ge=0, le=3)
    """Spread of that."""
    preempted_per_hour: Float = Field(default=0.1, ge=0)
    """Pre-emptions of one worker in an hour, at random moments."""
    wave_s: Float = Field(default=0.0, ge=0)
    """So often a share of all workers is pre-empted at one moment; 0 for never."""
    wave_share: Float = Field(default=0.5, ge=0, le=1)
    """That share."""
    noticed: Float = Field(default=0.9, ge=0, le=1)
    """Share of pre-emptions with a notice: such a worker hands over what it has. The others die."""
    lease_s: Float = Field(default=10.0, gt=0)
    """From a death until others may take the jobs."""
    checkpoint_s: Float = Field(default=10.0, gt=0)
    """So often a running sample is saved."""
    max_lost: Int = Field(default=3, ge=1)
    """A job is dead-lettered when its worker died so often."""
    decide_s: Float = Field(default=15.0, gt=0)
    """So often the scaling policy decides."""
    target_s: Float = Field(default=60.0, gt=0)
    """What waits should be generated within so many seconds: `ScaleSettings.target_s`."""
    stabilise_s: Float = Field(default=300.0, ge=0)
    """A worker leaves when it was not needed for so long: `ScaleSettings.stabilise_s`."""

    @model_validator(mode="after")
    def _possible(self) -> Scenario:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers={self.min_workers}: at most max_workers={self.max_workers}")
        if any(not 0 <= share <= 10 for share in self.load):
            raise ValueError(f"load={list(self.load)}: shares from 0 to 10")
        blocks = self.slots * max(1, round(self.most_tokens / self.block))
        if blocks > MOST_BLOCKS:
            raise ValueError(f"block={self.block}: a worker's samples may have {MOST_BLOCKS} blocks, not {blocks}")
        return self


def read_scenario(path: Path | None, **given: Any) -> Scenario:
    """The scenario in a file, or the default one, with `given` in place of its own values. Raises InvalidField."""
    return as_config(Scenario, **(read_document(path) if path is not None else {}) | given)
