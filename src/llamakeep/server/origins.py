"""Which pages may ask from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

LOCALHOST = "localhost"
"""Among origins: all pages of this machine, at whatever port."""
_METHODS = ("GET", "POST", "DELETE", "OPTIONS")
_LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"


class Origins(CORSMiddleware):
    """Lets pages of some origins ask.

    A page of another origin is not told so with an error, but by the header that is not there, as
    in llama-server: its browser does the rest.

    Args:
        app: What comes after.
        origins: As browsers name them; `*` for all, `localhost` for those of this machine.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=[each for each in origins if each != LOCALHOST],
            allow_origin_regex=_LOCAL if LOCALHOST in origins else None,
            allow_methods=_METHODS,
            allow_headers=["*"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a browser that asks whether a page may ask."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        return Response(headers={"Vary": response.headers["Vary"]})
