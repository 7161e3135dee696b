"""Configuration files as data, and values in them that point elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.messages.errors import ConfigError
from rolloutmq.ops.config.document import read_document
from rolloutmq.ops.config.interpolation import CannotResolve, Resolver


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "worker: {pool: p, lease_s: 2.5}\nengine: {cuda_graph: no}\n"),
        ("a.yml", "worker:\n  pool: p\n  lease_s: 2.5\nengine:\n  cuda_graph: false\n"),
        ("a.toml", '[worker]\npool = "p"\nlease_s = 2.5\n[engine]\ncuda_graph = false\n'),
        ("a.json", '{"worker": {"pool": "p", "lease_s": 2.5}, "engine": {"cuda_graph": false}}'),
    ],
)
def test_one_configuration_in_every_language(tmp_path: Path, name: str, text: str) -> None:
    found = read_document(write(tmp_path / name, text))
    assert found == {"worker": {"pool": "p", "lease_s": 2.5}, "engine": {"cuda_graph": False}}


def test_numbers_are_read_as_omegaconf_reads_them(tmp_path: Path) -> None:
    found = read_document(write(tmp_path / "a.yaml", "a: 1e-6\nb: 5.0e-6\nc: 3E4\nd: 1_000\ne: 1e\nf: 7\n"))
    assert found == {"a": 1e-6, "b": 5e-6, "c": 3e4, "d": 1000, "e": "1e", "f": 7}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "worker: {pool: a}\nengine: {}\nworker: {pool: b}\n", "a.yaml:3: 'worker' is given twice"),
        ("a.yaml", "1: x\n", "a.yaml:1: key 1"),
        ("a.yaml", "- x\n", "a mapping is needed"),
        ("a.yaml", "a: [1\n", "a.yaml:2: no YAML"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]\n", "no YAML"),
        ("a.yaml", "a: &x {b: *x}\n", "no YAML"),
        ("a.toml", "a = \n", "no TOML"),
        ("a.ini", "a = 1\n", "suffix '.ini'"),
        ("a.json", '{"a": 1,\n"b": }', "a.json:2: no JSON"),
        ("a.json", '{"a": {"b": 1, "b": 2}}', "'b' is given twice"),
        ("a.yaml", "a: {<<: {b: 1}, c: 1, c: 2}\n", "a.yaml:1: 'c' is given twice"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.") as caught:
        read_document(write(tmp_path / name, text))
    assert says in str(caught.value)


def test_a_mapping_wins_over_what_it_merges(tmp_path: Path) -> None:
    text = "base: &base {a: 1, b: 2}\nmore: &more {b: 3, c: 4}\nall:\n  <<: [*base, *more]\n  a: 5\n"
    assert read_document(write(tmp_path / "a.yaml", text))["all"] == {"a": 5, "b": 2, "c": 4}


def test_json_is_read_as_json(tmp_path: Path) -> None:
    text = '{\n\t"a": "\\ud83d\\ude00",\n\t"b": 1e-6\n}'
    assert read_document(write(tmp_path / "a.json", text)) == {"a": "\U0001f600", "b": 1e-6}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: must be a file that can be read"):
        read_document(tmp_path / "none.yaml")


def test_without_pyyaml_a_yaml_file_is_told_what_it_needs_and_toml_works(tmp_path: Path) -> None:
    yaml, toml = write(tmp_path / "a.yaml", "a: 1"), write(tmp_path / "a.toml", "[engine]\nmodel = '${oc.env:M,m}'")
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "from pathlib import Path\n"
        "from rolloutmq.ops.config import load_settings\n"
        "print(load_settings(Path(sys.argv[2]), environment={}).engine().model)\n"
        "load_settings(Path(sys.argv[1]), environment={})"
    )
    command = [sys.executable, "-c", code, str(yaml), str(toml)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.stdout == "m\n"
    assert "PyYAML is needed" in shown.stderr.splitlines()[-1]


DOCUMENT: dict[str, Any] = {
    "a": {"b": 3, "c": "${.b}", "d": "${..e}", "inner": {"f": "${..b}"}},
    "e": "x",
    "list": [{"g": 5}, "${a.b}"],
    "pointer": "${a}",
    "round": "${about}",
    "about": "${round}",
    "missing": "???",
}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("${a.b}", 3),
        ("${a.c}", 3),
        ("${a.d}", "x"),
        ("${a.inner.f}", 3),
        ("${list.0.g}", 5),
        ("${list}", [{"g": 5}, 3]),
        ("${pointer.b}", 3),
        ("${pointer}", {"b": 3, "c": 3, "d": "x", "inner": {"f": 3}}),
        ("at ${e}/${a.b}!", "at x/3!"),
        (r"\${e} ${e}", "${e} x"),
        ("${oc.env:HOST}", "h"),
        ("${oc.env:NONE,7}", 7),
        ("${oc.env:NONE,null}", None),
        ("${oc.env:NONE,'a,b'}", "a,b"),
        ("${oc.env:NONE,${e}}", "x"),
        ("${oc.select:a.b,9}", 3),
        ("${oc.select:a.z,9}", 9),
        ("${oc.select:a.z}", None),
        ("${oc.select:missing,false}", False),
        ("${oc.select:a.z,[]}", []),
        ("${oc.select:a.z,${oc.select:a.y, level0}}", "level0"),
        ("${a.${oc.env:KEY}}", 3),
        ("no $ here {}", "no $ here {}"),
    ],
)
def test_interpolations_lead_to_what_they_name(value: str, found: Any) -> None:
    assert Resolver(DOCUMENT, {"HOST": "h", "KEY": "b"}).value(value) == found


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("${a.z}", "this file has no a.z"),
        ("${e.f}", "this file has no e.f"),
        ("${oc.env:NONE}", "no environment variable NONE"),
        ("${now:%Y}", "only oc.env and oc.select"),
        ("${a b}", "a name such as"),
        ("${a.b", "without its }"),
        ("${round}", "comes back to itself"),
        ("${...a}", "a name such as"),
        ("${" * 3000 + "a" + "}" * 3000, "at most 32 deep"),
        ("${oc.env:" * 3000 + "a" + "}" * 3000, "at most 32 deep"),
        ("${oc.select:b," * 3000 + "a" + "}" * 3000, "at most 32 deep"),
        ("${oc.env:NONE," + "[" * 3000 + "]" * 3000 + "}", "nested too deep"),
        ("${oc.env:NONE," + "9" * 5000 + "}", "a number too long"),
    ],
)
def test_interpolations_that_lead_nowhere_are_told(value: str, says: str) -> None:
    with pytest.raises(CannotResolve, match=r".*") as caught:
        Resolver(DOCUMENT, {}).value(value)
    assert says in str(caught.value)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text().filter(lambda text: "${" not in text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(min_size=1), PLAIN, max_size=4).filter(lambda data: "${" not in json.dumps(data)))
def test_plain_data_is_left_as_it_is(data: dict[str, Any]) -> None:
    assert Resolver(data, {}).value(data) == data


@given(st.text(alphabet="${}.:ab,'[]\\ "))
def test_no_text_breaks_the_resolver(text: str) -> None:
    with suppress(CannotResolve):
        Resolver({"a": {"b": 1}}, {}).value(text)


def test_a_name_inside_of_what_another_leads_to_is_looked_for_beside_that_one() -> None:
    document = {"x": {"a": "${.other}", "other": {"b": {"c": 1}}}}
    assert Resolver(document, {}).value("${x.a.b.c}") == 1


def test_what_comes_back_to_itself_in_many_ways_is_told_at_once() -> None:
    document = {"a": {str(number): "${a}" for number in range(9)}, "b": "${b.c}${b.d}${b.e}"}
    for value in ("${a}", "${b}"):
        with pytest.raises(CannotResolve, match="comes back to itself"):
            Resolver(document, {}).value(value)
