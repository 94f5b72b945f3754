"""Services that others run, reached over HTTP, and models behind them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, field_validator, model_validator

from agentrl.config.base import Seconds, Section

_Json = dict[str, Any]


class ServiceConfig(Section):
    """A service that others run. Proxies of the environment (``HTTPS_PROXY``) are used, except for addresses of this machine."""

    url: str
    """Address of the service."""
    api_key: str | None = None
    """Sent as bearer token."""
    api_key_env: str | None = None
    """Environment variable with the bearer token, in place of ``api_key``."""
    timeout_s: Seconds = 300.0
    """Seconds until an attempt at a request counts as lost."""
    connect_timeout_s: Seconds = 10.0
    """Seconds until a connection must be open."""
    read_timeout_s: Seconds | None = None
    """Seconds without a byte of the reply after which an attempt counts as lost; null: ``timeout_s``."""
    attempts: PositiveInt = 4
    """Attempts at a request: it is sent again after a lost connection, a time-out, and HTTP 408, 409, 425, 429, 5xx but 501."""
    max_wait_s: Seconds = 60.0
    """Longest wait before a further attempt. Waits begin at a second, are doubled each time, and are random; the service may
    request another one (``Retry-After``). If that is longer, the request has failed."""
    concurrency: PositiveInt = 64
    """Requests at the same time, in each process of the run."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} does not begin with http:// or https://; write http://HOST:PORT/v1")
        try:
            host = urlsplit(url).port is None or urlsplit(url).hostname  # reading the port checks it
        except ValueError as error:
            raise ValueError(f"{url!r} is no address: {error}") from None
        if not host or not urlsplit(url).hostname:
            raise ValueError(f"{url!r} names no host; write http://HOST:PORT/v1")
        if urlsplit(url).query or urlsplit(url).fragment:
            raise ValueError(f"{url!r} has a query or a fragment; leave out what follows the path")
        return url

    @model_validator(mode="after")
    def _has_one_key(self) -> ServiceConfig:
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError(f"api_key and api_key_env={self.api_key_env} are both set; leave out one")
        return self


class ChatModelConfig(ServiceConfig):
    """A model that speaks OpenAI's chat completions."""

    url: str
    """Address up to ``/v1``; requests go to ``URL/chat/completions``."""
    model: str
    """Name of the model at the endpoint."""
    send_reasoning: bool = True
    """Send the reasoning that the endpoint returned (``reasoning_content``, ``reasoning``) back with the conversation; ``false``
    for endpoints that refuse it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, such as ``{reasoning_effort: low}``. Null leaves a field out, such as ``{seed: null}``."""

    @field_validator("url")
    @classmethod
    def _is_base(cls, url: str) -> str:
        if url.rstrip("/").endswith("/chat/completions"):
            raise ValueError(f"{url!r} is the address of one route; leave out /chat/completions")
        return url

    @field_validator("options")
    @classmethod
    def _leaves_fields(cls, options: _Json) -> _Json:
        for name in ("messages", "tools", "stream", "n"):
            if name in options:
                raise ValueError(f"options.{name}={options[name]!r:.80}: agentrl sets this field; leave it out")
        return options


class EndpointConfig(ChatModelConfig):
    """A model that speaks OpenAI's chat completions and plays agents of an environment."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    max_new_tokens: PositiveInt = 256
    """Most tokens of a turn."""
