"""What a registry lists, page by page: where things stand in its JSON, and how to ask for the next page.

A listing is untrusted: an entry is taken only if it names an id and a URL, as text that a table can hold.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode, urljoin, urlsplit

from pydantic import Field, field_validator

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.records import Dropped
from skilltrain.texts import clean_text, one_line

MAX_ID_CHARS, MAX_URL_CHARS, MAX_VALUE_CHARS = 512, 8192, 512
Position = int | str | None  # of a page: its number or cursor; None is the first page, or no further page
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_BRACED = re.compile(r"\{([^{}]*)\}")


class ListingKeys(Config):
    """Where a page of the listing says what; `a.b` is the key b of the object under the key a."""

    items: str = Field(default="items", description="the list of skills; empty if the page is the list itself")
    id: str = Field(default="id", min_length=1, description="what the registry calls the skill; becomes its skill_id")
    name: str = Field(default="name", description="for a SKILL.md that does not say its name")
    url: str = Field(default="download_url", description="where the skill is downloaded; not read if download is set")
    updated: str = Field(default="updated_at", description="date or version; the same one is not fetched again")
    digest: str = Field(default="digest", description="SHA-256 or SHA-512 of the download, checked; counts as version")


class NumberedPages(Config):
    """?page=1, ?page=2, …, or ?offset=0, ?offset=100, … with param: offset, first: 0, step: 100, until one is empty."""

    kind: Literal["number"] = "number"
    param: str = Field(default="page", min_length=1, description="the parameter that holds the number")
    first: int = Field(default=1, ge=0, description="number of the first page")
    step: int = Field(default=1, ge=1, description="from one page to the next")


class CursorPages(Config):
    """The answer holds a cursor that asks for the next page."""

    kind: Literal["cursor"] = "cursor"
    param: str = Field(default="cursor", min_length=1, description="the parameter that holds the cursor")
    key: str = Field(default="next_cursor", min_length=1, description="where the answer holds it; empty on the last")


Pages = Annotated[NumberedPages | CursorPages, Field(discriminator="kind")]


class RegistryConfig(Config):
    """A registry with an HTTP listing in JSON."""

    base_url: str = Field(description="e.g. https://registry.example.org/api/v1; what follows stands below it")
    listing: str = Field(default="skills", description="path of the listing")
    params: dict[str, str] = Field(default_factory=dict, description="parameters of each page, e.g. limit: '100'")
    pages: Pages = Field(default=NumberedPages(), description="how the next page is asked for")
    keys: ListingKeys = Field(default=ListingKeys(), description="where a page says what")
    download: str | None = Field(
        default=None,
        description="path of a download with keys of the item in braces: skills/{slug}/zip; null: keys.url",
    )
    token_env: str | None = Field(
        default=None, description="environment variable with a token, sent to the registry itself as a Bearer token"
    )
    allow_hosts: list[str] = Field(
        default_factory=list,
        description="host or host:port, exactly: where else downloads and redirects may lead; private addresses too",
    )
    max_skills: int = Field(default=1_000_000, ge=1, description="stop listing here; to try a registry, say 100")

    @field_validator("base_url")
    @classmethod
    def _is_plain_http(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.username or parts.password or parts.query or parts.fragment:
            # A plain ValueError would be printed together with the value, which may be a secret.
            raise SkilltrainError("base_url must hold no user, password or query", fix="use token_env, params")
        try:
            is_host = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port beyond 65535
            is_host = False
        if not is_host:
            raise ValueError(
                "give a URL that starts with http:// or https://, such as https://registry.example.org/api"
            )
        return value.rstrip("/")

    @field_validator("token_env")
    @classmethod
    def _is_a_variable_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            raise SkilltrainError("token_env must name an environment variable", fix="never write a token in a recipe")
        return value

    @field_validator("allow_hosts")
    @classmethod
    def _are_hosts(cls, value: list[str]) -> list[str]:
        for host in value:
            if not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is not a host or host:port (no scheme, path or *)")
        return value


@dataclass(frozen=True, slots=True)
class Listed:
    """One skill of a listing; what it does not say is empty."""

    skill_id: str
    name: str
    updated: str
    digest: str
    url: str

    @property
    def version(self) -> str:
        """What changes when the skill does; empty if the listing does not tell."""
        return f"{self.updated} {self.digest}".strip()


def page_url(registry: RegistryConfig, position: Position) -> str:
    """The URL of the page at `position`."""
    start = join_url(registry.base_url, registry.listing)
    pages, params = registry.pages, dict(registry.params)
    if isinstance(pages, NumberedPages):
        params[pages.param] = str(pages.first if position is None else position)
    elif position is not None:
        params[pages.param] = str(position)
    query = urlencode(params, quote_via=quote)
    return f"{start}{'&' if urlsplit(start).query else '?'}{query}" if query else start


def join_url(base_url: str, path: str) -> str:
    """`path` below `base_url`; a path that starts with a slash stands below its host, a whole URL for itself.

    Empty where the two make no URL.
    """
    try:
        return urljoin(base_url.rstrip("/") + "/", path)
    except ValueError:
        return ""


def next_position(registry: RegistryConfig, position: Position, page: Any) -> Position:
    """Where the page after `page` is (found at `position`); None if it is the last."""
    pages = registry.pages
    if isinstance(pages, CursorPages):
        return _text(value_at(page, pages.key), MAX_URL_CHARS) or None
    current = position if isinstance(position, int) else pages.first
    return current + pages.step if _items(registry, page, "") else None


def read_page(registry: RegistryConfig, page: Any, place: str) -> tuple[list[Listed], list[Dropped]]:
    """(the skills of a page, its entries that are none). SkilltrainError: the page is no page at all."""
    items = enumerate(_items(registry, page, place), 1)
    found = [_read_item(registry, item, f"entry {number} of {place}") for number, item in items]
    return [item for item in found if isinstance(item, Listed)], [item for item in found if isinstance(item, Dropped)]


def _items(registry: RegistryConfig, page: Any, place: str) -> list[Any]:
    key = registry.keys.items
    items = value_at(page, key) if key else page
    if isinstance(items, list):
        return items
    kind = f"an object with the keys {_names(page)}" if isinstance(page, dict) else f"a {type(page).__name__}"
    raise SkilltrainError(
        f"the answer holds no list under {key!r}; it is {kind}", where=place, fix="set registry.keys.items"
    )


def _names(value: Mapping[str, Any]) -> str:
    return ", ".join(ascii(key)[1:-1][:40] for key in list(value)[:12]) or "(none)"


def _read_item(registry: RegistryConfig, item: Any, place: str) -> Listed | Dropped:
    keys = registry.keys
    if not isinstance(item, dict):
        return Dropped("", "", "not_json", f"{place} is a {type(item).__name__}, not an object")
    raw = value_at(item, keys.id)
    skill_id = one_line(_text(raw, MAX_ID_CHARS))
    if not skill_id:
        return Dropped("", "", "no_id", f"{place} has no usable {keys.id} among its keys {_names(item)}")
    if skill_id != str(raw):
        return Dropped("", skill_id, "bad_id", f"{place} has an id with line breaks, control characters or wide spaces")
    url = _download_url(registry, item)
    if not url:
        need = registry.download or keys.url
        return Dropped("", skill_id, "no_url", f"{place} has no usable {need} among its keys {_names(item)}")
    name, updated, digest = (
        one_line(_text(value_at(item, key), MAX_VALUE_CHARS)) for key in (keys.name, keys.updated, keys.digest)
    )
    return Listed(skill_id, name, updated, digest, url)


def _download_url(registry: RegistryConfig, item: Mapping[str, Any]) -> str:
    """Where an item is downloaded, as a whole URL; empty if it does not say."""
    if registry.download is None:
        found = _text(value_at(item, registry.keys.url), MAX_URL_CHARS).strip()
        return join_url(registry.base_url, found) if found else ""
    values = {key: _text(value_at(item, key), MAX_ID_CHARS) for key in _BRACED.findall(registry.download)}
    if any(value in ("", ".", "..") for value in values.values()):
        return ""
    return join_url(registry.base_url, _BRACED.sub(lambda key: quote(values[key[1]], safe=""), registry.download))


def value_at(value: Any, key: str) -> Any:
    """What stands under a dotted key; None if nothing does."""
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(value: Any, max_chars: int) -> str:
    """A text or number as text that a table can hold; empty for anything else, and for what is too long."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    text = clean_text(value if isinstance(value, str) else repr(value))
    return text if len(text) <= max_chars else ""
