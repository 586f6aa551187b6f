"""What a registry lists, page by page: where things stand in its JSON, and how to ask for the next page.

A listing is untrusted: an entry is taken only if it names an id and a URL, as text that a table can hold.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urljoin

import httpx2
from pydantic import AfterValidator, Field

from skilltrain.config import Config
from skilltrain.data.collect import RefusalError
from skilltrain.data.collect.registry_client import RegistryClient
from skilltrain.data.collect.sync_state import SyncState
from skilltrain.errors import SkilltrainError
from skilltrain.records import Dropped
from skilltrain.terminal import track
from skilltrain.texts import clean_text, one_line

MAX_TEXT_CHARS, MAX_URL_CHARS = 512, 8192
MAX_STALE_PAGES = 3  # in a row that list nothing new
_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?"
_BRACED = re.compile(r"\{([^{}]*)\}")


def _form(pattern: str, wanted: str) -> AfterValidator:
    """Texts of a pattern. What is refused is not quoted: it may hold a secret."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(wanted)
        return value

    return AfterValidator(check)


_URL = "give a URL such as https://registry.example.org/api, without user, password or query (use token_env, params)"
_VARIABLE = "give the name of an environment variable; never write a token in a recipe"
BaseUrl = Annotated[str, _form(rf"https?://{_HOST}(?:/[^\s?#]*)?", _URL)]
Variable = Annotated[str, _form(r"[A-Za-z_][A-Za-z0-9_]*", _VARIABLE)]
Host = Annotated[str, _form(_HOST, "give a host or host:port, without scheme, path or *")]


class ListingKeys(Config):
    """Where a page of the listing says what; `a.b` is the key b of the object under the key a."""

    items: str = Field(
        default="items", description="the list of skills; empty if the page is the list itself"
    )
    id: str = Field(
        default="id",
        min_length=1,
        description="what the registry calls the skill; becomes its skill_id",
    )
    url: str = Field(
        default="download_url",
        description="where the skill is downloaded; not read if download is set",
    )
    updated: str = Field(
        default="updated_at", description="date or version; the same one is not fetched again"
    )
    digest: str = Field(
        default="digest", description="SHA-256 of the download, checked; counts as version"
    )


class Pages(Config):
    """?page=1, ?page=2, … until one is empty; ?offset=0, ?offset=100, … with first: 0, step: 100; or by a cursor."""

    param: str = Field(
        default="page",
        min_length=1,
        description="the parameter that holds the number or the cursor",
    )
    first: int = Field(default=1, ge=0, description="number of the first page")
    step: int = Field(default=1, ge=1, description="from one page to the next")
    cursor: str | None = Field(
        default=None,
        min_length=1,
        description="key of the next page's cursor, empty on the last; null: numbers",
    )


class RegistryConfig(Config):
    """A registry with an HTTP listing in JSON."""

    base_url: BaseUrl = Field(
        description="e.g. https://registry.example.org/api/v1; what follows stands below it"
    )
    listing: str = Field(default="skills", description="path of the listing")
    params: dict[str, str] = Field(
        default_factory=dict, description="parameters of each page, e.g. limit: '100'"
    )
    pages: Pages = Field(default=Pages(), description="how the next page is asked for")
    keys: ListingKeys = Field(default=ListingKeys(), description="where a page says what")
    download: str | None = Field(
        default=None,
        description="path of a download with keys of the item: skills/{slug}/zip; null: keys.url",
    )
    token_env: Variable | None = Field(
        default=None,
        description="environment variable with a Bearer token, sent to the registry alone",
    )
    allow_hosts: list[Host] = Field(
        default_factory=list,
        description="host or host:port: where else downloads and redirects may lead",
    )
    requests_per_second: float = Field(
        default=1.0, gt=0, description="retries and redirects count as requests"
    )
    max_skills: int = Field(
        default=1_000_000, ge=1, description="stop listing here; to try a registry, say 100"
    )


@dataclass(frozen=True, slots=True)
class Listed:
    """One skill of a listing; what it does not say is empty. `version` changes when the skill does."""

    skill_id: str
    version: str
    digest: str
    url: str

    @property
    def place(self) -> str:
        """The URL without what may change from request to request, such as a signature."""
        return self.url.partition("?")[0]


def read_listing(
    registry: RegistryConfig, state: SyncState, client: RegistryClient
) -> tuple[list[Listed], list[Dropped]]:
    """(the skills of all pages in order of id, what was left out); pages that `state` lacks are asked for.

    Pages shift while they are read, so that an id comes twice: the later entry counts, and there is a row only where
    the two lead to different downloads. Raises SkilltrainError where a page cannot be fetched or is none, or where
    pages come that bring nothing new.
    """
    skills, dropped, num_stale = dict[str, Listed](), list[Dropped](), 0
    for place, items in track(_pages(registry, state, client), "reading the listing", None):
        num_before = len(skills)
        for number, item in enumerate(items, 1):
            found = _read_item(registry, item, f"entry {number} of {place}")
            if isinstance(found, Dropped):
                dropped.append(found)
                continue
            earlier = skills.get(found.skill_id)
            if earlier and earlier.place != found.place:
                reason = f"listed twice; the earlier entry led to {earlier.place}"
                dropped.append(Dropped("", found.skill_id, "same_id", reason))
            if earlier or len(skills) < registry.max_skills:
                skills[found.skill_id] = found
        if not skills:
            reason = f": {dropped[0].reason}" if dropped else ""
            fix = "check registry.listing and registry.keys"
            raise SkilltrainError(f"lists no skill{reason}", where=place, fix=fix)
        num_stale = 0 if len(skills) > num_before else num_stale + 1
        if num_stale == MAX_STALE_PAGES:
            what = f"the last {num_stale} pages list nothing new: the listing repeats itself"
            raise SkilltrainError(
                what, where=place, fix="set registry.pages to what the registry speaks"
            )
        if len(skills) >= registry.max_skills:
            break
    return [skills[skill_id] for skill_id in sorted(skills)], dropped


def _pages(
    registry: RegistryConfig, state: SyncState, client: RegistryClient
) -> Iterator[tuple[str, list[Any]]]:
    """(where it stands, its entries) for each page; a page is kept in `state` as soon as the next one is wanted."""
    pages, start = registry.pages, join_url(registry.base_url, registry.listing)
    position: int | str | None = pages.first if pages.cursor is None else None
    for number in itertools.count(1):
        params = (
            registry.params if position is None else {**registry.params, pages.param: str(position)}
        )
        url, place = str(httpx2.URL(start).copy_merge_params(params)), f"page {number} of {start}"
        page = state.pages.get(url)
        if is_new := page is None:
            try:
                page = client.fetch(url, {"Accept": "application/json"}, _read_json)[0]
            except RefusalError as error:
                if number > 1 and pages.cursor is None and error.status == 404:
                    return  # some registries have no page behind the last
                fix = (
                    "check registry.base_url and listing"
                    if number == 1
                    else "the pages before are kept: run again"
                )
                if number > 1 and pages.cursor and error.status is not None:
                    state.forget_pages()  # a registry may have forgotten a cursor
                    fix = "run again to read the listing anew"
                raise SkilltrainError(
                    f"cannot be fetched: {error.reason}", where=place, fix=fix
                ) from error
        items = value_at(page, registry.keys.items)
        if not isinstance(items, list):
            kind = (
                f"an object with the keys {_names(page)}"
                if isinstance(page, dict)
                else f"a {type(page).__name__}"
            )
            what = f"the answer holds no list under {registry.keys.items!r}; it is {kind}"
            raise SkilltrainError(what, where=place, fix="set registry.keys.items")
        yield place, items
        if is_new:
            state.keep_page(url, page)
        if pages.cursor is None:
            position = number * pages.step + pages.first if items else None
        else:
            position = _text(value_at(page, pages.cursor), MAX_URL_CHARS) or None
        if position is None:
            return


def _read_json(content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        what = "an HTML page" if content[:200].lstrip().startswith(b"<") else f"no JSON ({error})"
        raise ValueError(f"the answer is {what}") from error


def join_url(base_url: str, path: str) -> str:
    """`path` below `base_url`; one that starts with a slash, below its host; empty where the two make no URL."""
    try:
        return urljoin(base_url.rstrip("/") + "/", path)
    except ValueError:
        return ""


def _names(value: Mapping[str, Any]) -> str:
    return ", ".join(ascii(key)[1:-1][:40] for key in list(value)[:12]) or "(none)"


def _read_item(registry: RegistryConfig, item: Any, place: str) -> Listed | Dropped:
    keys = registry.keys
    if not isinstance(item, dict):
        return Dropped("", "", "not_json", f"{place} is a {type(item).__name__}, not an object")
    skill_id, updated, digest = (
        one_line(_text(value_at(item, key))) for key in (keys.id, keys.updated, keys.digest)
    )
    if not skill_id or skill_id != str(
        value_at(item, keys.id)
    ):  # with line breaks, say, or control characters
        return Dropped(
            "", "", "no_id", f"{place} has no usable {keys.id} among its keys {_names(item)}"
        )
    if not (url := _download_url(registry, item)):
        need = registry.download or keys.url
        return Dropped(
            "", skill_id, "no_url", f"{place} has no usable {need} among its keys {_names(item)}"
        )
    return Listed(skill_id, f"{updated} {digest}".strip(), digest, url)


def _download_url(registry: RegistryConfig, item: Mapping[str, Any]) -> str:
    """Where an item is downloaded, as a whole URL; empty if it does not say."""
    if registry.download is None:
        found = _text(value_at(item, registry.keys.url), MAX_URL_CHARS).strip()
        return join_url(registry.base_url, found) if found else ""
    values = {key: _text(value_at(item, key)) for key in _BRACED.findall(registry.download)}
    if any(value in ("", ".", "..") for value in values.values()):
        return ""
    return join_url(
        registry.base_url,
        _BRACED.sub(lambda key: quote(values[key[1]], safe=""), registry.download),
    )


def value_at(value: Any, key: str) -> Any:
    """What stands under a dotted key, None if nothing does; the value itself under an empty one."""
    for part in key.split(".") if key else ():
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(value: Any, max_chars: int = MAX_TEXT_CHARS) -> str:
    """A text or number as text that a table can hold; empty for anything else, and for what is too long."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    text = clean_text(value if isinstance(value, str) else repr(value))
    return text if len(text) <= max_chars else ""
