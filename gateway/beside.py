"""The web console beside the REST API, in one process and at one address. A path belongs to one of them, and neither
knows of the other: the REST API takes no cookie, the console no token of a header."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

REST_PATHS = ("/v1", "/openapi.json", "/metrics", "/livez", "/readyz")
"""What they begin with; all others are the console's."""


def of_rest(path: str) -> bool:
    """Whether the REST API answers this path."""
    return any(path == begin or path.startswith(f"{begin}/") for begin in REST_PATHS)


def beside(rest: ASGIApp, console: ASGIApp) -> ASGIApp:
    """Both as one application, without a lifespan."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (rest if of_rest(scope["path"]) else console)(scope, receive, send)

    return app
