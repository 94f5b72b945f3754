"""Access to the dashboard: from this machine on the loopback interface; elsewhere with a token, which a browser sends once.

The rules are those of tool servers: see `agentrl.toolserver.server.auth`.
"""

from __future__ import annotations

import hmac
import secrets
from functools import partial
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from agentrl.toolserver.server.auth import Refusal, other_origin, required_token

TOKEN_VARIABLE = "AGENTRL_VIEW_TOKEN"
"""Environment variable with the token."""
COOKIE = "agentrl_view"
LOGIN = "/login"
OPEN_PATHS = (LOGIN, "/static/login.css")
"""What needs no token: the page that asks for it."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>agentrl view</title>
<link rel="stylesheet" href="static/login.css">
</head>
<body>
<main>
<h1>agentrl view</h1>
<form method="post" action="login">
<p role="alert">{message}</p>
<label for="token">Token: the value of AGENTRL_VIEW_TOKEN at the server</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button type="submit">Open</button>
</form>
</main>
</body>
</html>
"""


def view_token(host: str) -> str | None:
    """Return the token that requests need, or None on the loopback interface without one.

    Raises:
        ConfigError: ``host`` can be reached from other machines and there is no token, or it can be guessed.
    """
    return required_token(None, host, key=None, variable=TOKEN_VARIABLE)


class Access:
    """Who may use the dashboard.

    Args:
        token: see `view_token`.
    """

    def __init__(self, token: str | None) -> None:
        self._token = token
        # Another value in each process: a cookie is worth nothing after a restart, and does not give the token away.
        self._cookie = secrets.token_hex(32)

    @property
    def refusal(self) -> Refusal:
        """Return what refuses requests."""
        return partial(other_origin, setting=TOKEN_VARIABLE) if self._token is None else self._refuse

    def _refuse(self, path: str, headers: Headers) -> Response | None:
        if path in OPEN_PATHS or self._has_cookie(headers) or self._has_token(headers):
            return None
        if path == "/":
            return RedirectResponse("login", 303)
        error = f"this server requires the header 'Authorization: Bearer TOKEN' with the token of {TOKEN_VARIABLE}"
        return JSONResponse({"error": error}, 401, headers={"WWW-Authenticate": "Bearer"})

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, sent_token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._is_token(sent_token.strip())

    def _is_token(self, text: str) -> bool:
        return self._token is not None and hmac.compare_digest(text.encode(), self._token.encode())

    def _has_cookie(self, headers: Headers) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self._cookie.encode())

    async def login(self, request: Request) -> Response:
        """Ask for the token; with the right one the browser gets a cookie, which scripts and other sites cannot use."""
        if request.method == "GET":
            return Response(_PAGE.format(message=""), media_type="text/html")
        form = parse_qs((await request.body()).decode("utf-8", "replace"))
        if not self._is_token(form.get("token", [""])[0]):
            return Response(_PAGE.format(message="This is not the token."), 401, media_type="text/html")
        response = RedirectResponse("./", 303)
        response.set_cookie(
            COOKIE, self._cookie, httponly=True, samesite="strict", secure=request.url.scheme == "https", path="/"
        )
        return response
