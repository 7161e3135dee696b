"""Rows in the forms that TRL's, SkyRL's and verl's trainers take. None of them is imported.

Read from trl 1.16 (`rollout_func` of GRPOTrainer), skyrl 0.3 (`generators/base.py`) and verl 0.9 (the agent loop's
`_postprocess`), and tried with the code that takes them there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.arguments import whole_number
from ...messages.errors import InvalidField
from ..calls import GIVEN
from .rows import Row, rows_given


def to_trl(rows: Iterable[Row]) -> dict[str, list[Any]]:
    """What a `rollout_func` returns: lists, one item a row.

    prompt_ids; completion_ids: everything behind the prompt; logprobs: of those, 0.0 at tokens that nobody generated;
    env_mask: of those, 1 at tokens that the model generated. reward, too, if all rows have one: TRL hands it to reward
    functions.
    """
    rows = rows_given(rows)
    found: dict[str, list[Any]] = {
        "prompt_ids": [row.ids[: row.prompt].tolist() for row in rows],
        "completion_ids": [row.ids[row.prompt :].tolist() for row in rows],
        "logprobs": [row.logprobs[row.prompt :].tolist() for row in rows],
        "env_mask": [row.mask[row.prompt :].tolist() for row in rows],
    }
    if not any(math.isnan(row.reward) for row in rows):
        found["reward"] = [row.reward for row in rows]
    return found


def to_skyrl(rows: Iterable[Row]) -> dict[str, Any]:
    """A `GeneratorOutput`; `trajectory_ids` and `is_last_step` are the caller's to fill in.

    Raises InvalidField for a row without a reward, and for one without tokens behind its prompt.
    """
    rows = rows_given(rows)
    for place, row in enumerate(rows):
        if math.isnan(row.reward):
            raise InvalidField(f"rows[{place}].reward", row.reward, "a number: SkyRL's trainer takes none without")
        _check_place_for_reward(place, row)
    return {
        "prompt_token_ids": [row.ids[: row.prompt].tolist() for row in rows],
        "response_ids": [row.ids[row.prompt :].tolist() for row in rows],
        "rewards": [row.reward for row in rows],
        "loss_masks": [row.mask[row.prompt :].tolist() for row in rows],
        "stop_reasons": [row.stop for row in rows],
        "rollout_metrics": None,
        "rollout_logprobs": [row.logprobs[row.prompt :].tolist() for row in rows],
        "trajectory_ids": None,
        "is_last_step": None,
    }


def to_verl(
    rows: Iterable[Row], *, prompt_length: int, response_length: int, pad_id: int = 0
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Tensors and other columns, for `DataProto.from_dict(tensors=…, non_tensors=…)`. Imports torch.

    Prompts are padded on the left to `prompt_length`, responses on the right to `response_length`. Tensors, with
    t = both together: prompts, responses, response_mask, input_ids, attention_mask, position_ids (all int64),
    rollout_log_probs float32, and rm_scores float32, the reward at the last token of the response, if all rows have
    one. Others: uid, the same for rows of one group, and oldest_version and newest_version of a row's generated
    tokens, which are additions. Raises InvalidField for a row that does not fit, which is not cut, and for one with a
    reward and no response.
    """
    import torch  # noqa: PLC0415 – the other forms need none

    if not (rows := rows_given(rows)):
        raise InvalidField("rows", rows, "at least one")
    prompt_length = whole_number("prompt_length", prompt_length, 1)
    response_length = whole_number("response_length", response_length, 1)
    pad_id = whole_number("pad_id", pad_id)
    columns: dict[str, list[npt.NDArray[Any]]] = {
        name: [] for name in ("ids", "attention", "mask", "logprobs", "scores")
    }
    for place, row in enumerate(rows):
        for name, length, most in (
            ("prompt", row.prompt, prompt_length),
            ("response", len(row) - row.prompt, response_length),
        ):
            if length > most:
                raise InvalidField(f"rows[{place}].{name}", f"{length} tokens", f"at most {name}_length={most}")
        if not math.isnan(row.reward):
            _check_place_for_reward(place, row)
        at = (prompt_length - row.prompt, prompt_length + response_length - (prompt_length - row.prompt) - len(row))
        scores = np.zeros(len(row), np.float32)
        scores[-1] = row.reward
        columns["ids"].append(np.pad(row.ids.astype(np.int64), at, constant_values=pad_id))
        columns["attention"].append(np.pad(np.ones(len(row), np.int64), at))
        columns["mask"].append(np.pad(row.mask.astype(np.int64), at))
        columns["logprobs"].append(np.pad(row.logprobs, at))
        columns["scores"].append(np.pad(scores, at))
    whole = {name: torch.from_numpy(np.stack(parts)) for name, parts in columns.items()}
    tensors = {
        "prompts": whole["ids"][:, :prompt_length],
        "responses": whole["ids"][:, prompt_length:],
        "response_mask": whole["mask"][:, prompt_length:],
        "input_ids": whole["ids"],
        "attention_mask": whole["attention"],
        "position_ids": (whole["attention"].cumsum(1) - 1).clamp(min=0),
        "rollout_log_probs": whole["logprobs"][:, prompt_length:],
    }
    if not any(math.isnan(row.reward) for row in rows):
        tensors["rm_scores"] = whole["scores"][:, prompt_length:]
    sampled = [row.versions[row.mask == 1] for row in rows]
    others = {
        "uid": np.array([str(row.group) for row in rows], dtype=object),
        "oldest_version": np.array([min(it, default=GIVEN) for it in sampled]),
        "newest_version": np.array([max(it, default=GIVEN) for it in sampled]),
    }
    return tensors, others


def _check_place_for_reward(place: int, row: Row) -> None:
    """Both trainers put a row's reward at the last token of its response."""
    if len(row) == row.prompt:
        raise InvalidField(f"rows[{place}].response", "0 tokens", "at least 1: the last one gets the row's reward")
