"""What public methods are given: a wrong type gets an InvalidField that names argument, value and what is allowed."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from rolloutmq import GenerateJob, InvalidField, PoolControl, RolloutClient, RolloutMQError, Session
from rolloutmq.messages.arguments import checks_arguments
from rolloutmq.producer import JobHandle

JOB = GenerateJob(token_ids=[1])
LEFT_TO_METHODS = {"prompt", "sampling", "token_ids", "mode", "format", "switch"}
"""Arguments that may have several forms, or whose values are words: the methods and the models check them."""


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("not even its repr")


def arguments(*kinds: type) -> list[tuple[Callable[..., Any], str]]:
    found = []
    for kind in kinds:
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name == "__init__" or not name.startswith("_"):
                for one in list(inspect.signature(method).parameters.values())[1:]:
                    if one.kind not in {one.VAR_KEYWORD, one.VAR_POSITIONAL} and not one.name.startswith("_"):
                        found.append((method, one.name))
    return found


FACE = [
    (method, name)
    for method, name in arguments(RolloutClient, Session, PoolControl, JobHandle)
    if method is not JobHandle.__init__ and method is not Session.__init__
]


@pytest.mark.parametrize(("method", "name"), FACE, ids=[f"{method.__qualname__}-{name}" for method, name in FACE])
async def test_every_argument_of_every_public_method_has_a_type(method: Callable[..., Any], name: str) -> None:
    """Before the method does anything: it has no object here to do it with."""
    if name in LEFT_TO_METHODS:
        return

    async def call() -> None:
        found = method(None, **{name: Unprintable()})
        if inspect.isawaitable(found):
            await found

    with pytest.raises(InvalidField) as refused:
        await call()
    assert refused.value.field == name


class Example:
    def call(
        self,
        seconds: float | None = None,
        *,
        whole: int = 0,
        yes: bool = False,
        text: str = "",
        many: list[int] | None = None,
        jobs: Any = (),
    ) -> tuple[Any, ...]:
        return seconds, whole, yes, text, many, jobs


checks_arguments()(Example)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("seconds", True, "a number or None"),
        ("seconds", "1", "a number or None"),
        ("seconds", float("nan"), "a number or None"),
        ("seconds", 10**4000, "a number or None"),
        ("seconds", np.zeros((2, 2)), "a number or None"),
        ("whole", True, "an integer"),
        ("whole", 2.5, "an integer"),
        ("whole", None, "an integer"),
        ("yes", 1, "True or False"),
        ("text", b"x", "a text"),
    ],
)
def test_what_is_no_number_no_text_and_no_boolean(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidField, match=rf"(?s)^{name}=.*: {allowed}$"):
        Example().call(**{name: value})


@pytest.mark.parametrize("value", [None, 0, -1.5, 3, float("inf"), np.float32(1), np.int64(2)])
def test_numbers_are_seconds(value: Any) -> None:
    assert Example().call(value)[0] is value


def test_a_method_is_a_coroutine_function_as_before() -> None:
    assert inspect.iscoroutinefunction(RolloutClient.submit)
    assert not inspect.iscoroutinefunction(RolloutClient.results)


def test_what_has_another_type_is_left_to_the_method() -> None:
    odd = Unprintable()
    assert Example().call(many=odd, jobs=odd)[4:] == (odd, odd)  # type: ignore[arg-type]


# --- what is inside of an argument -----------------------------------------------------------------------------------


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture
async def client(redis_db: str) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(redis_db) as client:
        yield client


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda client: client.submit({"token_ids": [1]}), "job="),
        (lambda client: client.submit_many([JOB, "x"]), r"jobs\[1\]='x': a GenerateJob"),
        (lambda client: client.check([5]), r"jobs\[0\]=5: a GenerateJob"),
        (lambda client: anext(client.map([5])), r"jobs\[0\]=5: a GenerateJob"),
        (lambda client: client.cancel("0" * 32), "jobs="),  # a text is no list of letters
        (lambda client: client.cancel([5]), r"jobs\[0\]=5: a handle"),
        (lambda client: client.stop([JOB]), r"jobs\[0\]="),
        (lambda client: client.wait(JOB), "job=.*: a Handle"),
        (lambda client: client.generate("a text is no list of prompts"), "prompts="),
        (lambda client: client.session(system="x" * (9 << 20)), "system="),
        (lambda client: client.session(chat=True).generate("x" * (9 << 20)), "user="),
        (lambda client: client.control.send("pause", ["mode"]), "params="),
        (lambda client: client.control.send("pause", {1: 2}), "1="),
        (lambda client: client.submit(token_ids=[1], metadata={"a": deep(1000)}), "metadata"),
        (lambda client: client.submit(token_ids=[1], tools=deep(1000)), "tools"),
        (lambda client: client.submit(token_ids=Unprintable()), "token_ids"),
        (lambda client: client.generate([deep(1000)]), r"prompts\[0\]"),
        (lambda client: client.embed([deep(1000)]), "conversations"),
        (lambda client: client.score(Unprintable(), [[1]]), "prompt"),
    ],
)
async def test_what_is_wrong_inside_an_argument_is_named(
    client: RolloutClient, call: Callable[[RolloutClient], Any], named: str
) -> None:
    async def calls() -> None:
        found = call(client)
        if inspect.isawaitable(found):
            await found

    with pytest.raises(RolloutMQError, match=f"^{named}"):
        await calls()
