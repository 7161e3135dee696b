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
