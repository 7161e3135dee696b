"""What docs/configuration.md shows works as it is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rolloutmq.messages.dialects.names import NESTED, RULES
from rolloutmq.ops.config import explain, load_settings

PAGE = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_file_shown_loads_and_the_programs_shown_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks("yaml")
    (tmp_path / "pool.yaml").write_text(shown)
    explained = explain(tmp_path / "pool.yaml", {})
    assert not explained.refused
    assert {fate.verdict for fate in explained.fates} == {"became"}
    programs = blocks("python")
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, "docs/configuration.md", "exec"), {})


def test_the_variables_shown_are_settings() -> None:
    (paragraph,) = re.findall(r"## Environment\n(.*?)\n## ", PAGE, re.DOTALL)
    variables = dict(re.findall(r"`(ROLLOUTMQ_\w+)='?([^'`]+)'?`", paragraph))
    assert len(variables) == 4
    settings = load_settings(environment={**variables, "ROLLOUTMQ_ENGINE_MODEL": "m"})
    assert (settings.engine().tp_size, settings.worker().lease_s) == (4, 5.0)
    assert settings.job()["sampling"].max_new_tokens == 512


def test_the_names_of_sampling_parameters_shown_are_known() -> None:
    (table,) = re.findall(r"## Sampling parameters.*?\| what \| names \|\n\|---\|---\|\n(.*?)\n\n", PAGE, re.DOTALL)
    names = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", table)) - {"action_mask"}
    assert len(names) > 40
    assert names <= RULES.keys() | NESTED


def test_the_memory_shown_is_what_its_arithmetic_gives() -> None:
    (table,) = re.findall(r"## How much memory\n.*?\|---\|.*?\n(.*?)\n\n", PAGE, re.DOTALL)
    usable, left = (float(number) for number in re.findall(r"\((\d+) GiB for use\), of\s+which (\d+) GiB", PAGE)[0])
    sizes = {"1.5B": (1.54e9, 1), "4B": (4.02e9, 1), "8B": (8.19e9, 1), "32B": (32.8e9, 2)}
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert len(rows) == len(sizes)
    for _, example, weights, kv, alone, tokens, staged in rows:
        parameters, gpus = sizes[example.split()[0].rstrip(":")]
        layers, heads = (int(number) for number in re.findall(r"(\d+) (?:layers|heads)", example))
        gib, per_token = 2 * parameters / gpus / 2**30, 2 * layers * heads * 128 * 2 / gpus
        assert float(weights) == round(gib, 1)
        assert float(kv) * 1024 == per_token
        assert float(alone) == round((usable - left) / usable, 2)
        fits = (float(alone) * usable - gib) * 2**30 / per_token
        assert abs(int(tokens.replace(",", "")) - fits) < 0.01 * fits
        assert staged == "-" if gpus > 1 else float(staged) == round((usable - left - gib) / usable, 2)
