"""Who may use a tool server."""

import pytest
from starlette.types import Message

from agentrl.config.toolserver import ServerConfig
from agentrl.core.errors import ConfigError
from agentrl.toolserver.request_limits import TOKEN_VARIABLE
from agentrl.toolserver.server.app import make_app
from agentrl.toolserver.server.auth import (
    Guard,
    Refusal,
    is_loopback,
    other_origin,
    server_token,
    token_required,
)
from tests.unit.toolserver.fake_hosts import FakeTool, app_client, echo, in_loop, make_sessions


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("0:0:0:0:0:0:0:1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("127.1", False),
        ("example.org", False),
    ],
)
def test_what_only_this_machine_can_reach(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org"])
def test_off_the_loopback_there_is_no_server_without_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"server.token, or {TOKEN_VARIABLE}"):
        server_token(ServerConfig(), host)
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    with pytest.raises(ConfigError):
        server_token(ServerConfig(), host)
    monkeypatch.setenv(TOKEN_VARIABLE, "of the environment".replace(" ", "-"))
    assert server_token(ServerConfig(), host) == "of-the-environment"
    assert server_token(ServerConfig(token="of-the-configuration"), host) == "of-the-configuration"


def test_on_the_loopback_a_token_is_asked_for_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert server_token(ServerConfig(), "127.0.0.1") is None
    monkeypatch.setenv(TOKEN_VARIABLE, "t" * 16)
    assert server_token(ServerConfig(), "127.0.0.1") == "t" * 16


@pytest.mark.parametrize(
    "token", ["", "with a space in it", "with a line\nbreak", "Schlüssel-des-Servers", "t", "t" * 15, "t" * 1025]
)
def test_a_token_that_can_be_in_no_header_or_can_be_guessed(token: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.token"):
        server_token(ServerConfig(token=token), "127.0.0.1")


ROUTES = [
    ("POST", "/sessions"),
    ("POST", "/sessions/x/call"),
    ("DELETE", "/sessions/x"),
    ("GET", "/tools"),
    ("GET", "/metrics"),
    ("GET", "/mcp"),
    ("GET", "/no-such-path"),
    ("GET", "/health/"),
    ("GET", "/mcp/health"),
]
WRONG = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer wrong",
    "Bearer secre",
    "Bearer secret2",
    "Basic secret",
    "secret",
    "Bearer ä",
]


@pytest.mark.parametrize("header", WRONG)
@in_loop
async def test_without_the_token_there_is_only_health(header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    async with app_client(make_app(make_sessions(FakeTool(echo)), token="secret"), headers=headers) as client:
        for method, path in ROUTES:
            reply = await client.request(method, path)
            assert reply.status_code == 401, (method, path)
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "error" in reply.json()
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("header", ["Bearer secret", "bearer secret", "BEARER  secret "])
@in_loop
async def test_with_the_token(header: str) -> None:
    app = make_app(make_sessions(FakeTool(echo)), token="secret")
    async with app_client(app, headers={"authorization": header}) as client:
        for method, path in ROUTES:
            assert (await client.request(method, path)).status_code != 401, (method, path)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8300", 200),
        ("http://[::1]:8300", 200),
        ("https://example.org", 403),
        ("http://localhost.example.org", 403),
        ("null", 403),
        ("", 403),
    ],
)
@in_loop
async def test_without_a_token_pages_from_elsewhere_are_refused(origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"origin": origin}
    async with app_client(make_app(make_sessions()), headers=headers) as client:
        assert (await client.post("/sessions")).status_code == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8300", 200),
        ("localhost:8300", 200),
        ("LOCALHOST", 200),
        ("[::1]:8300", 200),
        ("example.org:8300", 403),
        ("localhost.example.org", 403),
        ("example.org@localhost.example.org", 403),
        ("10.0.0.1:8300", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
@in_loop
async def test_without_a_token_a_name_that_resolves_to_the_loopback_is_refused(host: str, status: int) -> None:
    """DNS rebinding: a GET of a page from that name has no Origin."""
    async with app_client(make_app(make_sessions()), headers={"host": host}) as client:
        for path in ("/health", "/tools", "/metrics"):
            assert (await client.get(path)).status_code == status
    async with app_client(make_app(make_sessions(), token="secret"), headers={"host": host}) as client:
        assert (await client.get("/tools", headers={"authorization": "Bearer secret"})).status_code == 200


@pytest.mark.parametrize("fault", [token_required("secret"), other_origin])
@in_loop
async def test_what_is_no_request_passes(fault: Refusal) -> None:
    seen: list[str] = []

    async def app(scope: Message, receive: object, send: object) -> None:
        seen.append(scope["type"])

    await Guard(app, fault)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]
