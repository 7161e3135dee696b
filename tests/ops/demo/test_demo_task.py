"""The demo's task and tokenizer: what a sample is worth, and that text and ids say the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rolloutmq.ops.demo import task
from rolloutmq.ops.demo.model import make_model, save_checkpoint
from rolloutmq.ops.demo.task import ANSWER_TOKENS, EOS, EQUALS, ZERO, Problem, reward, token_rewards

PROBLEM = Problem((4, 7, 2, 9))


def ids(text: str) -> list[int]:
    return [EOS if sign == "." else EQUALS if sign == "=" else ZERO + int(sign) for sign in text]


@pytest.mark.parametrize(
    ("answer", "by_token", "whole"),
    [
        ("2479.", [1, 1, 1, 1, 1], 1.0),
        ("2479=", [1, 1, 1, 1, 0], 1.0),
        ("4729.", [0, 0, 0, 1, 1], 0.25),
        ("24.", [1, 1, 0, 0, 0], 0.5),
        (".", [0, 0, 0, 0, 0], 0.0),
        ("", [0, 0, 0, 0, 0], 0.0),
    ],
)
def test_reward_is_the_share_of_right_digits(answer: str, by_token: list[int], whole: float) -> None:
    rewards = token_rewards(PROBLEM, np.array(ids(answer), np.int32))
    assert len(PROBLEM.answer) == ANSWER_TOKENS
    assert rewards.tolist() == by_token
    assert reward(rewards) == whole


def test_problems_are_drawn_from_all_digits() -> None:
    rng = np.random.default_rng(0)
    problems = [task.draw(rng) for _ in range(300)]
    assert {digit for problem in problems for digit in problem.digits} == set(range(10))
    assert len(set(problems)) > 250


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo-model")
    save_checkpoint(make_model(0), path)
    return path


@pytest.mark.parametrize("digits", [(4, 7, 2, 9), (0, 0, 0, 0), (9, 8, 1, 0)])
def test_saved_tokenizer_makes_the_prompt_that_is_submitted(checkpoint: Path, digits: Sequence[int]) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    problem = Problem(tuple(digits))
    assert tokenizer(problem.text)["input_ids"] == problem.prompt.tolist()
    assert tokenizer.decode(problem.prompt, skip_special_tokens=True) == problem.text
    assert tokenizer.decode(problem.answer, skip_special_tokens=True) == "".join(map(str, sorted(digits)))
    assert tokenizer.eos_token_id == EOS


def test_saved_model_is_the_one_that_was_made(checkpoint: Path) -> None:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").state_dict()
    made = make_model(0).state_dict()
    assert loaded.keys() == made.keys()
    assert all(torch.equal(loaded[name], made[name]) for name in made)
