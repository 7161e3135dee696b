"""A server that does what an OpenAPI page says and nothing else: bodies are checked, and examples are answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rolloutmq.ops.http import Refused, error_handlers


def page_application(page: Mapping[str, Any]) -> Starlette:
    """Answers with 400 what is no body of the page, and with the first answer of the page everything else."""
    routes = []
    for path, item in page["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                routes.append(Route(path, _endpoint(page, operation), methods=[method.upper()]))
    handlers = error_handlers()
    del handlers[HTTPException]  # a path that is missing here is not to look like a model that is
    return Starlette(routes=routes, exception_handlers=handlers)


def validator(page: Mapping[str, Any], schema: Mapping[str, Any]) -> Draft202012Validator:
    """For a schema of the page, whose references lead into the page."""
    return Draft202012Validator({**schema, "components": page["components"]})


def _endpoint(page: Mapping[str, Any], operation: Mapping[str, Any]) -> Callable[[Request], Any]:
    status, answer = next(iter(operation["responses"].items()))
    kind = next(iter(answer.get("content", {})), "application/json")
    content = answer.get("content", {}).get(kind, {})
    example = content.get("example", page if operation["operationId"] == "page" else None)
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")

    async def endpoint(request: Request) -> Response:
        if schema is not None:
            try:
                body = json.loads(await request.body())
                wrong = next(validator(page, schema).iter_errors(body), None)
            except (ValueError, RecursionError):
                wrong = "no JSON"
            if wrong is not None:
                raise Refused(400, "invalid", "The body is not as the page has it.")
        if not status.startswith("2"):
            raise Refused(403, "RouteBlocked", "Not from here.")
        return JSONResponse(example) if "json" in kind else Response(example, media_type=kind)

    return endpoint
