"""The stage `collect`: skills of a registry, fetched politely over hours or days.

A sync is one pass: it reads the whole listing, then fetches what is new or changed. All that is known lives in the
folder `state`, which outlives the run: a run that is stopped or killed goes on where it was, a later run (with another
`out`) asks only for what changed. `out` is made from the state at the end: skills.parquet,
which the stage `pool` reads, and dropped.parquet. Archives are read in memory; the state keeps their SKILL.md files.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.data.collect import RefusalError
from skilltrain.data.collect.archives import read_skill_files
from skilltrain.data.collect.registry import Listed, RegistryConfig, read_listing
from skilltrain.data.collect.registry_client import RegistryClient
from skilltrain.data.collect.sync_state import Outcome, SyncState, open_state
from skilltrain.data.pool.read import first_reason, merge_sources
from skilltrain.data.pool.skill_file import parse_skill_file
from skilltrain.errors import SkilltrainError
from skilltrain.records import Dropped, Skill, counted
from skilltrain.tables import DROPPED, SKILLS, write_table
from skilltrain.terminal import track
from skilltrain.texts import clean_text, decode_text, one_line

MAX_FAILURES_IN_ROW = 20  # before the run gives up for now
_MAX_REASON_CHARS = 500
_PASSING = (
    "failed",
    "forbidden",
    "host_not_allowed",
)  # refusals of which the next run may hear something else


class CollectConfig(Config):
    """Settings of the stage `collect`."""

    stage: Literal["collect"] = "collect"
    registry: RegistryConfig = Field(description="what is collected from")
    state: Path = Field(
        description="folder that keeps all progress from run to run; one per registry"
    )
    out: Path = Field(description="folder to write skills.parquet and dropped.parquet to")

    @model_validator(mode="after")
    def _state_outlives_out(self) -> "CollectConfig":
        if self.state.resolve().is_relative_to(self.out.resolve()):
            raise ValueError("state must not lie in out, which is made anew by each run")
        return self


def run_collect(config: CollectConfig, out: Path) -> dict[str, Any]:
    """Write SKILLS and DROPPED; the counts of what was listed, fetched and dropped.

    Raises SkilltrainError where the listing cannot be read, the registry stops answering (the state is kept: run
    again), or no skill is left.
    """
    registry = config.registry
    token = _token(registry.token_env)
    with (
        open_state(config.state, registry.base_url) as state,
        closing(
            RegistryClient(
                registry.base_url, registry.allow_hosts, token, registry.requests_per_second
            )
        ) as client,
    ):
        listed, dropped = read_listing(registry, state, client)
        num_fetched, refused = _fetch_all(listed, state, client, registry.base_url)
        skills, left_out = _read_skills(listed, str(urlsplit(registry.base_url).hostname), state)
        gone = sorted(state.outcomes.keys() - {skill.skill_id for skill in listed})
        why = "was collected before and is no longer listed"
        dropped += [*refused, *left_out]
        dropped += [
            Dropped("", one, "unlisted", why) for one in gone if not state.outcomes[one].refusal
        ]
        if not skills:
            what = f"no skill is left of {len(listed):,} listed"
            raise SkilltrainError(what, where=registry.base_url, fix=first_reason(dropped))
        write_table(skills, SKILLS, out)
        # A reason may quote a stranger: it stands on one line, without what no table can hold.
        short = (
            replace(drop, reason=one_line(clean_text(drop.reason))[:_MAX_REASON_CHARS])
            for drop in dropped
        )
        write_table(short, DROPPED, out)
        state.finish_sync()
    return {
        "num_listed": len(listed),
        "num_fetched": num_fetched,
        "num_requests": client.num_requests,
        "num_skills": len(skills),
        "num_dropped": counted(drop.filter for drop in dropped),
    }


def _token(variable: str | None) -> str:
    """The token in an environment variable; empty if none is wanted. Its value never stands in a message."""
    token = os.environ.get(variable, "").strip() if variable else ""
    if variable and not re.fullmatch("[!-~]+", token):
        fix = "set it, or token_env: null"
        raise SkilltrainError(f"the environment variable {variable} holds no token", fix=fix)
    return token


def _fetch_all(
    listed: Sequence[Listed], state: SyncState, client: RegistryClient, where: str
) -> tuple[int, list[Dropped]]:
    """(number of new files, skills that the next run asks for again); files and what is refused for good: in `state`.

    Raises SkilltrainError after too many failures in a row: it is the registry then, not the skills.
    """
    due = [
        skill for skill in listed if _is_due(skill, state.outcomes.get(skill.skill_id), state.sync)
    ]
    dropped: list[Dropped] = []
    num_fetched = num_failures = 0
    for skill in track(due, "collecting", len(due)):
        known = state.outcomes.get(skill.skill_id)
        try:
            found = _fetch(skill, known, state.sync, client)
        except RefusalError as error:
            kept = "; the version of before is kept" if known and not known.refusal else ""
            dropped.append(Dropped("", skill.skill_id, error.filter, error.reason + kept))
            num_failures += error.filter == "failed"
            if num_failures == MAX_FAILURES_IN_ROW:
                what = (
                    f"{num_failures} skills in a row could not be fetched; the last: {error.reason}"
                )
                fix = "what was collected is kept: run again later"
                raise SkilltrainError(what, where=where, fix=fix) from error
            continue
        num_fetched += not found.refusal and found.files != (known and known.files)
        num_failures = 0
        state.record(skill.skill_id, found)
    return num_fetched, dropped


def _is_due(skill: Listed, known: Outcome | None, sync: int) -> bool:
    """Whether a skill must be asked for: it is new, changed, failed before, or its listing cannot tell."""
    if known is None or known.version != skill.version:
        return True
    return not skill.version and not known.refusal and known.sync != sync


def _fetch(skill: Listed, known: Outcome | None, sync: int, client: RegistryClient) -> Outcome:
    """What a download comes to. Raises RefusalError where the next run may find more."""
    headers = {"Accept-Encoding": "identity"}
    # Under another version its URL may lead to another file, whose ETag may be the same.
    if known and known.version == skill.version:
        headers["If-None-Match"] = known.etag
    try:
        files, given = client.fetch(
            skill.url, headers, partial(_read_download, digest=skill.digest)
        )
    except RefusalError as error:
        if error.filter in _PASSING:
            raise
        return Outcome(sync, skill.version, refusal=error.filter, reason=error.reason)
    if known and not files:  # not modified
        return replace(known, sync=sync)
    return Outcome(sync, skill.version, files, given.get("ETag", ""))


def _read_download(content: bytes, digest: str) -> dict[str, str | None]:
    """The files of an Outcome. Raises RefusalError; ValueError where it is broken, or not what `digest` says.

    A digest is `sha256:` and hexadecimal digits, or these alone; one in another form is not looked at.
    """
    expected = digest.lower().removeprefix("sha256:")
    if re.fullmatch("[0-9a-f]{64}", expected) and expected != hashlib.sha256(content).hexdigest():
        raise ValueError(f"the SHA-256 of {len(content):,} bytes is not what the listing says")
    return {folder: decode_text(file) for folder, file in read_skill_files(content).items()}


def _read_skills(
    listed: Sequence[Listed], source: str, state: SyncState
) -> tuple[list[Skill], list[Dropped]]:
    """(the skills in order of id, what was left out).

    The only SKILL.md of an archive is the listed skill, wherever it lies; of several each has its path behind the id.
    """
    own, inner, dropped = list[Skill](), list[Skill](), list[Dropped]()
    known = {
        one.skill_id: state.outcomes[one.skill_id]
        for one in listed
        if one.skill_id in state.outcomes
    }
    for skill_id, outcome in known.items():
        if outcome.refusal:
            dropped.append(Dropped("", skill_id, outcome.refusal, outcome.reason))
        for folder, text in outcome.files.items():
            path = one_line(clean_text(folder))
            own_id = f"{skill_id}/{path}" if path and len(outcome.files) > 1 else skill_id
            if text is None:
                dropped.append(Dropped("", own_id, "not_text", "its SKILL.md is not text"))
                continue
            name = (path or skill_id).rpartition("/")[2]
            (own if own_id == skill_id else inner).append(
                parse_skill_file(text, own_id, name, source)
            )
    skills, repeated = merge_sources([own, inner], drop_duplicates=False)
    return sorted(skills, key=lambda skill: skill.skill_id), dropped + repeated
