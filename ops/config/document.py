"""A configuration file as plain data: YAML, TOML or JSON."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from ...messages.errors import ConfigError, InvalidField
from ..files import read

MOST_BYTES = 1 << 20
MOST_VALUES = 100_000
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$")
"""Numbers such as 1e-6: YAML 1.1 takes them for text, OmegaConf and their authors for numbers."""


def read_document(path: Path) -> dict[str, Any]:
    """The mapping in a file. The suffix tells its language: .yaml, .yml, .json or .toml.

    Raises ConfigError, which names the file, if it cannot be read, has another suffix, holds no mapping, or has a key
    that is given twice or is no text; also if PyYAML is needed and not installed.
    """
    try:
        text = read("file", path, most=MOST_BYTES).decode()
    except InvalidField as error:
        raise ConfigError(f"{path}: {error.allowed}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    suffix = path.suffix.lower()
    if suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: no TOML, or nested too deep: {error}") from error
    if suffix not in {".yaml", ".yml", ".json"}:
        raise ConfigError(f"{path}: suffix {suffix!r}: .yaml, .yml, .json or .toml is needed")
    found = _json(path, text) if suffix == ".json" else _yaml(path, text)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a mapping is needed, this is {type(found).__name__}")
    _check_size(path, found)
    return found


def _check_size(path: Path, document: dict[str, Any]) -> None:
    """Refuse a file whose aliases name parts of it over and over: a few lines can stand for billions of values."""
    seen, ahead = 0, [iter(document.values())]
    while ahead:
        for value in ahead[-1]:
            seen += 1
            if isinstance(value, dict | list):
                ahead.append(iter(value.values() if isinstance(value, dict) else value))
                break
        else:
            ahead.pop()
        if seen > MOST_VALUES or len(ahead) > MOST_VALUES:
            raise ConfigError(f"{path}: more than {MOST_VALUES:,} values, with aliases (*name) counted each time")


def _json(path: Path, text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ConfigError(f"{path}: {next(name for name in names if names.count(name) > 1)!r} is given twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: no JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of more digits than Python reads
        raise ConfigError(f"{path}: nested too deep, or a number too long: {error}") from error


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # noqa: PLC0415 – only who has a YAML file needs PyYAML
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path}: PyYAML is needed for YAML: pip install 'rolloutmq[cli]', or write TOML") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Plain data only; numbers as OmegaConf reads them; no key twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            own = {id(key) for key, _ in node.value}
            self.flatten_mapping(node)  # puts what << names before the mapping's own keys, which win
            found: dict[Any, Any] = {}
            seen: set[str] = set()
            for key_node, value_node in node.value:
                key = self.construct_object(key_node, deep=True)
                line = key_node.start_mark.line + 1
                if not isinstance(key, str):
                    raise ConfigError(f"{path}:{line}: key {key!r}: keys are text, put it in quotes")
                if id(key_node) in own:
                    if key in seen:
                        raise ConfigError(f"{path}:{line}: {key!r} is given twice")
                    seen.add(key)
                found[key] = self.construct_object(value_node, deep=True)
            return found

        def construct_yaml_map(self, node: Any) -> Any:
            return self.construct_mapping(node, deep=True)

    Loader.add_constructor("tag:yaml.org,2002:map", Loader.construct_yaml_map)
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(
            f"{where}: no YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"
        ) from error
    except (ValueError, RecursionError) as error:  # a date that there is not, a number of more digits than Python reads
        raise ConfigError(f"{path}: nested too deep, inside itself, or a value that cannot be: {error}") from error
