"""HTTP with manners for a registry that is not trusted: paced, patient, bounded, and never led astray.

Requests follow each other at a fixed rate, retries and redirects included. Hosts are the registry's own and those
that the user names; listings and redirects cannot add any. Bodies are read as a stream up to a limit.
"""

import hashlib
import ipaddress
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx2
from pydantic import Field, model_validator

from skilltrain import __version__
from skilltrain.config import Config
from skilltrain.data.collecting.pace import REAL_CLOCK, Clock, Pace, is_rate_limit, seconds_to_wait
from skilltrain.errors import SkilltrainError

AnswerT = TypeVar("AnswerT")
_CHUNK = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
_GONE = (403, 404, 410, 451)
_PASSING = (408, 425)  # and 429, 5xx
_DEFAULT_PORTS = {"http": 80, "https": 443}


class HttpConfig(Config):
    """How the registry is asked. The defaults of pace, patience and size are SkillFlow's (appendix A.1)."""

    requests_per_second: float = Field(default=1.0, gt=0, description="retries and redirects count as requests")
    attempts: int = Field(default=3, ge=1, description="tries of a request on timeouts, 408, 429 and 5xx")
    min_backoff: float = Field(default=1.0, ge=0, description="seconds before the second try, doubled before each next")
    max_backoff: float = Field(default=10.0, ge=0, description="most seconds between tries")
    max_wait: float = Field(
        default=3600.0, ge=0, description="longest Retry-After to sit out, in seconds; a longer one ends the run"
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


class FetchError(Exception):
    """One request came to nothing; the next may succeed.

    `filter` is gone (403, 404, 410, 451), too_big, host_not_allowed (nothing was asked of it) or failed.
    """

    def __init__(self, filter: str, reason: str, value: float | None = None) -> None:
        self.filter, self.reason, self.value = filter, reason, value
        super().__init__(f"{filter}: {reason}")


class _PassingError(Exception):
    """A fault that may be over at the next try, not before `wait` seconds from now."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        self.reason, self.wait = reason, wait
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Validators:
    """What a server gave to ask "has it changed?" with; empty where it gave nothing."""

    etag: str = ""
    modified: str = ""

    def headers(self) -> dict[str, str]:
        """The conditional headers of a request."""
        named = {"If-None-Match": self.etag, "If-Modified-Since": self.modified}
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing. `link` is the URL that the Link header calls next, or empty."""

    value: Any
    etag: str
    link: str


@dataclass(frozen=True, slots=True)
class Download:
    """What was written to a file."""

    sha256: str
    num_bytes: int
    validators: Validators


class RegistryClient:
    """One registry, asked one request at a time. `close` it, or use it in a `with`."""

    def __init__(
        self, base_url: str, allow_hosts: Sequence[str], token: str, config: HttpConfig, clock: Clock = REAL_CLOCK
    ) -> None:
        self._home = _origin(httpx2.URL(base_url))
        self._allowed = {_origin(httpx2.URL(f"{scheme}://{host}")) for host in allow_hosts for scheme in _DEFAULT_PORTS}
        self._token, self._config, self._clock = token, config, clock
        self._pace = Pace(config.requests_per_second, clock)
        self._http = httpx2.Client(follow_redirects=False, timeout=config.timeout)
        self.num_requests, self._started = 0, clock.now()

    def __enter__(self) -> "RegistryClient":
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    @property
    def requests_per_second(self) -> float:
        """The rate so far."""
        return self.num_requests / max(1e-3, self._clock.now() - self._started)

    def get_page(self, url: str, etag: str) -> Page | None:
        """The JSON at `url`, None if it is what it was under `etag`. Raises FetchError."""
        headers = {"Accept": "application/json", "Accept-Encoding": "gzip", **Validators(etag).headers()}
        return self._fetch(url, headers, self._read_page)

    def download(self, url: str, path: Path, known: Validators, digest: str) -> Download | None:
        """Write what is at `url` to `path`; None if it is what it was under `known`. Raises FetchError.

        A body that does not agree with `digest` (`sha256:` or `sha512:` and hexadecimal digits, or these alone) is
        fetched again; a digest in another form is not looked at.
        """

        def read(response: httpx2.Response) -> Download:
            with path.open("wb") as file:
                return self._read_file(response, file, digest)

        return self._fetch(url, {"Accept": "*/*", "Accept-Encoding": "identity", **known.headers()}, read)

    def check(self, url: str) -> httpx2.URL:
        """`url`, parsed. Raises FetchError where it is none, or its host is not the registry's or a named one."""
        try:
            parsed = httpx2.URL(url)
        except (httpx2.InvalidURL, ValueError, TypeError) as error:
            raise FetchError("host_not_allowed", f"is no URL: {error}") from error
        scheme, host, port = _origin(parsed)
        if scheme not in _DEFAULT_PORTS or not host:
            raise FetchError("host_not_allowed", f"{scheme or 'no scheme'}: only http and https URLs are followed")
        if parsed.userinfo:
            raise FetchError("host_not_allowed", f"the URL for {host} holds a user or password")
        is_upgrade = self._home == ("http", host, 80) and (scheme, port) == ("https", 443)
        if (scheme, host, port) != self._home and (scheme, host, port) not in self._allowed and not is_upgrade:
            kind = "a private address" if _is_private(host) else "not the registry"
            raise FetchError("host_not_allowed", f"{scheme}://{host}:{port} is {kind} and not in allow_hosts")
        return parsed

    def _fetch(self, url: str, headers: dict[str, str], read: Callable[[httpx2.Response], AnswerT]) -> AnswerT | None:
        """What `read` makes of the answer, None for 304, after as many attempts as it takes and is allowed."""
        reason = ""
        for attempt in range(self._config.attempts):
            try:
                return self._follow(url, headers, read)
            except _PassingError as fault:
                reason, wait = fault.reason, fault.wait
            except httpx2.TransportError as error:
                reason, wait = f"{type(error).__name__}: {error}", 0.0
            except (httpx2.HTTPError, httpx2.InvalidURL, zlib.error, ValueError) as error:
                raise FetchError("failed", f"{type(error).__name__}: {error}") from error
            if wait > self._config.max_wait:
                raise SkilltrainError(
                    f"the registry asks to wait {wait:,.0f} seconds ({reason}), more than http.max_wait",
                    where=without_query(url),
                    fix="run again later: what was collected is kept",
                )
            is_last = attempt + 1 == self._config.attempts
            backoff = 0.0 if is_last else min(self._config.max_backoff, self._config.min_backoff * 2**attempt)
            self._pace.hold(max(wait, backoff))
        raise FetchError("failed", f"{reason} (tried {self._config.attempts} times)")

    def _follow(self, url: str, headers: dict[str, str], read: Callable[[httpx2.Response], AnswerT]) -> AnswerT | None:
        """One attempt, through redirects. The token goes to the registry alone."""
        for _ in range(self._config.max_redirects + 1):
            parsed = self.check(url)
            self._pace.wait()
            self.num_requests += 1
            own = {"Authorization": f"Bearer {self._token}"} if self._token and _origin(parsed) == self._home else {}
            named = {"User-Agent": f"skilltrain/{__version__}", **headers, **own}
            with self._http.stream("GET", parsed, headers=named) as response:
                self._http.cookies.clear()  # a registry has nothing to remember of us
                if response.status_code not in _REDIRECTS:
                    return self._answer(response, read)
                location = response.headers.get("Location", "")
            if not location:
                raise FetchError("failed", f"HTTP {response.status_code} without a Location")
            url = str(parsed.join(location))
        raise FetchError("failed", f"more than {self._config.max_redirects} redirects")

    def _answer(self, response: httpx2.Response, read: Callable[[httpx2.Response], AnswerT]) -> AnswerT | None:
        status = response.status_code
        if status == 200:
            return read(response)
        if status == 304 and {"if-none-match", "if-modified-since"} & response.request.headers.keys():
            return None
        if status in _PASSING or status >= 500 or is_rate_limit(status, response.headers):
            raise _PassingError(f"HTTP {status}", seconds_to_wait(response.headers, self._clock.date()))
        if status in _GONE:
            raise FetchError("gone", f"HTTP {status}", float(status))
        fix = ": set token_env to a variable that holds a valid token" if status == 401 else ""
        raise FetchError("failed", f"HTTP {status}{fix}", float(status))

    def _read_page(self, response: httpx2.Response) -> Page:
        data = b"".join(self._body(response, self._config.max_page_bytes))
        try:
            value = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            what = "an HTML page" if data[:200].lstrip().startswith(b"<") else f"no JSON ({error})"
            raise _PassingError(f"the answer is {what}") from error
        link = response.links.get("next", {}).get("url", "")
        return Page(value, response.headers.get("ETag", ""), str(response.url.join(link)) if link else "")

    def _read_file(self, response: httpx2.Response, file: IO[bytes], digest: str) -> Download:
        sha256, sha512, num_bytes = hashlib.sha256(), hashlib.sha512(), 0
        for chunk in self._body(response, self._config.max_download_bytes):
            sha256.update(chunk)
            sha512.update(chunk)
            num_bytes += file.write(chunk)
        algorithm, _, expected = digest.strip().lower().rpartition(":")
        for name, hexadecimal in (("sha256", sha256.hexdigest()), ("sha512", sha512.hexdigest())):
            fits = algorithm == name or (not algorithm and len(expected) == len(hexadecimal))
            if fits and expected != hexadecimal:
                raise _PassingError(f"the {name} of {num_bytes:,} bytes is not what the listing says")
        validators = Validators(response.headers.get("ETag", ""), response.headers.get("Last-Modified", ""))
        return Download(sha256.hexdigest(), num_bytes, validators)

    def _body(self, response: httpx2.Response, limit: int) -> Iterator[bytes]:
        """The decoded body, no more than `limit` bytes of it; Content-Length can only shorten the way to a refusal.

        httpx2 would decode by itself, a received block at once: brotli can make gigabytes of one.
        """
        started = self._clock.now()
        declared = response.headers.get("Content-Length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            raise FetchError("too_big", f"has more than {limit:,} bytes", float(limit))
        for num_bytes, chunk in _counted(_decoded(response)):
            if num_bytes > limit:
                raise FetchError("too_big", f"has more than {limit:,} bytes", float(limit))
            if self._clock.now() - started > self._config.max_seconds:
                raise _PassingError(f"the answer took longer than {self._config.max_seconds:g} seconds")
            yield chunk


def _counted(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    total = 0
    for chunk in chunks:
        total += len(chunk)
        yield total, chunk


def _decoded(response: httpx2.Response) -> Iterator[bytes]:
    """The body in blocks of at most 64 KiB or as received, Content-Encoding gzip taken off."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        yield from response.iter_raw()
        return
    if encoding not in ("gzip", "x-gzip"):
        raise FetchError("failed", f"Content-Encoding {encoding!r} was not asked for")
    decoder = zlib.decompressobj(wbits=31)
    for pending in response.iter_raw():
        block = b"x" * _CHUNK
        while pending or len(block) == _CHUNK:  # a full block may not be all that there is
            block = decoder.decompress(pending, _CHUNK)
            pending = decoder.unconsumed_tail
            yield block
            if decoder.eof:
                return
    raise _PassingError("the answer is cut off inside its gzip encoding")


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
