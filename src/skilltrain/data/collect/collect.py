"""The stage `collect`: skills of a registry, fetched politely over hours or days and unpacked safely.

A sync reads the whole listing, then fetches what is new or changed. All that is known lives in the folder `state`,
which outlives the run: a run that is stopped or killed goes on where it was, a later run (with another `out`) asks
only for what changed. `out` is made from the state at the end: skills.parquet, which the stage `pool` reads, the
unpacked folders below skills/, collected.jsonl and dropped.parquet.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.data.collect.archives import ArchiveLimits, kind_of
from skilltrain.data.collect.listing import listed_once, read_listing
from skilltrain.data.collect.output import read_skills, unpack_all
from skilltrain.data.collect.refusal import RefusalError
from skilltrain.data.collect.registry import Listed, RegistryConfig
from skilltrain.data.collect.registry_client import HttpConfig, RegistryClient
from skilltrain.data.collect.sync_state import Outcome, SyncState, open_state
from skilltrain.errors import SkilltrainError
from skilltrain.records import Dropped
from skilltrain.tables import DROPPED, SKILLS, rows_of, write_table
from skilltrain.terminal import progress
from skilltrain.texts import clean_text, one_line

_FREE_TO_CHANGE = {"token_env", "allow_hosts"}  # without another listing
_MAX_REASON_CHARS = 500


class CollectConfig(Config):
    """Settings of the stage `collect`."""

    stage: Literal["collect"] = "collect"
    registry: RegistryConfig = Field(description="what is collected from")
    http: HttpConfig = Field(default=HttpConfig(), description="how it is asked")
    archives: ArchiveLimits = Field(default=ArchiveLimits(), description="how much an archive may unpack to")
    unpack: Literal["all", "skill_files"] = Field(
        default="all", description="all: whole skill folders; skill_files: SKILL.md alone, all that routing reads"
    )
    max_failures_in_row: int = Field(
        default=20, ge=1, description="skills in a row that fail to come before the run gives up for now"
    )
    state: Path = Field(description="folder that keeps downloads and progress from run to run; one a registry")
    out: Path = Field(description="folder to write skills.parquet, dropped.parquet, collected.jsonl and skills/ to")

    @model_validator(mode="after")
    def _state_outlives_out(self) -> "CollectConfig":
        if self.state.resolve().is_relative_to(self.out.resolve()):
            raise ValueError("state must not lie in out, which is made anew by each run")
        return self


def run_collect(config: CollectConfig, out: Path) -> dict[str, Any]:
    """Write SKILLS, DROPPED and the skills' folders; the counts of what was listed, fetched and dropped.

    Raises SkilltrainError where the listing cannot be read, the registry stops answering (the state is kept: run
    again), or no skill is left.
    """
    registry = config.registry
    token = _token(registry.token_env)
    identity = registry.model_dump(mode="json", exclude=_FREE_TO_CHANGE)
    with (
        open_state(config.state, identity) as state,
        RegistryClient(registry.base_url, registry.allow_hosts, token, config.http) as client,
    ):
        read_listing(registry, state, client)
        listed, dropped = listed_once(registry, state)
        counts, refused = fetch_all(listed, config, state, client)
        made, left_out = unpack_all(listed, state, config.archives, config.unpack == "skill_files", out)
        skills, unread = read_skills(made, str(urlsplit(registry.base_url).hostname), out)
        dropped += [*refused, *left_out, *unread, *_unlisted(listed, state)]
        if not skills:
            why = f"the first of {len(dropped)} dropped rows: {dropped[0].reason}" if dropped else ""
            raise SkilltrainError(f"no skill is left of {len(listed):,} listed", where=registry.base_url, fix=why)
        write_table(rows_of(skills), SKILLS, out)
        # A reason may quote a stranger: it stands on one line, without what no table can hold.
        reasons = (one_line(clean_text(drop.reason))[:_MAX_REASON_CHARS] for drop in dropped)
        write_table((drop.row() | {"reason": why} for drop, why in zip(dropped, reasons, strict=True)), DROPPED, out)
        state.finish_sync()
    return {
        "num_listed": len(listed), "num_collected": len(made), "num_skills": len(skills), **counts,
        "num_requests": client.num_requests,
        "num_dropped": dict(sorted(Counter(row.filter for row in dropped).items())),
    }  # fmt: skip


def _token(variable: str | None) -> str:
    """The token in an environment variable; empty if none is wanted. Its value never stands in a message."""
    if variable is None:
        return ""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise SkilltrainError(f"the environment variable {variable} is not set", fix="set it, or token_env: null")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise SkilltrainError(f"what stands in the environment variable {variable} is no token")
    return token


def _unlisted(listed: Sequence[Listed], state: SyncState) -> list[Dropped]:
    gone = state.outcomes.keys() - {skill.skill_id for skill in listed}
    reason = "was collected before and is no longer listed"
    return [Dropped("", skill_id, "unlisted", reason) for skill_id in sorted(gone) if state.outcomes[skill_id].sha256]


def fetch_all(
    listed: Sequence[Listed], config: CollectConfig, state: SyncState, client: RegistryClient
) -> tuple[dict[str, int], list[Dropped]]:
    """(counts, skills whose URL was not asked at all); whatever else happened to a skill is recorded in `state`.

    Raises SkilltrainError after too many failures in a row: it is the registry then, not the skills.
    """
    due = [skill for skill in listed if _is_due(skill, config, state)]
    counts = {"num_fetched": 0, "num_not_modified": 0, "num_up_to_date": len(listed) - len(due)}
    dropped: list[Dropped] = []
    num_failures = num_bytes = 0
    with progress("collecting", len(listed), len(listed) - len(due)) as show:
        for number, skill in enumerate(due, 1):
            try:
                client.check(skill.url)
            except RefusalError as error:
                dropped.append(error.row(skill.skill_id))
                continue
            outcome, is_new = _fetch(skill, state, client)
            state.record(outcome)
            counts["num_fetched"] += is_new
            counts["num_not_modified"] += outcome.status == "fetched" and not is_new
            num_bytes += outcome.num_bytes * is_new
            num_failures = num_failures + 1 if outcome.status == "failed" else 0
            if num_failures >= config.max_failures_in_row:
                raise SkilltrainError(
                    f"{num_failures} skills in a row could not be had; the last: {outcome.reason}",
                    where=config.registry.base_url,
                    fix="what was collected is kept: run again later",
                )
            show(len(listed) - len(due) + number, f"{client.num_requests:,} requests, {num_bytes / 1e6:,.1f} MB")
    return counts, dropped


def _is_due(skill: Listed, config: CollectConfig, state: SyncState) -> bool:
    """Whether a skill must be asked for: it is new, changed, failed before, or its listing cannot tell."""
    known = state.outcomes.get(skill.skill_id)
    if known is None or known.version != skill.version or known.status in ("failed", "forbidden", "broken"):
        return True
    if known.status == "too_big":
        return known.value is not None and known.value < config.http.max_download_bytes
    if known.status == "gone":
        return False
    return not state.has_download(known.sha256) or (not skill.version and known.sync != state.sync)


def _fetch(skill: Listed, state: SyncState, client: RegistryClient) -> tuple[Outcome, bool]:
    """(what became of a skill, whether a new file came)."""
    url_key = sha256(skill.url.encode()).hexdigest()  # a URL may hold a signature, which no file shall keep
    fresh = Outcome(skill.skill_id, "fetched", state.sync, skill.version, url_key)
    known = state.outcomes.get(skill.skill_id)
    if known is None or known.status == "broken" or not state.has_download(known.sha256):
        known = None
    etag, modified = (known.etag, known.modified) if known and known.url_key == url_key else ("", "")
    try:
        download = client.download(skill.url, state.partial_path(), etag, modified, skill.digest)
        if download and (kind := kind_of(state.partial_path())) in ("html", "json"):
            raise RefusalError("failed", f"the answer is {'an HTML page' if kind == 'html' else 'a JSON object'}")
    except RefusalError as error:
        is_final = error.filter in ("gone", "too_big")
        status = error.filter if is_final or error.filter == "forbidden" else "failed"
        kept = fresh if is_final or known is None else known
        return replace(kept, status=status, sync=state.sync, reason=error.reason, value=error.value), False
    if download is None and known is not None:
        return replace(known, status="fetched", sync=state.sync, version=skill.version, reason="", value=None), False
    assert download is not None  # 304 is an answer only to a condition
    state.keep_download(download.sha256)
    return replace(fresh, **asdict(download)), True
