"""The tools of examples/gsm8k/tools.yaml: what their calls earn."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.messages.model.tools import ToolCall
from rolloutmq.producer.data import ToolOutcome, ToolRegistry, run_tool_calls

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "gsm8k"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> ToolRegistry:
    monkeypatch.syspath_prepend(str(FOLDER))
    return ToolRegistry.load(FOLDER / "tools.yaml")


async def called(registry: ToolRegistry, name: str, truth: str, **arguments: Any) -> ToolOutcome:
    call = ToolCall(id="1", name=name, arguments=arguments)
    kwargs = {name: {"create_kwargs": {"ground_truth": truth}}}
    (outcome,) = await run_tool_calls([call], registry, 30.0, kwargs)
    assert outcome.ok, outcome.error
    return outcome


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("1800", True),
        ("#### 1,800", True),
        ("It costs $1,800.00.", True),
        ("20 packs, so 1800", True),
        ("1800 in 3 days", False),
        ("-1800", False),
        ("\N{MINUS SIGN}1800", False),
        ("many", False),
        ("", False),
        (1800, True),
    ],
)
async def test_a_grade_school_answer_earns_by_its_last_number(registry: ToolRegistry, answer: Any, right: bool) -> None:
    outcome = await called(registry, "calc_gsm8k_reward", "1800", answer=answer)
    assert (outcome.reward, outcome.state_reward) == ((0.0, 1.0) if right else (-0.05, 0.0))
    assert outcome.content.endswith(" right." if right else " wrong.")


async def test_a_submission_that_gets_nothing_better_is_penalised(registry: ToolRegistry) -> None:
    tool = registry.runner("calc_gsm8k_reward").tool  # type: ignore[union-attr]
    await tool.create("a", create_kwargs={"ground_truth": "7"})
    rewards = [(await tool.execute("a", {"answer": said}))[1] for said in ("6", "6", "7", "7", "5", "7")]
    assert rewards == [-0.05, -0.05, 0.0, -0.05, -0.05, 0.0]
    await tool.release("a")
    assert not tool.truths
    assert not tool.scores


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        (r"2\sqrt{3}", r"\boxed{x = 2\sqrt{3} \text{ cm}}", True),
        (r"2\sqrt{3}", "3.464", True),
        (r"2\sqrt{3}", "2√3", True),
        (r"2\sqrt{3}", "3.47", False),
        (r"\frac{5\sqrt{2}}{2}", r"$\dfrac { 5 \sqrt { 2 } } { 2 }$", True),
        (r"\frac12", "0.5", True),
        (r"3\frac{1}{2}", "3.5", True),
        (r"\sqrt 4", "2", True),
        ("\N{MINUS SIGN}2", "-2", True),
        ("30", r"30^\circ", True),
        ("30", "30 degrees", True),
        (r"36\pi", "113.1 square cm", True),
        ("2", r"\sqrt[3]{8}", True),
        ("10", r"10 \text{ cm}^2", True),
        ("14", r"\left(3+4\right) \cdot 2", True),
        ("27.7", "27.8", False),
        ("ABC", "a b c", False),
        ("A", "a", True),
        ("7", "9**9**9**9", False),
        ("7", r"\sqrt{" * 100, False),
        ("7", "", False),
    ],
)
async def test_an_answer_in_latex_earns_by_its_value(
    registry: ToolRegistry, truth: str, answer: str, right: bool
) -> None:
    outcome = await called(registry, "calc_geo3k_reward", truth, answer=answer)
    assert (outcome.reward, outcome.state_reward) == ((0.0, 1.0) if right else (-0.05, 0.0))


async def test_a_search_earns_if_it_finds_the_truth(registry: ToolRegistry) -> None:
    for queries, score in ((["group", "dozen"], 1.0), (["fortnight"], 0.0), (["score"], 0.0), ([], 0.0)):
        outcome = await called(registry, "search", "twelve", query_list=queries)
        assert (outcome.reward, outcome.state_reward, outcome.metrics) == (0.0, score, {"query_count": len(queries)})
    for truth, queries, count in (("", ["group"], 1), ("twelve", "dozen", 1), ("x", ["group"] * 100, 8)):
        outcome = await called(registry, "search", truth, query_list=queries)
        assert (outcome.state_reward, outcome.metrics) == (float(truth == "twelve"), {"query_count": count})
    assert "A score is a group of twenty." in (await called(registry, "search", "x", query_list=["score"])).content


async def test_a_program_runs(registry: ToolRegistry) -> None:
    outcome = await called(registry, "code_interpreter", "", code="print(6 * 7)")
    assert (outcome.content, outcome.reward) == ("42\n", None)


async def test_every_problem_is_worked_and_its_answer_is_right(registry: ToolRegistry) -> None:
    from problems import problems  # noqa: PLC0415 – beside the tools

    rows = list(problems(300, seed=5))
    assert rows[:9] == list(islice(problems(300, seed=5), 9))
    assert len({row["extra_info"]["question"] for row in rows}) > 200
    for row in rows:
        *steps, end = row["extra_info"]["answer"].splitlines()
        for step in steps:
            left, _, value = step.partition(" = ")
            assert eval(left) == int(value)
        truth = row["reward_model"]["ground_truth"]
        assert end == f"#### {truth}" == f"#### {steps[-1].partition(' = ')[2]}"
        kwargs = row["extra_info"]["tools_kwargs"]["calc_gsm8k_reward"]["create_kwargs"]
        assert (await called(registry, "calc_gsm8k_reward", kwargs["ground_truth"], answer=end)).state_reward == 1.0
    for most in (3, 9):
        assert {int(row["reward_model"]["ground_truth"]) for row in problems(300, most=most)} == set(range(1, most + 1))
