"""Requests made of the OpenAPI page, by schemathesis, at any server: each answer has to be one that the page describes.

PYTHONPATH=tests python -m fuzz.http_page --url http://127.0.0.1:8000 --examples 100 [--key rmq-…]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rolloutmq.ops import gateway

PAGE = Path(gateway.__file__).with_name("openapi.json")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def page() -> dict[str, Any]:
    """The page as the package has it."""
    found: dict[str, Any] = json.loads(PAGE.read_text())
    return found


def failures(url: str, examples: int, *, key: str = "", only: Collection[str] = ()) -> list[str]:
    """What is wrong with the server's answers: at most one line for each operation and kind of request.

    examples: requests of each kind. key: an API key. only: paths, all by default.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found = []
    for result in schemathesis.openapi.from_dict(page()).get_all_operations():
        operation = result.ok()
        for mode in MODES if not only or operation.path in only else ():

            @settings(
                max_examples=examples, database=None, derandomize=True, deadline=None, phases=[Phase.generate],
                suppress_health_check=[*HealthCheck],
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def conform(case: Any) -> None:
                case.call_and_validate(base_url=url, headers=headers, checks=CHECKS, timeout=60)

            try:
                conform()
            except (Failure, FailureGroup) as failure:
                found.append(f"{operation.label}, {mode.value}: {failure}")
            except Exception as error:
                # An operation that takes nothing has nothing to be wrong.
                if type(error).__name__ not in {"Unsatisfiable", "SkipTest"}:
                    raise
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.http_page", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--key", default="", help="an API key")
    options = parser.parse_args()
    found = failures(options.url, options.examples, key=options.key)
    print(*found, f"{len(found)} failures", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
