"""Properties of versions for a bisect: replays, scores, metrics of a journal, and functions of the user's."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ....messages.errors import InvalidField
from ....sync.disk import NoSuchSnapshot
from .. import Recorded, Settings, Verdict
from .bisect import Broken


def by_version(samples: Iterable[Recorded], each: int | None = None) -> dict[int, list[Recorded]]:
    """The samples of which a version sampled any token, at most `each` of each worker; None takes all."""
    found: dict[int, dict[str, list[Recorded]]] = {}
    for one in samples:
        for version in {span.version for span in one.spans()}:
            of_worker = found.setdefault(version, {}).setdefault(one.result.worker_id, [])
            if each is None or len(of_worker) < each:
                of_worker.append(one)
    return {version: [one for of in workers.values() for one in of] for version, workers in sorted(found.items())}


def replays(
    samples: Mapping[int, Sequence[Recorded]], verdicts: Callable[[Sequence[Recorded]], list[Verdict]]
) -> Broken:
    """Broken if a sample differs, and first where that version sampled it. verdicts: generates or scores samples."""

    def broken(version: int) -> bool | None:
        found = verdicts(samples[version])
        if any(one.state == "differs" and one.version in (version, None) for one in found):
            return True
        return False if any(one.state == "same" for one in found) else None

    return broken


def metric(samples: Mapping[int, Sequence[Recorded]], name: str, below: str) -> Broken:
    """Broken if the mean of a fact, such as the reward that was noted, is below a number. Raises InvalidField for what
    is no finite number, and if no sample has the fact as a number."""
    try:
        limit = float(below)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise InvalidField("--by", f"{name}<{below}", "a finite number behind <")

    def numbers(version: int) -> list[float]:
        facts = (one.facts().get(name) for one in samples[version])
        return [float(one) for one in facts if isinstance(one, int | float) and math.isfinite(one)]

    if not any(numbers(version) for version in samples):
        raise InvalidField("--by", name, "the name of a number that samples have: of a fact, a note or metadata")

    def broken(version: int) -> bool | None:
        found = numbers(version)
        return float(np.mean(found)) < limit if found else None

    return broken


def users(samples: Mapping[int, Sequence[Recorded]], settings: Settings, name: str) -> Broken:
    """Broken if a function of the user's, MODULE:FUNCTION(samples, weights_path) -> bool, says that a property does not
    hold: of the samples that a version sampled, and of the folder of its weights. A version without a folder cannot be
    told. What the function raises is an InvalidField that names the version."""
    function = user_function("--by", name)

    def broken(version: int) -> bool | None:
        try:
            path = settings.path_of(version)
        except NoSuchSnapshot:
            return None
        try:
            holds = function(list(samples[version]), path)
        except (Exception, SystemExit) as error:
            raise InvalidField("--by", name, f"a function that takes version {version}: {error!r}") from error
        if not isinstance(holds, bool | np.bool_):
            raise InvalidField("--by", name, f"a function that returns True or False; version {version}: {holds!r}")
        return not holds

    return broken


def user_function(option: str, name: str) -> Callable[..., Any]:
    """The function MODULE:FUNCTION. The current folder is searched, too. Raises InvalidField."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise InvalidField(option, name, "MODULE:FUNCTION")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # of the user's module: whatever importing it raises
        raise InvalidField(option, name, f"a function that can be imported: {error!r}") from error
    if not callable(found):
        raise InvalidField(option, name, f"a function, not {type(found).__name__}")
    function: Callable[..., Any] = found
    return function
