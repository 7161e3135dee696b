"""A temperature that changes as the sample gets longer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from ...messages.errors import InvalidField
from . import params as check
from .processor import LogitProcessor, Rows

GREEDY = 1e-6
"""SGLang samples greedily at a temperature up to this. It cannot change between the two within a request."""
MAX_TEMPERATURE = 100.0
SHAPES = ("linear", "step")


class TemperatureSchedule(LogitProcessor):
    """The temperature as a function of how many tokens the sample has generated, over all its legs.

    points: [[tokens, temperature], ...], tokens increasing. Before the first point and after the last one the
    temperature
        is theirs.
    shape: between two points "linear" (the default) interpolates, and "step" keeps the first one's temperature.
    """

    @classmethod
    def validate(cls, params: Mapping[str, Any], vocab_size: int) -> None:
        check.only(params, ["points", "shape"])
        if (shape := params.get("shape", "linear")) not in SHAPES:
            raise InvalidField("shape", shape, f"one of {', '.join(SHAPES)}")
        points = params.get("points")
        if not isinstance(points, list | tuple) or not points or not all(map(_is_point, points)):
            allowed = f"pairs: tokens generated, 0 or more; a temperature above {GREEDY}, at most {MAX_TEMPERATURE}"
            raise InvalidField("points", points, allowed)
        if any(later[0] <= earlier[0] for earlier, later in pairwise(points)):
            raise InvalidField("points", points, "in order of tokens generated, no number twice")

    def temperature(self, rows: Rows) -> torch.Tensor:
        """Return (rows,) float32, the temperature of each row's next token."""
        tokens, temperatures, linear = rows.keep_all(lambda: _table(rows))
        now = rows.generated.float()[:, None]
        left = (torch.searchsorted(tokens, now, right=True) - 1).clamp(min=0)
        right = (left + 1).clamp(max=tokens.shape[1] - 1)
        since, until = tokens.gather(1, left), tokens.gather(1, right)
        share = ((now - since) / (until - since).clamp(min=1)).clamp(0, 1) * linear[:, None]
        return torch.lerp(temperatures.gather(1, left), temperatures.gather(1, right), share)[:, 0]


def _is_point(point: object) -> bool:
    if not isinstance(point, list | tuple) or len(point) != 2:
        return False
    tokens, temperature = point
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        return False
    return type(tokens) is int and tokens >= 0 and GREEDY < temperature <= MAX_TEMPERATURE


def _table(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's points, the last one repeated up to the longest list, and 1 for "linear", 0 for "step"."""
    most = max(len(params["points"]) for params in rows.params)
    padded = [[*params["points"], *[params["points"][-1]] * (most - len(params["points"]))] for params in rows.params]
    table = rows.tensor(padded, torch.float32)
    linear = [float(params.get("shape", "linear") == "linear") for params in rows.params]
    return table[..., 0].contiguous(), table[..., 1].contiguous(), rows.tensor(linear)
