"""deploy/containers: recipes and lock files of the images, and the Compose file, as far as reading shows."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft201909Validator
from packaging.requirements import Requirement
from support.command_line import parse
from support.manifests import DEPLOY, ROOT
from support.redis.deployments import free_port, soon

from rolloutmq.ops.config import load_settings
from rolloutmq.ops.redis import embedded
from rolloutmq.ops.redis.embedded import EmbeddedRedis

FOLDER = DEPLOY / "containers"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTAINERFILES = sorted(FOLDER.glob("*.Containerfile"))


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def last(dockerfile: Path, name: str) -> str:
    return [rest for word, rest in instructions(dockerfile) if word == name][-1]


@pytest.mark.parametrize("dockerfile", CONTAINERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_special(dockerfile: Path) -> None:
    installs = " ".join(rest for word, rest in instructions(dockerfile) if word == "RUN")
    uid = re.search(r"--uid (\d+)", installs)
    assert uid
    assert last(dockerfile, "USER") == f"{uid[1]}:{uid[1]}" != "0:0"
    tini, separator, program = json.loads(last(dockerfile, "ENTRYPOINT"))
    assert (tini, separator) == ("tini", "--")
    assert "tini" in installs
    assert program in PROJECT["project"]["scripts"]
    command = json.loads(last(dockerfile, "CMD"))
    if command != ["--help"]:
        parse(command)


@pytest.mark.parametrize("dockerfile", CONTAINERFILES, ids=lambda path: path.name)
def test_a_change_of_the_source_leaves_the_dependencies_layer(dockerfile: Path) -> None:
    """They come from a lock file alone; the source comes behind them, and brings nothing."""
    steps = [rest for word, rest in instructions(dockerfile) if word in {"COPY", "RUN"}]
    source = steps.index(". /src")
    (locked,) = [number for number, step in enumerate(steps) if " -r " in step]
    assert locked < source
    assert any(step.startswith("requirements/") for step in steps[:locked])
    for step in (steps[locked], *steps[source + 1 :]):
        assert "install" not in step or "--no-deps" in step


@pytest.mark.parametrize("kind", ["client", "worker", "worker-cpu"])
def test_a_lock_file_has_all_that_the_package_asks_for(kind: str) -> None:
    """Each dependency of the extras, in a version that the package allows; with hashes where it was resolved."""
    lock = ROOT / "requirements" / f"image-{kind}.txt"
    pinned = pins(lock)
    extras = {"client": "cli,metrics,text,journal,otel"}.get(kind, "sglang,metrics,journal,otel").split(",")
    if kind != "worker-cpu":
        text = lock.read_text()
        assert all(f"--extra {extra}" in text for extra in extras)
        assert text.count("==") <= text.count("--hash=sha256:")
    for asked in wanted(extras):
        assert asked.name.lower().replace("_", "-") in pinned, asked
        assert any(asked.specifier.contains(one) for one in pinned[asked.name.lower().replace("_", "-")]), asked


def pins(lock: Path) -> dict[str, list[str]]:
    """Package -> versions; those of files that it includes, too."""
    found: dict[str, list[str]] = {}
    for line in lock.read_text().splitlines():
        if included := re.match(r"-r (\S+)", line):
            found |= pins(lock.parent / included[1])
        elif pin := re.match(r"([\w.-]+)==([^\s;]+)", line):
            found.setdefault(pin[1].lower().replace("_", "-"), []).append(pin[2])
    return found


def wanted(extras: list[str]) -> Iterator[Requirement]:
    """What the package with these extras asks for; extras of its own are followed."""
    project = PROJECT["project"]
    for text in [
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"][extra]),
    ]:
        asked = Requirement(text)
        if asked.name == project["name"]:
            yield from wanted(sorted(asked.extras))
        else:
            yield asked


def test_the_build_gets_the_whole_package_and_nothing_else() -> None:
    """By .dockerignore: the last line that matches a path decides."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]

    def sent(path: str) -> bool:
        verdict = True
        for line in lines:
            pattern = line.removeprefix("!").removeprefix("**/")
            parts = path.split("/") if line.startswith("**/") else [path.split("/", maxsplit=1)[0]]
            if any(fnmatch.fnmatch(part, pattern) for part in parts):
                verdict = line.startswith("!")
        return verdict

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    folders = {package.split(".")[1] for package in PROJECT["tool"]["setuptools"]["packages"] if "." in package}
    needed = [path for path in tracked if path.split("/")[0] in folders]
    needed += [path for path in tracked if path.startswith("requirements/")]
    needed += ["pyproject.toml", "__init__.py", "py.typed", PROJECT["project"]["readme"]]
    needed += [path for path in tracked if "/" not in path and path.endswith(".py")]
    assert [path for path in needed if not sent(path)] == []
    for path in (".git/config", ".venv/bin/python", "tests/conftest.py", "deploy/example/secrets/worker", "docs/x.md"):
        assert not sent(path), path


def complaints(document: dict[str, Any]) -> list[str]:
    schema = json.loads((Path(__file__).parent / "compose-schema.json").read_text())
    return [f"{error.json_path}: {error.message}" for error in Draft201909Validator(schema).iter_errors(document)]


def test_the_compose_file_is_valid() -> None:
    assert complaints(COMPOSE) == []
    wrong = SERVICES["exporter"] | {"read_onyl": True}
    assert complaints(COMPOSE | {"services": SERVICES | {"exporter": wrong}}) != []


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_names_exists(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        context = FOLDER / service["build"]["context"]
        assert context.resolve() == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()
    for volume in service.get("volumes", ()):
        source = volume.split(":")[0]
        assert (FOLDER / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    assert set(service.get("depends_on", ())) <= SERVICES.keys()


def test_its_commands_and_variables_are_real() -> None:
    parse(SERVICES["exporter"]["command"])
    worker = SERVICES["worker-0"]
    environment = {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in worker["environment"].items()}
    settings = load_settings(environment=environment)
    assert float(worker["stop_grace_period"].removesuffix("s")) >= settings.worker().drain_s + 30
    targets = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
    asked = [target for job in targets for static in job["static_configs"] for target in static["targets"]]
    port = SERVICES["exporter"]["command"][-1]
    assert asked == [f"127.0.0.1:{port}", f"127.0.0.1:{settings.worker().metrics_port}"]
    assert settings.engine().model == "Qwen/Qwen3-8B"
    redis = {service["environment"]["ROLLOUTMQ_REDIS"].partition("?")[0] for service in (worker, SERVICES["exporter"])}
    assert redis == {"redis://127.0.0.1:6379/0"}


def test_its_redis_starts_with_these_flags(tmp_path: Path) -> None:
    program, *flags = shlex.split(SERVICES["redis"]["command"])
    assert program == "valkey-server"
    settings = {flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    assert settings.pop("dir") == "/data" == SERVICES["redis"]["volumes"][0].split(":")[1]
    assert settings["bind"] == "127.0.0.1"
    config = {name: value or '""' for name, value in settings.items()}
    with EmbeddedRedis(directory=tmp_path, config=config, port=free_port(embedded.PORTS)) as server:
        assert soon(lambda: server.running)


def test_everything_listens_on_loopback_only() -> None:
    for name, service in SERVICES.items():
        assert service["network_mode"] == "host"
        said = json.dumps([service.get("command", ""), service.get("environment", {})])
        assert "127.0.0.1" in said, name
        assert "0.0.0.0" not in said
