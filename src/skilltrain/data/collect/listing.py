"""The listing of a registry, read to its end over as many runs as it takes."""

from skilltrain.data.collect.refusal import RefusalError
from skilltrain.data.collect.registry import (
    CursorPages,
    Listed,
    NumberedPages,
    RegistryConfig,
    join_url,
    next_position,
    page_url,
    read_page,
)
from skilltrain.data.collect.registry_client import RegistryClient, without_query
from skilltrain.data.collect.sync_state import ListedPage, SyncState
from skilltrain.errors import SkilltrainError
from skilltrain.records import Dropped
from skilltrain.terminal import say

MAX_STALE_PAGES = 3  # in a row that list nothing new
_PAGES_BETWEEN_LINES = 100


def read_listing(registry: RegistryConfig, state: SyncState, client: RegistryClient) -> None:
    """Read the pages of the listing that `state` lacks.

    A cursor that the registry does not know any more begins the listing anew. Raises SkilltrainError where a page
    cannot be had or is none, or where pages come that bring nothing new.
    """
    is_resumed = bool(state.pages)
    seen = {skill.skill_id for page in state.pages for skill in page.skills}
    num_stale = 0
    while not state.has_listing:
        try:
            page = _read_next(registry, state, client)
        except RefusalError as error:
            if not (is_resumed and isinstance(registry.pages, CursorPages) and error.value is not None):
                raise _broken_off(registry, state, error) from error
            say(f"the listing cannot be gone on with ({error.reason}): reading it anew")
            state.start_sync()
            is_resumed, seen = False, set()
            continue
        is_resumed = False
        new = {skill.skill_id for skill in page.skills} - seen
        seen |= new
        num_stale = 0 if new else num_stale + 1
        if len(seen) >= registry.max_skills:
            page = ListedPage(None, page.skills, page.dropped)
        _check_progress(registry, state, page, num_stale)
        state.add_page(page)
        if len(state.pages) % _PAGES_BETWEEN_LINES == 0:
            say(f"listing: {len(state.pages):,} pages, {len(seen):,} skills")


def _read_next(registry: RegistryConfig, state: SyncState, client: RegistryClient) -> ListedPage:
    """The page after those that `state` has; some registries have no page behind the last."""
    position = state.pages[-1].next if state.pages else None
    try:
        page = client.get_json(page_url(registry, position))
    except RefusalError as error:
        if isinstance(registry.pages, NumberedPages) and state.pages and error.value == 404:
            return ListedPage(None, [], [])
        raise
    skills, dropped = read_page(registry, page, _place(registry, state))
    return ListedPage(next_position(registry, position, page), skills, dropped)


def _place(registry: RegistryConfig, state: SyncState) -> str:
    return f"page {len(state.pages) + 1} of {join_url(registry.base_url, registry.listing)}"


def _broken_off(registry: RegistryConfig, state: SyncState, error: RefusalError) -> SkilltrainError:
    fix = "the pages before are kept: run again to go on" if state.pages else "check registry.base_url and listing"
    if error.filter == "host_not_allowed":
        fix = "if you trust that host, name it in registry.allow_hosts"
    return SkilltrainError(f"cannot be had: {error.reason}", where=_place(registry, state), fix=fix)


def _check_progress(registry: RegistryConfig, state: SyncState, page: ListedPage, num_stale: int) -> None:
    """Raises SkilltrainError where the first page holds no skill, or pages go round in circles."""
    where = _place(registry, state)
    if not state.pages and not page.skills and (page.dropped or page.next is None):
        reason = f": {page.dropped[0].reason}" if page.dropped else ""
        raise SkilltrainError(f"lists no skill{reason}", where=where, fix="check registry.listing and registry.keys")
    if page.next is not None and num_stale >= MAX_STALE_PAGES:
        what = f"the last {num_stale} pages list nothing new: the listing goes round in circles"
        raise SkilltrainError(what, where=where, fix="set registry.pages to what the registry speaks (number, cursor)")


def listed_once(registry: RegistryConfig, state: SyncState) -> tuple[list[Listed], list[Dropped]]:
    """(the skills of the listing in order of id, what of it was left out and why).

    Pages shift while they are read, so that an id comes twice: the later entry counts, and there is a row only where
    the two lead to different downloads.
    """
    skills: dict[str, Listed] = {}
    dropped = [drop for page in state.pages for drop in page.dropped]
    for skill in (skill for page in state.pages for skill in page.skills):
        if skill.skill_id not in skills and len(skills) >= registry.max_skills:
            continue
        before = skills.get(skill.skill_id, skill)
        if without_query(before.url) != without_query(skill.url):
            reason = f"listed twice; the earlier entry led to {without_query(before.url)}"
            dropped.append(Dropped("", skill.skill_id, "same_id", reason))
        skills[skill.skill_id] = skill
    return [skills[skill_id] for skill_id in sorted(skills)], dropped
