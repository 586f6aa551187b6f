"""HTTP for a registry that is not trusted: paced, patient, bounded, and never led to another host.

Requests follow each other at a fixed rate, retries and redirects included. Hosts are the registry's own and those
that the user names; listings and redirects cannot add any. Bodies are read as a stream up to a limit.
"""

import email.utils
import hashlib
import ipaddress
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any

import httpx2
import tenacity
from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.data.collect.refusal import RefusalError
from skilltrain.errors import SkilltrainError
from skilltrain.version import __version__

_GONE = (404, 410, 451)
_PASSING = (408, 425, 429)  # and 5xx
_DEFAULT_PORTS = {"http": 80, "https": 443}


class HttpConfig(Config):
    """How the registry is asked. The defaults of pace, patience and size are SkillFlow's (appendix A.1)."""

    requests_per_second: float = Field(default=1.0, gt=0, description="retries and redirects count as requests")
    attempts: int = Field(default=3, ge=1, description="tries of a request on timeouts, 408, 429 and 5xx")
    min_backoff: float = Field(default=1.0, ge=0, description="seconds before the second try, doubled before each next")
    max_backoff: float = Field(default=10.0, ge=0, description="most seconds between tries")
    max_wait: float = Field(
        default=3600.0, ge=0, description="longest Retry-After to wait for, in seconds; a longer one ends the run"
    )
    timeout: float = Field(default=30.0, gt=0, description="seconds without a byte")
    max_seconds: float = Field(default=600.0, gt=0, description="seconds for one answer, however steadily it drips")
    max_redirects: int = Field(default=5, ge=0, description="redirects to follow for one request")
    max_page_bytes: int = Field(default=20_000_000, ge=1, description="largest page of the listing")
    max_download_bytes: int = Field(default=50_000_000, ge=1, description="a larger skill is not collected")

    @model_validator(mode="after")
    def _ordered(self) -> "HttpConfig":
        if self.min_backoff > self.max_backoff:
            raise ValueError("min_backoff is more than max_backoff")
        return self


class _PassingError(Exception):
    """A fault that may be over at the next try."""


@dataclass(frozen=True, slots=True)
class Download:
    """What was written to a file, and what the server gave to ask "has it changed?" with."""

    sha256: str
    num_bytes: int
    etag: str
    modified: str


class RegistryClient:
    """One registry, asked one request at a time; use it in a `with`.

    A RefusalError's filter is gone (404, 410, 451), forbidden (403), too_big, host_not_allowed (nothing was asked of
    it) or failed.
    """

    def __init__(self, base_url: str, allow_hosts: Sequence[str], token: str, config: HttpConfig) -> None:
        self._home = _origin(httpx2.URL(base_url))
        self._allowed = {_origin(httpx2.URL(f"{scheme}://{host}")) for host in allow_hosts for scheme in _DEFAULT_PORTS}
        self._token, self._config = token, config
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._http = httpx2.Client(follow_redirects=False, timeout=config.timeout, cookies=no_cookies)
        self.num_requests, self._not_before = 0, 0.0

    def __enter__(self) -> "RegistryClient":
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def get_json(self, url: str) -> Any:
        """The JSON at `url`. Raises RefusalError."""

        def read(response: httpx2.Response) -> Any:
            data = b"".join(self._body(response, self._config.max_page_bytes))
            try:
                return json.loads(data.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                what = "an HTML page" if data[:200].lstrip().startswith(b"<") else f"no JSON ({error})"
                raise _PassingError(f"the answer is {what}") from error

        return self._fetch(url, {"Accept": "application/json"}, read)

    def download(self, url: str, path: Path, etag: str, modified: str, digest: str) -> Download | None:
        """Write what is at `url` to `path`; None if it is what it was under `etag` or `modified`. Raises RefusalError.

        A body that does not agree with `digest` (`sha256:` or `sha512:` and hexadecimal digits, or these alone) is
        fetched again; a digest in another form is not looked at.
        """

        def read(response: httpx2.Response) -> Download:
            hashes, num_bytes = {"sha256": hashlib.sha256(), "sha512": hashlib.sha512()}, 0
            with path.open("wb") as file:
                for chunk in self._body(response, self._config.max_download_bytes):
                    for found in hashes.values():
                        found.update(chunk)
                    num_bytes += file.write(chunk)
            algorithm, _, expected = digest.strip().lower().rpartition(":")
            for name, found in hashes.items():
                is_meant = algorithm == name or (not algorithm and len(expected) == 2 * found.digest_size)
                if is_meant and expected != found.hexdigest():
                    raise _PassingError(f"the {name} of {num_bytes:,} bytes is not what the listing says")
            validators = response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
            return Download(hashes["sha256"].hexdigest(), num_bytes, *validators)

        headers = {"If-None-Match": etag, "If-Modified-Since": modified, "Accept-Encoding": "identity"}
        return self._fetch(url, headers, read)

    def check(self, url: str) -> httpx2.URL:
        """`url`, parsed. Raises RefusalError where it is none, or its host is not the registry's or a named one."""
        try:
            parsed = httpx2.URL(url)
        except (httpx2.InvalidURL, ValueError, TypeError) as error:
            raise RefusalError("host_not_allowed", f"is no URL: {error}") from error
        scheme, host, port = _origin(parsed)
        if scheme not in _DEFAULT_PORTS or not host:
            raise RefusalError("host_not_allowed", f"{scheme or 'no scheme'}: only http and https URLs are followed")
        if parsed.userinfo:
            raise RefusalError("host_not_allowed", f"the URL for {host} holds a user or password")
        is_upgrade = self._home == ("http", host, 80) and (scheme, port) == ("https", 443)
        if (scheme, host, port) not in {self._home, *self._allowed} and not is_upgrade:
            kind = "a private address" if _is_private(host) else "not the registry"
            raise RefusalError("host_not_allowed", f"{scheme}://{host}:{port} is {kind} and not in allow_hosts")
        return parsed

    def _wait(self) -> None:
        """Return when the next request may be sent."""
        if (seconds := self._not_before - time.monotonic()) > 0:
            time.sleep(seconds)
        self._not_before = time.monotonic() + 1 / self._config.requests_per_second
        self.num_requests += 1

    def _fetch(self, url: str, headers: dict[str, str], read: Callable[[httpx2.Response], Any]) -> Any:
        """What `read` makes of the answer, None for 304, after as many attempts as it takes and is allowed."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((_PassingError, httpx2.TransportError)),
            stop=tenacity.stop_after_attempt(self._config.attempts),
            wait=tenacity.wait_exponential(self._config.min_backoff, self._config.max_backoff),
            sleep=lambda seconds: time.sleep(seconds),
            reraise=True,
        )
        try:
            return retrying(self._ask, url, headers, read)
        except _PassingError as error:
            raise RefusalError("failed", f"{error} (tried {self._config.attempts} times)") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            raise RefusalError("failed", f"{type(error).__name__}: {error}") from error

    def _ask(self, url: str, headers: dict[str, str], read: Callable[[httpx2.Response], Any]) -> Any:
        """One attempt, through redirects. The token goes to the registry alone: httpx2 takes it off the others."""
        named = {"User-Agent": f"skilltrain/{__version__}", "Accept-Encoding": "gzip", **headers}
        if self._token and _origin(self.check(url)) == self._home:
            named["Authorization"] = f"Bearer {self._token}"
        given = {name: value for name, value in named.items() if value}
        request = self._http.build_request("GET", self.check(url), headers=given)
        for _ in range(self._config.max_redirects + 1):
            self.check(str(request.url))
            self._wait()
            # Redirects are not left to httpx2, which reads their bodies into memory without a limit.
            with closing(self._http.send(request, stream=True)) as response:
                if response.next_request is None:
                    return self._answer(response, read)
                request = response.next_request
        raise RefusalError("failed", f"more than {self._config.max_redirects} redirects")

    def _answer(self, response: httpx2.Response, read: Callable[[httpx2.Response], Any]) -> Any:
        status = response.status_code
        if status == 200:
            return read(response)
        if status == 304 and {"if-none-match", "if-modified-since"} & response.request.headers.keys():
            return None
        asked_to_wait = response.headers.get("retry-after", "").strip()
        if status in _PASSING or status >= 500 or (status == 403 and asked_to_wait):  # GitHub's 403 may pass, too
            self._hold(response, _seconds(asked_to_wait))
            raise _PassingError(f"HTTP {status}")
        filter = "gone" if status in _GONE else "forbidden" if status == 403 else "failed"
        fix = ": set token_env to a variable that holds a valid token" if status == 401 else ""
        raise RefusalError(filter, f"HTTP {status}{fix}", float(status))

    def _hold(self, response: httpx2.Response, seconds: float) -> None:
        """Let no request through for as long as the registry asks."""
        if seconds > self._config.max_wait:
            what = f"the registry asks to wait {seconds:,.0f} seconds (HTTP {response.status_code})"
            raise SkilltrainError(
                f"{what}, more than http.max_wait",
                where=without_query(str(response.url)),
                fix="run again later: what was collected is kept",
            )
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    def _body(self, response: httpx2.Response, limit: int) -> Iterator[bytes]:
        """The decoded body, no more than `limit` bytes of it; what is declared can only end it earlier."""
        started, num_bytes = time.monotonic(), 0
        declared = response.headers.get("Content-Length", "")
        too_big = RefusalError("too_big", f"has more than {limit:,} bytes", float(limit))
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            raise too_big
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip"):  # others make gigabytes of a received block
            raise RefusalError("failed", f"Content-Encoding {encoding!r} was not asked for")
        for chunk in response.iter_bytes():
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise too_big
            if time.monotonic() - started > self._config.max_seconds:
                raise _PassingError(f"the answer took longer than {self._config.max_seconds:g} seconds")
            yield chunk


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


def _is_private(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return host == "localhost"


def without_query(url: str) -> str:
    """`url` without its query and fragment, which may hold a signature."""
    return url.partition("?")[0].partition("#")[0]
