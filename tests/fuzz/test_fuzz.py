"""The fuzz targets for a moment, always the same; and what once broke one of them."""

from __future__ import annotations

import logging

import pytest

from fuzz.cases import failure, kept, replay_line
from fuzz.targets import TARGETS

SEED = 20
CASES = 50


@pytest.fixture(autouse=True)
def quiet() -> object:
    """The decoders name what they find; here that would be thousands of lines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
async def test_what_is_broken_at_random_raises_nothing_unexpected(name: str) -> None:
    for number in range(CASES):
        error = await failure(name, SEED, number)
        assert error is None, f"{error}\nreplay it with: {replay_line(name, SEED, number)}"


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in TARGETS for number in range(len(kept(name)))])
async def test_what_once_broke_a_decoder_does_not_any_more(name: str, number: int) -> None:
    await TARGETS[name].run(kept(name)[number])
