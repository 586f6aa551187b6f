"""Access to the HTTP server: allowed host names, allowed web pages, and a bearer token.

A web page in a browser can send requests to a server that only its reader can reach. If it does so
directly, the header Origin names the page. If it lets a host name of its own point to the server
(DNS rebinding), the header Host has that name. Both headers are checked.
"""

import hmac
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skilltrain.data.use_log import CLIENT
from skilltrain.errors import SkilltrainError

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d*)?")  # a name or [IPv6], then a port


def host_name(host: str) -> str | None:
    """Return the lower-case name in `NAME` or `NAME:PORT`, or None if it is malformed.

    IPv6 addresses are in brackets.
    """
    match = _HOST.fullmatch(host.lower())
    return match[1] if match else None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address `host`."""
    return host in _LOOPBACK_NAMES or f"[{host}]" in _LOOPBACK_NAMES


def refusal(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """Create the response to a refused request."""
    return JSONResponse({"error": message, "error_type": "Validation"}, status, headers)


@dataclass(frozen=True)
class Access:
    """Requests that the server accepts.

    Attributes:
        hosts: Allowed names in the header Host.
        origins: Web pages that may send requests. Programs other than browsers send no Origin.
        token: Bearer token that requests need, or an empty string.
        is_local: Whether all clients are programs on this machine.
    """

    hosts: frozenset[str]
    origins: frozenset[str] = frozenset()
    token: str = ""
    is_local: bool = False

    def check(self, scope: Scope) -> Response | None:
        """Return None for an allowed request, otherwise the response that refuses it.

        The headers Host and Origin are checked against DNS rebinding and foreign web pages.

        Args:
            scope: The request as ASGI passes it, without its body.
        """
        headers = Headers(scope=scope)
        if host_name(headers.get("host", "")) not in self.hosts:
            return refusal("this host name is not allowed (serve --allowed-host NAME)", 421)
        if not self.origins.issuperset(headers.getlist("origin")):
            return refusal("this web page is not allowed (serve --allowed-origin ORIGIN)", 403)

        # A browser sends OPTIONS without the token, to ask whether its page may send a request.
        if not self.token or scope["path"] == "/health" or scope["method"] == "OPTIONS":
            return None
        # The comparison takes the same time for every wrong token, so its time tells nothing.
        authorization = headers.get("authorization", "").encode()
        if hmac.compare_digest(authorization, f"Bearer {self.token}".encode()):
            return None
        return refusal("the token is missing or wrong", 401, {"WWW-Authenticate": "Bearer"})


def read_access(
    host: str, allowed_hosts: Sequence[str], allowed_origins: Sequence[str], token_variable: str
) -> Access:
    """Read the options of `skilltrain serve`.

    Args:
        host: Address to listen on. If it is a loopback address, loopback names are allowed too.
        allowed_hosts: Host names; ports are ignored.
        allowed_origins: Web pages, as `SCHEME://HOST` or `SCHEME://HOST:PORT`.
        token_variable: Environment variable that holds the token, or an empty string.

    Raises:
        SkilltrainError: A value is malformed, the variable holds no token, or no host is allowed.
    """
    # `host_name` removes the port of an allowed host.
    hosts: set[str] = set()
    for allowed_host in allowed_hosts:
        name = host_name(allowed_host)
        if name is None:
            fix = "give a name such as router.example.com, or an address"
            raise SkilltrainError(
                "invalid-host", "is no host name", where=f"--allowed-host {allowed_host}", fix=fix
            )
        hosts.add(name)
    for origin in allowed_origins:
        if host_name(origin.partition("://")[2]) is None:
            fix = "give scheme and host, such as https://app.example.com"
            raise SkilltrainError(
                "invalid-host", "is no origin", where=f"--allowed-origin {origin}", fix=fix
            )

    if is_loopback(host):
        hosts.update(_LOOPBACK_NAMES)
    # Without an allowed name, the server would refuse every request.
    if not hosts:
        fault = "other machines can reach this address, but no host name is allowed"
        fix = "name the hosts that clients use: --allowed-host NAME, once for each"
        raise SkilltrainError("invalid-host", fault, where=f"--host {host}", fix=fix)

    # The token comes from a variable, because other users can see a program's arguments.
    token = os.environ.get(token_variable, "").strip()
    if token_variable and not token:
        fault = "this environment variable holds no token"
        raise SkilltrainError("missing-key", fault, where=f"--token-env {token_variable}")

    origins = frozenset(origin.lower() for origin in allowed_origins)
    # A proxy or a web page may bring requests from other machines. Then clients are not local.
    is_local = is_loopback(host) and hosts.issubset(_LOOPBACK_NAMES) and not origins
    return Access(frozenset(hosts), origins, token, is_local)


def guard(app: ASGIApp, access: Access) -> ASGIApp:
    """Return `app` with a check of every request, before the request's body is read.

    The context variable `CLIENT` passes the client's address on to the log of use.

    Args:
        app: ASGI app that answers allowed requests.
        access: Hosts, web pages and token that a request is checked against.
    """

    async def guarded_app(scope: Scope, receive: Receive, send: Send) -> None:
        response = None
        # Other scopes, such as the start of the server, are not requests and are not checked.
        if scope["type"] == "http":
            # The response that refuses the request, or None if the request is allowed.
            response = access.check(scope)
            # `client` is an address and a port, or None if the connection has no address.
            CLIENT.set(scope["client"][0] if scope["client"] else "")
        # A response is an ASGI app too, so the call below works for both.
        answer = app if response is None else response
        await answer(scope, receive, send)

    return guarded_app
