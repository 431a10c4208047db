"""The shortest way from a JSON body to the function that answers it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import signature
from typing import Any, get_type_hints

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute

from dayshift.engine.server.fields import RequestBody


class BodyRoute(APIRoute):
    """A route that reads its `body` itself; parameters: `body`, `state`, `request`, and those of the path.

    FastAPI resolves dependencies of every kind, which takes longer than all else before the engine. What
    is wrong with a body, and the schema, are still its own to say: it gets every body that does not pass.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        endpoint = self.endpoint
        body_type = get_type_hints(endpoint).get("body")
        if not (isinstance(body_type, type) and issubclass(body_type, RequestBody)):
            return handle
        names = signature(endpoint).parameters.keys()

        async def respond(request: Request) -> Response:
            body = await _valid_body(request, body_type)
            if body is None:
                return await handle(request)
            given = {"body": body, "state": request.app.state.server, "request": request}
            return await endpoint(
                **{name: given[name] for name in names & given.keys()}, **request.path_params
            )

        return respond


async def _valid_body(request: Request, body_type: type[RequestBody]) -> RequestBody | None:
    """The body; None where it is not simply right."""
    if request.headers.get("content-type") != "application/json":
        return None
    content = await request.body()
    try:
        return body_type.model_validate(pydantic_core.from_json(content))
    except ValueError:  # ValidationError is one
        return None
