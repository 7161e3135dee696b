"""The logit processors of a worker, by name.

Their code comes from the operator and from installed packages, never from a message. A job only chooses among the
names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points

from ...messages.errors import ConfigError, InvalidField, RequestRefused
from ...messages.model import LogitProcessor as Asked
from .processor import LogitProcessor

GROUP = "rolloutmq.logit_processors"
"""The group of entry points that are processors, name = "module:Class"."""
_HERE = __package__
BUILT_IN = {
    "action_mask": f"{_HERE}.token_masks:ActionMask",
    "disallowed_tokens": f"{_HERE}.token_masks:DisallowedTokens",
    "forced_tokens": f"{_HERE}.token_masks:ForcedTokens",
    "min_new_tokens": f"{_HERE}.token_masks:MinNewTokens",
    "temperature_schedule": f"{_HERE}.temperature_schedule:TemperatureSchedule",
}


def known_processors(own: Mapping[str, str] | None = None) -> list[str]:
    """Return the names that a job can use: built-in ones, those of installed packages, and the operator's `own`."""
    return sorted({**_installed(), **(own or {}), **BUILT_IN})


class Registry:
    """Finds processors by name, and loads each once.

    own: the operator's, name -> "module:Class". Raises ConfigError for a name or a form that is not allowed.
    """

    def __init__(self, own: Mapping[str, str] | None = None) -> None:
        for name in own or {}:
            if name in BUILT_IN:
                raise ConfigError(f"logit_processors={name!r}: every worker has one of that name; choose another")
        self._own = dict(own or {})
        self._where = {**_installed(), **self._own, **BUILT_IN}
        self._loaded: dict[str, LogitProcessor] = {}

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._where)

    def load_own(self) -> None:
        """Import the operator's processors, so that a mistake is an error at the start. Raises ConfigError."""
        for name in self._own:
            self.get(name)

    def get(self, name: str) -> LogitProcessor:
        """Return a processor. Raises KeyError for an unknown name, ConfigError if it cannot be loaded."""
        if name not in self._loaded:
            self._loaded[name] = _load(name, self._where[name])
        return self._loaded[name]

    def check(self, asked: Sequence[Asked], vocab_size: int, *, greedy: bool = False) -> None:
        """Check a job's processors. Raises RequestRefused, which names place, processor, value and what is allowed.

        greedy: the job's temperature is 0, which SGLang cannot change within a request.
        """
        for place, (name, params) in enumerate((each.name, each.params) for each in asked):
            field = f"logit_processors[{place}]"
            if name not in self._where:
                raise RequestRefused(f"{field}.name={name!r}: this worker has {', '.join(self.names())}")
            try:
                json.dumps(params, allow_nan=False)
                processor = type(self.get(name))
                processor.validate(params, vocab_size)
                if greedy and processor.temperature is not LogitProcessor.temperature:
                    raise RequestRefused(f"{field} {name}: sampling.temperature=0.0: above 0 for one that changes it")
            except InvalidField as error:
                raise RequestRefused(f"{field} {name}: {error}") from error
            except (TypeError, ValueError) as error:
                raise RequestRefused(f"{field} {name}: params={params!r}: what JSON can say ({error})") from error
            except ConfigError as error:
                raise RequestRefused(f"{field}: {error}") from error


def _installed() -> dict[str, str]:
    return {found.name: found.value for found in entry_points(group=GROUP)}


def _load(name: str, where: str) -> LogitProcessor:
    module, _, attribute = where.partition(":")
    try:
        found = getattr(import_module(module), attribute)
        made = found()
    except Exception as error:
        raise ConfigError(f"logit processor {name!r} ({where}) cannot be loaded: {error!r}") from error
    if not isinstance(made, LogitProcessor):
        raise ConfigError(f"logit processor {name!r} ({where}): not a subclass of {LogitProcessor.__name__}")
    return made
