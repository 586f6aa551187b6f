"""HTTP for a registry that is not trusted: paced, patient, bounded, and never led to another host.

Requests follow each other at a fixed rate, retries and redirects included. Hosts are the registry's own and those
that the user names; listings and redirects cannot add any. Bodies are read as a stream up to a limit.
"""

import email.utils
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2
import tenacity

from skilltrain.data.collect import RefusalError
from skilltrain.errors import SkilltrainError
from skilltrain.version import __version__

# Pace, patience and size are SkillFlow's (appendix A.1).
ATTEMPTS = 3  # of a request, on timeouts, 408, 429 and 5xx
MIN_BACKOFF, MAX_BACKOFF = (
    1.0,
    10.0,
)  # seconds before the second try, doubled before each next, up to this
TIMEOUT = 30.0  # seconds without a byte
MAX_BYTES = 50_000_000  # of a download or a page, which is held in memory
MAX_REDIRECTS = 5
MAX_WAIT = 3600  # seconds; a longer Retry-After ends the run
MAX_SECONDS = 600  # for one answer, however steadily it drips
_GONE = (404, 410, 451)
_PASSING = (408, 425, 429)  # and 5xx
_DEFAULT_PORTS = {"http": 80, "https": 443}

Answer = tuple[Any, httpx2.Headers]


class RegistryClient:
    """One registry, asked one request at a time; close it in the end."""

    def __init__(
        self, base_url: str, allow_hosts: Sequence[str], token: str, requests_per_second: float
    ) -> None:
        self._home = scheme, host, port = _origin(httpx2.URL(base_url))
        named = {
            _origin(httpx2.URL(f"{scheme}://{host}"))
            for host in allow_hosts
            for scheme in _DEFAULT_PORTS
        }
        upgrade = {("https", host, 443)} if (scheme, port) == ("http", 80) else set()
        self._allowed = {self._home, *named, *upgrade}
        self._token, self._seconds_apart = token, 1 / requests_per_second
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._http = httpx2.Client(follow_redirects=False, timeout=TIMEOUT, cookies=no_cookies)
        self.num_requests, self._not_before = 0, 0.0
        self.close = self._http.close

    def fetch(self, url: str, headers: Mapping[str, str], read: Callable[[bytes], Any]) -> Answer:
        """(what `read` makes of the body at `url`, the answer's headers); (None, headers) for "not modified".

        It is asked for again where `read` raises ValueError.

        Raises RefusalError, as `read` may: gone (404, 410, 451), forbidden (403), too_big, host_not_allowed (nothing
        was asked of that host) or failed.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((ValueError, httpx2.HTTPError)),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_exponential(MIN_BACKOFF, MAX_BACKOFF),
            sleep=lambda seconds: time.sleep(seconds),
            reraise=True,
        )
        try:
            return retrying(self._ask, url, headers, read)
        except (ValueError, httpx2.HTTPError) as error:
            what = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            raise RefusalError("failed", f"{what} (tried {ATTEMPTS} times)") from error

    def _checked(self, url: str) -> httpx2.URL:
        """`url`, parsed. Raises RefusalError where it is none, or its host is not the registry's or a named one."""
        try:
            parsed = httpx2.URL(url)
        except (httpx2.InvalidURL, ValueError, TypeError) as error:
            raise RefusalError("host_not_allowed", f"is no URL: {error}") from error
        scheme, host, port = origin = _origin(parsed)
        if origin not in self._allowed:
            reason = f"{scheme}://{host}:{port} is not the registry and not in allow_hosts"
            raise RefusalError("host_not_allowed", reason)
        if parsed.userinfo:
            raise RefusalError("host_not_allowed", f"the URL for {host} holds a user or password")
        return parsed

    def _ask(self, url: str, headers: Mapping[str, str], read: Callable[[bytes], Any]) -> Answer:
        """One attempt, through redirects. The token goes to the registry alone: httpx2 takes it off the others."""
        parsed = self._checked(url)
        named = {"User-Agent": f"skilltrain/{__version__}", "Accept-Encoding": "gzip", **headers}
        if self._token and _origin(parsed) == self._home:
            named["Authorization"] = f"Bearer {self._token}"
        given = {name: value for name, value in named.items() if value}
        request = self._http.build_request("GET", parsed, headers=given)
        for _ in range(MAX_REDIRECTS + 1):
            time.sleep(max(0.0, self._not_before - time.monotonic()))
            self._not_before = time.monotonic() + self._seconds_apart
            self.num_requests += 1
            # Redirects are not left to httpx2, which reads their bodies into memory without a limit.
            with closing(self._http.send(request, stream=True)) as response:
                if response.next_request is None:
                    return self._answer(response, read)
                request = response.next_request
                self._checked(str(request.url))
        raise RefusalError("failed", f"more than {MAX_REDIRECTS} redirects")

    def _answer(self, response: httpx2.Response, read: Callable[[bytes], Any]) -> Answer:
        """Raises ValueError for what may be over at the next try, before which as long as the registry asks passes."""
        status = response.status_code
        if status == 200:
            return read(self._body(response)), response.headers
        if status == 304 and "if-none-match" in response.request.headers:
            return None, response.headers
        retry_after = response.headers.get("retry-after", "").strip()
        if (
            status in _PASSING or status >= 500 or (status == 403 and retry_after)
        ):  # GitHub's 403 may pass, too
            seconds = _seconds(retry_after)
            if seconds > MAX_WAIT:
                what = f"the registry asks to wait {seconds:,.0f} seconds (HTTP {status})"
                raise SkilltrainError(what, fix="run again later: what was collected is kept")
            self._not_before = max(self._not_before, time.monotonic() + seconds)
            raise ValueError(f"HTTP {status}")
        filter = "gone" if status in _GONE else "forbidden" if status == 403 else "failed"
        fix = ": set token_env to a variable that holds a valid token" if status == 401 else ""
        raise RefusalError(filter, f"HTTP {status}{fix}", status)

    def _body(self, response: httpx2.Response) -> bytes:
        """The decoded body; what is declared can only end it earlier."""
        started, body = time.monotonic(), bytearray()
        too_big = RefusalError("too_big", f"has more than {MAX_BYTES:,} bytes")
        if int(response.headers.get("Content-Length", "0")) > MAX_BYTES:
            raise too_big
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip"):  # others make gigabytes of a received block
            raise RefusalError("failed", f"Content-Encoding {encoding!r} was not asked for")
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > MAX_BYTES:
                raise too_big
            if time.monotonic() - started > MAX_SECONDS:
                raise ValueError(f"the answer took longer than {MAX_SECONDS} seconds")
        return bytes(body)


def _seconds(retry_after: str) -> float:
    """What a header Retry-After, seconds or a date, asks to wait; 0 where it says neither."""
    if retry_after.isdecimal():
        return float(retry_after[:12])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    """(scheme, host, port): who is asked."""
    return url.scheme, url.host.lower().rstrip("."), url.port or _DEFAULT_PORTS.get(url.scheme)
