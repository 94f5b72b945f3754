"""Limits of a tool server: what one client may make it read, keep or wait for. The server and its client read them here.

Numbers of sessions and their times are configuration: `agentrl.config.toolserver.ServerConfig`. Limits of code that runs are
in `agentrl.config.sandbox`.
"""

from __future__ import annotations

# Before the token is compared.
HEAD_BYTES = 16 * 2**10
"""Bytes of a request's line and headers, of the trailers, and of a chunk's line."""
BODY_BYTES = 16 * 2**20
"""Bytes of the largest request."""
RECEIVE_S = 60.0
"""Seconds from the first byte of a request, or from a connection without one, until the whole request has arrived."""
KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept. Longer than clients keep theirs, so that the client closes it: no request races
with a close."""

# Token.
TOKEN_VARIABLE = "AGENTRL_TOOLS_TOKEN"
"""Environment variable with the bearer token, for servers and clients that are configured with none."""
TOKEN_CHARACTERS = (16, 1024)
"""The shortest and the longest bearer token."""

# Requests.
ID_CHARACTERS = 256
"""Characters of the longest id that a client may choose."""
CALLS = 256
"""Calls of stateless tools in one request."""
CALL_BYTES = 2**18
"""Bytes of a call of a stateless tool: its request holds the calls of other episodes."""
QUERIES = 4096
"""Queries in a request of ``search``'s own route."""
QUERY_CHARACTERS = 8192
"""Characters of a query."""
RETRY_AFTER_S = 5
"""The header ``Retry-After`` of replies with status 503."""

# Memory.
KEPT_BYTES = 2**20
"""Bytes of a session's results that are kept for retries; the oldest are dropped first, the last one is always kept."""
KEPT_IDS = 1024
"""Calls of a session that are remembered, with or without their results."""
CLOSED_SESSIONS = 10_000
"""Closed sessions that are remembered, to distinguish them from unknown ones."""
MCP_SESSIONS = 2048
"""MCP sessions that are open at the same time; those that have called a tool are sessions of the server, too."""
