"""The HTTP client of services that others run: limits, retries, time-outs, and errors that name the key to change.

Engines and tool servers of a run have their own clients, for thousands of requests at the same time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from agentrl.config.secret_values import hide_secrets
from agentrl.config.services import ServiceConfig
from agentrl.core.errors import ConfigError, ServiceError, ServiceRefusedError

T = TypeVar("T")
Json = dict[str, Any]

REPLY_BYTES = 64 * 2**20
"""Bytes of the largest reply."""
_AGAIN = {408, 409, 425, 429}
"""Statuses, next to 5xx but 501, after which a request is sent again."""
_NOT_IMPLEMENTED = 501
_SHOWN = 300
"""Characters of a reply in a message."""
_TITLE = re.compile(r"<title[^>]*>\s*(.*?)\s*</title", re.IGNORECASE | re.DOTALL)


class UnusableReplyError(Exception):
    """Raised by a function that reads replies: the reply is not what was requested.

    Args:
        fault: what is wrong with it, for the message.
        again: whether the same request can succeed.
    """

    def __init__(self, fault: str, *, again: bool = False) -> None:
        super().__init__(fault)
        self.fault = fault
        self.again = again


class _AttemptFailedError(Exception):
    """An attempt at a request failed, and the next one can succeed."""

    def __init__(self, fault: str, wait_s: float | None = None) -> None:
        """Keep what happened, and the wait that the service requests."""
        super().__init__(fault)
        self.fault = fault
        self.wait_s = wait_s


@dataclass(slots=True)
class ServiceCounters:
    """What a client has done."""

    requests: int = 0
    """Requests that were sent, those sent again included."""
    retries: int = 0
    """Those that were sent again."""
    failures: int = 0
    """Requests without a usable reply after all attempts."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request, which may be sent several times."""

    method: str
    path: str
    content: bytes | None = None
    cookies: dict[str, str] | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers that are not the same for all requests."""
        cookies = "; ".join(f"{name}={value}" for name, value in (self.cookies or {}).items())
        return {"cookie": cookies} if cookies else {}


class ServiceClient:
    """Sends requests to one service, some at the same time. Connections stay open while it is entered (``async with``).

    Args:
        config: address, key and limits.
        key: configuration key of ``config``, for messages.
        backoff_s: seconds before the second attempt; doubled before each further one, and at random down to half of it.
        sleep: waits.
    """

    def __init__(
        self,
        config: ServiceConfig,
        key: str,
        *,
        backoff_s: float = 1.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.counters = ServiceCounters()
        """What it has done so far."""
        self._config = config
        self._key = key
        self._backoff_s = backoff_s
        self._sleep = sleep
        self._url = config.url.rstrip("/")
        self._users = 0  # contexts that are entered
        self._http: httpx.AsyncClient
        self._slots: asyncio.Semaphore
        self._not_before = 0.0  # monotonic time until which the service requests silence

    async def __aenter__(self) -> ServiceClient:
        """Keep connections open until the exit; contexts may overlap."""
        if not self._users:
            config = self._config
            timeout = httpx.Timeout(config.timeout_s, connect=config.connect_timeout_s, read=config.read_timeout_s)
            token = read_token(config, self._key)
            uses_proxies = not is_loopback(self._url)
            uses_tls = uses_proxies or self._url.startswith("https:")  # of a proxy, too
            headers = {"content-type": "application/json", "user-agent": "agentrl"}
            self._http = httpx.AsyncClient(
                headers=headers if token is None else {**headers, "authorization": f"Bearer {token}"},
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # sessions are those of the callers
                timeout=timeout,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency),
                trust_env=uses_proxies,
                verify=_tls_context() if uses_tls else False,
            )
            self._slots = asyncio.Semaphore(config.concurrency)
        self._users += 1
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the connections with the last context."""
        self._users -= 1
        if not self._users:
            await self._http.aclose()

    async def post(
        self,
        path: str,
        body: Json,
        read: Callable[[object], T],
        *,
        about: str = "",
        cookies: dict[str, str] | None = None,
    ) -> T:
        """Send a JSON object, again where that can help, and return what ``read`` makes of the reply's JSON.

        Args:
            path: below the address.
            body: JSON-able.
            read: raises `UnusableReplyError` if the reply is not what was requested.
            about: stands behind the address in messages.
            cookies: of a session; they are sent, and those of the reply are added. No others are kept.

        Raises:
            ServiceRefusedError: the service refused the request, and would again.
            ServiceError: there is no usable reply after all attempts.
        """
        content = json.dumps(body, allow_nan=False).encode()
        return await self._request(_Request("POST", path, content, cookies), read, about)

    async def get(self, path: str, read: Callable[[object], T], *, about: str = "") -> T:
        """Request a JSON value; see `post`."""
        return await self._request(_Request("GET", path), read, about)

    async def exchange(self, path: str, body: Json, *, cookies: dict[str, str] | None = None) -> tuple[int, str]:
        """Send a JSON object once, such as a call with effects; return status and text of the reply, whatever they are.

        Raises:
            ServiceError: there is no reply.
        """
        content = json.dumps(body, allow_nan=False).encode()
        async with self, self._slots:
            self.counters.requests += 1
            try:
                reply, text = await self._send(_Request("POST", path, content, cookies))
            except _AttemptFailedError as error:
                self.counters.failures += 1
                raise ServiceError(hide_secrets(f"{self._url}{path}: {error.fault}")) from None
        return reply.status_code, text

    async def _request(self, request: _Request, read: Callable[[object], T], about: str) -> T:
        subject = hide_secrets(f"{self._url}{request.path}{about}")
        async with self, self._slots:
            try:
                return await self._attempts(request, read, subject)
            except (ServiceError, UnusableReplyError) as error:
                self.counters.failures += 1
                if isinstance(error, UnusableReplyError):
                    raise ServiceError(f"{subject}: {hide_secrets(error.fault)}") from None
                raise

    async def _attempts(self, request: _Request, read: Callable[[object], T], subject: str) -> T:
        config, number = self._config, 1
        while True:
            if (silence := self._not_before - time.monotonic()) > 0:
                await self._sleep(silence)
            self.counters.requests += 1
            try:
                return read(await self._attempt(request, subject))
            except UnusableReplyError as error:
                if not error.again:
                    raise
                fault, requested = error.fault, None
            except _AttemptFailedError as error:
                fault, requested = error.fault, error.wait_s
            if number == config.attempts:
                times = "" if number == 1 else f", at the last of {number} attempts"
                raise ServiceError(f"{subject}: {hide_secrets(fault)}{times}")
            if requested is not None and requested > config.max_wait_s:
                raise ServiceError(
                    f"{subject}: {hide_secrets(fault)}; it requests a wait of {requested:g} s, and "
                    f"{self._key}.max_wait_s={config.max_wait_s:g}"
                )
            number += 1
            self.counters.retries += 1
            if requested is not None:
                self._not_before = max(self._not_before, time.monotonic() + requested)
            backoff = min(self._backoff_s * 2.0 ** min(number - 2, 32), config.max_wait_s)
            await self._sleep(max(requested or 0.0, backoff * random.uniform(0.5, 1.0)))

    async def _send(self, request: _Request) -> tuple[httpx.Response, str]:
        """Send a request once; return the reply, whatever its status, and its text. Cookies of the reply are kept.

        Raises:
            _AttemptFailedError: there is none; the next attempt can succeed.
        """
        config, key = self._config, self._key
        try:
            async with (
                asyncio.timeout(config.timeout_s),
                self._http.stream(
                    request.method, self._url + request.path, content=request.content, headers=request.headers()
                ) as reply,
            ):
                text = (await _read_body(reply)).decode("utf-8", "replace")
        except TimeoutError:
            raise _AttemptFailedError(f"no reply within {key}.timeout_s={config.timeout_s:g}") from None
        except httpx.ConnectTimeout:
            fault = f"no connection within {key}.connect_timeout_s={config.connect_timeout_s:g}"
            raise _AttemptFailedError(fault) from None
        except httpx.TimeoutException as error:
            silence = config.read_timeout_s or config.timeout_s
            name = "read_timeout_s" if config.read_timeout_s is not None else "timeout_s"
            raise _AttemptFailedError(f"no byte within {key}.{name}={silence:g} ({type(error).__name__})") from None
        except httpx.ConnectError as error:
            fault = (
                f"no connection ({error or type(error).__name__}); is {key}.url={config.url} right, and does it run?"
            )
            raise _AttemptFailedError(fault) from None
        except httpx.HTTPError as error:
            raise _AttemptFailedError(f"the connection was lost ({type(error).__name__}: {error})") from None
        if request.cookies is not None:
            request.cookies.update(reply.cookies)
        return reply, text

    async def _attempt(self, request: _Request, subject: str) -> object:
        """Send the request once, and return the reply's JSON.

        Raises:
            _AttemptFailedError: the next attempt can succeed.
            ServiceRefusedError: it cannot.
        """
        reply, text = await self._send(request)
        if reply.is_success:
            return self._read_json(text, subject)
        fault = f"HTTP {reply.status_code}: {_error_text(text) or reply.reason_phrase}"
        again = reply.headers.get("x-should-retry", "").lower()  # as the services of OpenAI and Anthropic have it
        retryable = reply.status_code in _AGAIN or (reply.status_code >= 500 and reply.status_code != _NOT_IMPLEMENTED)
        if again == "true" or (retryable and again != "false"):
            raise _AttemptFailedError(f"{fault}{self._hint(reply)}", _requested_wait(reply))
        raise ServiceRefusedError(f"{subject}: {hide_secrets(fault)}{self._hint(reply)}", reply.status_code)

    def _read_json(self, text: str, subject: str) -> object:
        if text.lstrip()[:1] == "<":
            raise ServiceRefusedError(
                f"{subject}: the reply is {_error_text(text)}, and no JSON; is {self._key}.url={self._config.url} right?"
            )
        try:
            value: object = json.loads(text)
            return value
        except (ValueError, RecursionError) as error:
            raise _AttemptFailedError(f"the reply is no JSON ({error}): {text[:_SHOWN]!r}") from None

    def _hint(self, reply: httpx.Response) -> str:
        """Return which keys to change after an error of the service."""
        key, config = self._key, self._config
        has_token = config.api_key is not None or config.api_key_env is not None
        if reply.status_code in (401, 403):
            key_name = "api_key_env" if config.api_key_env is not None else "api_key"
            source = f"{config.api_key_env!r}" if config.api_key_env is not None else "<redacted>"
            sent = f"{key}.{key_name}={source} was sent" if has_token else "no key was sent"
            return f"; {sent}: set {key}.api_key_env to the variable with a valid one"
        if reply.status_code == 429:
            return f"; {key}.concurrency={config.concurrency} limits requests at the same time"
        if 300 <= reply.status_code < 400:
            return f"; it redirects to {hide_secrets(reply.headers.get('location', 'nowhere'))!r:.200}: set {key}.url to that"
        if reply.status_code in (404, 405):
            return f"; is {key}.url={config.url} right?"
        return ""


@lru_cache(maxsize=1)
def _tls_context() -> ssl.SSLContext:
    """Return the certificates of this machine; reading them takes a while."""
    return httpx.create_ssl_context()


async def _read_body(reply: httpx.Response) -> bytes:
    """Return the body of a reply.

    Raises:
        _AttemptFailedError: it is larger than `REPLY_BYTES`.
    """
    content = bytearray()
    async for chunk in reply.aiter_bytes():
        content += chunk
        if len(content) > REPLY_BYTES:
            raise _AttemptFailedError(f"the reply has more than {REPLY_BYTES // 2**20} MiB")
    return bytes(content)


def read_token(config: ServiceConfig, key: str) -> str | None:
    """Return the bearer token of a service; None if it has none.

    Raises:
        ConfigError: the variable that should have it is not set, or it cannot be sent.
    """
    name, token = "api_key", config.api_key
    if config.api_key_env is not None:
        name, token = f"api_key_env={config.api_key_env}", os.environ.get(config.api_key_env)
        if not token:
            raise ConfigError(f"{key}.{name}: the environment has no variable of this name, or it is empty")
    token = None if token is None else token.strip()
    if token is not None and (not token or not token.isascii() or not token.isprintable()):
        raise ConfigError(f"{key}.{name}: the key is empty, or has characters that no key has")
    return token


def is_loopback(url: str) -> bool:
    """Return whether an address is of this machine, for which proxies are not used."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _requested_wait(reply: httpx.Response) -> float | None:
    """Return the seconds after which a service wants the request again; None if it names none."""
    headers = reply.headers
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if name not in headers:
            continue
        try:
            return max(0.0, float(headers[name]) * unit)
        except ValueError:
            pass
        try:
            return max(0.0, parsedate_to_datetime(headers[name]).timestamp() - time.time())
        except ValueError:
            continue
    return None


def _error_text(text: str) -> str:
    """Return the message in a reply, from whichever field holds it; of a page of HTML its title."""
    if text.lstrip()[:1] == "<":
        title = _TITLE.search(text)
        return f"a page of HTML or XML{f', {title[1][:100]!r}' if title else ''}"
    try:
        message = json.loads(text)
        for name in ("error", "message", "detail"):
            message = message.get(name, message) if isinstance(message, dict) else message
    except (ValueError, RecursionError):
        message = text
    shown = message if isinstance(message, str) else json.dumps(message)
    return " ".join(shown.split())[:_SHOWN]
