"""Rows as tensors, and in the forms of other trainers: every token keeps what belongs to it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.specimens.messages import job, result

from rolloutmq import InvalidField, Segment
from rolloutmq.producer.calls.session import History
from rolloutmq.producer.training import TrainGroup
from rolloutmq.producer.training.batch import RolloutBatch
from rolloutmq.producer.training.convert import to_skyrl, to_trl, to_verl
from rolloutmq.producer.training.rows import Row, rows_of


def one(prompt: list[int], tokens: list[int], version: int = 3, **fields: Any) -> Any:
    made = result(
        job(token_ids=prompt),
        token_ids=tokens,
        logprobs=[-0.5 * (i + 1) for i in range(len(tokens))],
        segments=(Segment(version, 1), Segment(version + 1, len(tokens) - 1))[: len(tokens)],
        **fields,
    )
    made.learn(np.array(prompt, np.int32), {})
    return made


def conversation() -> Row:
    """Two turns with an observation between them."""
    given = (np.array([7, 8], np.int32), np.array([9], np.int32))
    first = History().given(given[0]).generated(one([7, 8], [5, 6]))
    history = first.given(given[1]).generated(one([7, 8, 5, 6, 9], [4, 3, 2], version=5))
    return Row.of_session(history, reward=0.25, group=2)


@pytest.fixture
def rows() -> list[Row]:
    return [Row.of_result(one([1, 2, 3], [10, 11]), reward=1.0, group=1), conversation()]


def test_rows_keep_every_token(rows: list[Row]) -> None:
    short, talk = rows
    assert short.ids.tolist() == [1, 2, 3, 10, 11]
    assert (short.mask.tolist(), short.prompt) == ([0, 0, 0, 1, 1], 3)
    assert short.logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -1.0]
    assert short.versions.tolist() == [-1, -1, -1, 3, 4]
    assert talk.ids.tolist() == [7, 8, 5, 6, 9, 4, 3, 2]
    assert (talk.mask.tolist(), talk.prompt) == ([0, 0, 1, 1, 0, 1, 1, 1], 2)
    assert talk.turns.tolist() == [-1, -1, 0, 0, -1, 1, 1, 1]
    assert talk.versions.tolist() == [-1, -1, 3, 4, -1, 5, 6, 6]
    assert talk.logprobs.tolist() == [0.0, 0.0, -0.5, -1.0, 0.0, -0.5, -1.0, -1.5]


def test_rows_of_groups() -> None:
    group = TrainGroup("g", (one([1], [2]), one([1], [3, 4])), (), number=9, samples=(0, 1), n=2, rewards=[0.0, 1.0])
    assert [(row.group, row.reward, len(row)) for row in rows_of([group])] == [(9, 0.0, 2), (9, 1.0, 3)]
    bare = TrainGroup("g", (one([1], [2]),), (), number=9, samples=(0,))
    assert math.isnan(rows_of([bare])[0].reward)
    with pytest.raises(InvalidField, match="logprobs=None"):
        Row.of_result(one([1], [2]).model_copy(update={"logprobs": None}))
    with pytest.raises(InvalidField, match="prompt_ids=None"):
        Row.of_result(result(job(token_ids=[1])))


COLUMNS = ("ids", "mask", "logprobs", "versions", "turns")


def as_rows(batch: RolloutBatch, name: str) -> list[list[float]]:
    """A column as lists, one for each row, without padding."""
    values = getattr(batch, name)
    if batch.layout == "nested":
        return [it.tolist() for it in values.unbind()]
    if batch.layout == "packed":
        ends = batch.cu_seqlens.tolist()  # type: ignore[union-attr]
        return [values[a:b].tolist() for a, b in itertools.pairwise(ends)]
    return [it[keep.bool()].tolist() for it, keep in zip(values, batch.attention, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["padded", "packed", "nested"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_all_layouts_have_the_same_rows(rows: list[Row], layout: Any, side: Any) -> None:
    batch = RolloutBatch.of(rows, layout, side=side, pad_id=99, multiple_of=6)
    for name in COLUMNS:
        assert as_rows(batch, name) == [getattr(row, name).tolist() for row in rows], name
    assert as_rows(batch, "positions") == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.rewards.tolist() == [1.0, 0.25]
    assert (batch.groups.tolist(), batch.prompts.tolist(), batch.lengths.tolist()) == ([1, 2], [3, 2], [5, 8])
    assert (len(batch), batch.ids.dtype, batch.logprobs.dtype) == (2, torch.int64, torch.float32)
    moved = batch.to("cpu")
    assert (moved.layout, as_rows(moved, "ids")) == (layout, as_rows(batch, "ids"))


def test_padding_is_marked_as_such(rows: list[Row]) -> None:
    batch = RolloutBatch.of(rows, pad_id=99, multiple_of=6)
    assert batch.ids.shape == (2, 12)
    assert batch.ids[0, 5:].tolist() == [99] * 7
    for name, value in (("mask", 0), ("logprobs", 0), ("versions", -1), ("turns", -1), ("attention", 0)):
        assert getattr(batch, name)[0, 5:].tolist() == [value] * 7, name


def test_a_packed_batch_knows_its_rows(rows: list[Row]) -> None:
    batch = RolloutBatch.of(rows, "packed")
    assert (batch.cu_seqlens.tolist(), batch.cu_seqlens.dtype) == ([0, 5, 13], torch.int32)
    assert batch.token_rows().tolist() == [0] * 5 + [1] * 8
    with pytest.raises(InvalidField, match="layout='padded'"):
        RolloutBatch.of(rows).token_rows()


@pytest.mark.parametrize(
    "form", [RolloutBatch.of, to_trl, to_skyrl, partial(to_verl, prompt_length=3, response_length=6)]
)
def test_rows_may_come_from_a_generator_and_nothing_else_is_a_row(rows: list[Row], form: Any) -> None:
    assert repr(form(row for row in rows)) == repr(form(rows))
    group = TrainGroup("g", (one([1], [2]),), (), number=9, samples=(0,))
    for wrong in (group, group.results[0], None):
        with pytest.raises(InvalidField, match=r"rows\[1\]=.*: a Row: rows_of makes them of groups"):
            form([rows[0], wrong])


@pytest.mark.parametrize(("groups", "field"), [(None, "groups"), ("text", "groups"), ([1], "groups[0]")])
def test_rows_are_of_groups_only(groups: Any, field: str) -> None:
    with pytest.raises(InvalidField) as raised:
        rows_of(groups)
    assert raised.value.field == field


def test_rewards_that_are_not_one_for_each_result_are_refused() -> None:
    group = TrainGroup("g", (one([1], [2]), one([1], [3])), (), samples=(0, 1), n=2, rewards=[1.0])
    with pytest.raises(InvalidField, match=r"rewards=\[1\.0\]: one for each of 2 results"):
        rows_of([group])


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"layout": "flat"}, "layout"),
        ({"side": "top"}, "side"),
        ({"multiple_of": 0}, "multiple_of"),
        ({"multiple_of": 1.5}, "multiple_of"),
        ({"pad_id": "0"}, "pad_id"),
        ({"rows": []}, "rows"),
        ({"rows": None}, "rows"),
    ],
)
def test_a_wrong_layout_is_refused(rows: list[Row], given: Any, field: str) -> None:
    with pytest.raises(InvalidField) as raised:
        RolloutBatch.of(**({"rows": rows} | given))
    assert raised.value.field == field


def test_the_forms_of_trl_and_skyrl(rows: list[Row]) -> None:
    trl, skyrl = to_trl(rows), to_skyrl(rows)
    assert trl["prompt_ids"] == skyrl["prompt_token_ids"] == [[1, 2, 3], [7, 8]]
    assert trl["completion_ids"] == skyrl["response_ids"] == [[10, 11], [5, 6, 9, 4, 3, 2]]
    assert trl["env_mask"] == skyrl["loss_masks"] == [[1, 1], [1, 1, 0, 1, 1, 1]]
    assert trl["logprobs"] == skyrl["rollout_logprobs"] == [[-0.5, -1.0], [-0.5, -1.0, 0.0, -0.5, -1.0, -1.5]]
    assert trl["reward"] == skyrl["rewards"] == [1.0, 0.25]
    assert skyrl["stop_reasons"] == ["length", "stop"]
    bare = [Row.of_result(one([1], [2]))]
    assert "reward" not in to_trl(bare)
    with pytest.raises(InvalidField, match=r"rows\[0\].reward"):
        to_skyrl(bare)


def test_the_form_of_verl(rows: list[Row]) -> None:
    tensors, others = to_verl(rows, prompt_length=4, response_length=7, pad_id=99)
    assert tensors["prompts"].tolist() == [[99, 1, 2, 3], [99, 99, 7, 8]]
    assert tensors["responses"].tolist() == [[10, 11, 99, 99, 99, 99, 99], [5, 6, 9, 4, 3, 2, 99]]
    assert tensors["response_mask"].tolist() == [[1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1, 0]]
    assert tensors["input_ids"].tolist() == torch.cat([tensors["prompts"], tensors["responses"]], 1).tolist()
    assert tensors["attention_mask"].sum(1).tolist() == [5, 8]
    assert tensors["position_ids"][0].tolist() == [0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert tensors["rollout_log_probs"][0, :2].tolist() == [-0.5, -1.0]
    assert tensors["rm_scores"].tolist() == [[0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0.25, 0]]
    assert others["uid"].tolist() == ["1", "2"]
    assert (others["oldest_version"].tolist(), others["newest_version"].tolist()) == ([3, 3], [4, 6])
    with pytest.raises(InvalidField, match=r"rows\[1\].response='6 tokens': at most response_length=5"):
        to_verl(rows, prompt_length=4, response_length=5)


def test_a_reward_needs_a_token_to_stand_at(rows: list[Row]) -> None:
    """A sample that was stopped before its first token has none. SkyRL and verl put a reward at a row's last one."""
    empty = replace(rows[0], **{name: getattr(rows[0], name)[:3] for name in COLUMNS})
    for convert in (to_skyrl, lambda given: to_verl(given, prompt_length=4, response_length=7)):
        with pytest.raises(InvalidField, match=r"rows\[1\].response='0 tokens': at least 1"):
            convert([rows[0], empty])  # type: ignore[operator]
    bare = replace(empty, reward=float("nan"))
    tensors, _ = to_verl([bare], prompt_length=4, response_length=7)
    assert "rm_scores" not in tensors
