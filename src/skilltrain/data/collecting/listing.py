"""The listing of a registry, read to its end over as many runs as it takes."""

from collections.abc import Sequence

from skilltrain.data.collecting.archive_members import Refused
from skilltrain.data.collecting.registry_client import FetchError, Page, RegistryClient, without_query
from skilltrain.data.collecting.registry_listing import (
    Listed,
    NumberedPages,
    Position,
    RegistryConfig,
    join_url,
    next_position,
    page_url,
    read_page,
)
from skilltrain.data.collecting.state import ListedPage, SyncState
from skilltrain.errors import SkilltrainError
from skilltrain.terminal import progress, say

_PAGES_BETWEEN_LINES = 100


class _Novelty:
    """Counts the pages in a row that bring no id which was not there before."""

    def __init__(self, pages: Sequence[ListedPage]) -> None:
        self.skill_ids: set[str] = set()
        self.num_stale = 0
        for page in pages:
            self.look(page)

    def look(self, page: ListedPage) -> None:
        new = {skill.skill_id for skill in page.skills} - self.skill_ids
        self.skill_ids |= new
        self.num_stale = 0 if new else self.num_stale + 1


def read_listing(registry: RegistryConfig, state: SyncState, client: RegistryClient) -> None:
    """Read the pages of the listing that `state` lacks, from the first if its last sync was finished.

    A position that the registry does not know any more (a cursor that is too old) begins the listing anew. Raises
    SkilltrainError where a page cannot be had or is none, or where pages come that bring nothing new.
    """
    if not state.is_begun:
        state.start_sync()
    is_old = bool(state.pages)
    seen = _Novelty(state.pages)
    with progress("reading the listing, pages", None) as (bar, task):
        while not state.has_listing:
            page = _read_next(registry, state, client, is_old)
            if page is None:
                state.start_sync()
                seen, is_old = _Novelty([]), False
                continue
            is_old = False
            seen.look(page)
            if len(seen.skill_ids) >= registry.max_skills:
                page = ListedPage(page.url, "", None, page.skills, page.refused)
            _check_progress(registry, state, page, seen)
            state.add_page(page)
            bar.advance(task)
            if len(state.pages) % _PAGES_BETWEEN_LINES == 0:
                say(f"listing: {len(state.pages):,} pages, {len(seen.skill_ids):,} skills")


def _read_next(registry: RegistryConfig, state: SyncState, client: RegistryClient, is_old: bool) -> ListedPage | None:
    """The page behind those of `state`; None if the registry does not know any more where an earlier run stood."""
    position = state.pages[-1].next if state.pages else None
    is_numbered = isinstance(registry.pages, NumberedPages)
    try:
        return _read_one(registry, state, client, position)
    except FetchError as error:
        is_status = error.value is not None and error.filter in ("gone", "failed")
        if is_numbered and state.pages and error.value == 404:  # some have no page behind the last
            return ListedPage(page_url(registry, position), "", None, [], [])
        if is_old and is_status and not is_numbered:
            say(f"the listing cannot be gone on with ({error.reason}): reading it anew")
            return None
        raise _broken_off(registry, state, error) from error


def _place(registry: RegistryConfig, state: SyncState) -> str:
    return f"page {len(state.pages) + 1} of {join_url(registry.base_url, registry.listing)}"


def _broken_off(registry: RegistryConfig, state: SyncState, error: FetchError) -> SkilltrainError:
    fix = "the pages before are kept: run again to go on" if state.pages else "check registry.base_url and listing"
    if error.filter == "host_not_allowed":
        fix = "if you trust that host, name it in registry.allow_hosts"
    return SkilltrainError(f"cannot be had: {error.reason}", where=_place(registry, state), fix=fix)


def _read_one(registry: RegistryConfig, state: SyncState, client: RegistryClient, position: Position) -> ListedPage:
    """The page at `position`; what an earlier listing read there, if the server says that it is the same."""
    url = page_url(registry, position)
    before = state.page_before(url)
    page = client.get_page(url, before.etag if before else "")
    if page is None and before is not None:
        return before
    assert page is not None  # 304 is an answer only to a condition
    return _listed_page(registry, page, url, position, _place(registry, state))


def _listed_page(registry: RegistryConfig, page: Page, url: str, position: Position, place: str) -> ListedPage:
    skills, refused = read_page(registry, page.value, place)
    following = next_position(registry, position, page.value, page.link)
    return ListedPage(url, page.etag, following, skills, refused)


def _check_progress(registry: RegistryConfig, state: SyncState, page: ListedPage, seen: _Novelty) -> None:
    """Raises SkilltrainError where the first page holds no skill, or pages go round in circles."""
    where = _place(registry, state)
    if not state.pages and not page.skills:
        if page.refused:
            raise SkilltrainError(f"lists no skill: {page.refused[0].reason}", where=where, fix="set registry.keys")
        if page.next is None:
            raise SkilltrainError("lists no skill", where=where, fix="check registry.listing and registry.keys.items")
    if page.next is not None and seen.num_stale >= registry.max_stale_pages:
        raise SkilltrainError(
            f"the last {seen.num_stale} pages list nothing new: the listing goes round in circles",
            where=where,
            fix="set registry.pages to what the registry speaks (number with more, cursor, link)",
        )


def listed_once(registry: RegistryConfig, state: SyncState) -> tuple[list[Listed], list[Refused]]:
    """(the skills of the listing in order of id, what of it was left out and why).

    Pages shift while they are read, so that an id comes twice: the later entry counts, and is told of only where the
    two lead to different downloads.
    """
    skills: dict[str, Listed] = {}
    refused = [refused for page in state.pages for refused in page.refused]
    for skill in (skill for page in state.pages for skill in page.skills):
        if skill.skill_id not in skills and len(skills) >= registry.max_skills:
            continue
        before = skills.get(skill.skill_id, skill)
        if without_query(before.url) != without_query(skill.url):
            reason = f"listed twice; the earlier entry led to {without_query(before.url)}"
            refused.append(Refused(skill.skill_id, "same_id", reason))
        skills[skill.skill_id] = skill
    return [skills[skill_id] for skill_id in sorted(skills)], refused
