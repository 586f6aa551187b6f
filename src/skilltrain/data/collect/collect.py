"""The stage `collect`: skills of a registry, fetched politely over hours or days.

A sync is one pass: it reads the whole listing, then fetches what is new or changed. All that is known lives in the
folder `state`, which outlives the run: a run that is stopped or killed goes on where it was, a later run (with another
`out`) asks only for what changed. `out` is made from the state at the end: skills.parquet,
which the stage `pool` reads, and dropped.parquet. Archives are read in memory; the state keeps them as they came.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from skilltrain.config import Config
from skilltrain.data import counted
from skilltrain.data.collect import RefusalError
from skilltrain.data.collect.archives import kind_of, read_skill_files
from skilltrain.data.collect.registry import Listed, RegistryConfig, read_listing
from skilltrain.data.collect.registry_client import HttpConfig, RegistryClient
from skilltrain.data.collect.sync_state import Outcome, SyncState, open_state
from skilltrain.data.pool.read import merge_sources
from skilltrain.data.pool.skill_file import parse_skill_file
from skilltrain.errors import SkilltrainError
from skilltrain.records import Dropped, Skill
from skilltrain.tables import SKILLS, rows_of, write_dropped, write_table
from skilltrain.terminal import track
from skilltrain.texts import clean_text, decode_text, one_line

MAX_FAILURES_IN_ROW = 20  # before the run gives up for now
_MAX_REASON_CHARS = 500


class CollectConfig(Config):
    """Settings of the stage `collect`."""

    stage: Literal["collect"] = "collect"
    registry: RegistryConfig = Field(description="what is collected from")
    http: HttpConfig = Field(default=HttpConfig(), description="how it is asked")
    state: Path = Field(description="folder that keeps downloads and progress from run to run; one per registry")
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
        closing(RegistryClient(registry.base_url, registry.allow_hosts, token, config.http)) as client,
    ):
        listed, dropped = read_listing(registry, state, client)
        num_fetched, refused = _fetch_all(listed, config, state, client)
        skills, left_out = _read_skills(listed, str(urlsplit(registry.base_url).hostname), state)
        gone = sorted(state.outcomes.keys() - {skill.skill_id for skill in listed})
        why = "was collected before and is no longer listed"
        dropped += [*refused, *left_out]
        dropped += [Dropped("", one, "unlisted", why) for one in gone if not state.outcomes[one].refusal]
        if not skills:
            why = f"the first of {len(dropped)} dropped rows: {dropped[0].reason}" if dropped else ""
            raise SkilltrainError(f"no skill is left of {len(listed):,} listed", where=registry.base_url, fix=why)
        write_table(rows_of(skills), SKILLS, out)
        # A reason may quote a stranger: it stands on one line, without what no table can hold.
        short = (replace(drop, reason=one_line(clean_text(drop.reason))[:_MAX_REASON_CHARS]) for drop in dropped)
        write_dropped(short, out)
        state.finish_sync()
    return {
        "num_listed": len(listed), "num_fetched": num_fetched, "num_requests": client.num_requests,
        "num_skills": len(skills), "num_dropped": counted(drop.filter for drop in dropped),
    }  # fmt: skip


def _token(variable: str | None) -> str:
    """The token in an environment variable; empty if none is wanted. Its value never stands in a message."""
    token = os.environ.get(variable, "").strip() if variable else ""
    if variable and not re.fullmatch("[!-~]+", token):
        fix = "set it, or token_env: null"
        raise SkilltrainError(f"the environment variable {variable} holds no token", fix=fix)
    return token


def _fetch_all(
    listed: Sequence[Listed], config: CollectConfig, state: SyncState, client: RegistryClient
) -> tuple[int, list[Dropped]]:
    """(number of new files, skills that the next run asks for again); files and what is refused for good: in `state`.

    Raises SkilltrainError after too many failures in a row: it is the registry then, not the skills.
    """
    due = [skill for skill in listed if _is_due(skill, config, state)]
    dropped: list[Dropped] = []
    num_fetched = num_failures = 0
    for skill in track(due, "collecting", len(due)):
        try:
            num_fetched += _fetch(skill, state, client)
            num_failures = 0
        except RefusalError as error:
            if error.filter in ("gone", "too_big"):
                why = {"refusal": error.filter, "reason": error.reason, "value": error.value}
                state.record(Outcome(skill.skill_id, state.sync, skill.version, **why), None)
                continue
            known = state.outcomes.get(skill.skill_id)
            kept = "; the version of before is kept" if known and not known.refusal else ""
            dropped.append(Dropped("", skill.skill_id, error.filter, error.reason + kept, error.value))
            num_failures += error.filter == "failed"
            if num_failures == MAX_FAILURES_IN_ROW:
                what = f"{num_failures} skills in a row could not be fetched; the last: {error.reason}"
                fix = "what was collected is kept: run again later"
                raise SkilltrainError(what, where=config.registry.base_url, fix=fix) from error
    return num_fetched, dropped


def _is_due(skill: Listed, config: CollectConfig, state: SyncState) -> bool:
    """Whether a skill must be asked for: it is new, changed, failed before, or its listing cannot tell."""
    known = state.outcomes.get(skill.skill_id)
    if known is None or known.version != skill.version:
        return True
    if known.refusal:
        return known.value is not None and known.refusal == "too_big" and known.value < config.http.max_download_bytes
    return not skill.version and known.sync != state.sync


def _fetch(skill: Listed, state: SyncState, client: RegistryClient) -> bool:
    """Whether a skill's download is another than the one that is known; it is in `state`. Raises RefusalError."""
    headers, known = {"Accept-Encoding": "identity"}, state.outcomes.get(skill.skill_id)
    # Under another version its URL may lead to another file, whose ETag may be the same.
    if known and known.version == skill.version and not known.refusal:
        headers |= {"If-None-Match": known.etag, "If-Modified-Since": known.modified}
    content, given = client.fetch(skill.url, headers, partial(_checked, digest=skill.digest))
    if content is None and known:  # not modified
        state.record(replace(known, sync=state.sync), state.download(skill.skill_id))
        return False
    validators = given.get("ETag", ""), given.get("Last-Modified", "")
    state.record(Outcome(skill.skill_id, state.sync, skill.version, *validators), content)
    return True


def _checked(content: bytes, digest: str) -> bytes:
    """`content`. Raises ValueError where it is a message in place of a skill, or is not what `digest` says.

    A digest is `sha256:` or `sha512:` and hexadecimal digits, or these alone; one in another form is not looked at.
    """
    kind = kind_of(content)
    if kind in ("html", "json"):
        raise ValueError(f"the answer is {'an HTML page' if kind == 'html' else 'a JSON object'}")
    algorithm, _, expected = digest.strip().lower().rpartition(":")
    for name in ("sha256", "sha512"):
        found = hashlib.new(name, content).hexdigest()
        is_meant = algorithm == name or (not algorithm and len(expected) == len(found))
        if is_meant and expected != found:
            raise ValueError(f"the {name} of {len(content):,} bytes is not what the listing says")
    return content


def _read_skills(listed: Sequence[Listed], source: str, state: SyncState) -> tuple[list[Skill], list[Dropped]]:
    """(the skills in order of id, what was left out).

    A broken archive is asked for again in the next run.
    """
    own, inner, dropped = list[Skill](), list[Skill](), list[Dropped]()
    for skill in track(listed, "reading", len(listed)):
        outcome = state.outcomes.get(skill.skill_id)
        if outcome and outcome.refusal:
            dropped.append(Dropped("", skill.skill_id, outcome.refusal, outcome.reason, outcome.value))
        if (content := state.download(skill.skill_id)) is None:
            continue
        try:
            for found in _read_archive(content, skill, source):
                if isinstance(found, Dropped):
                    dropped.append(found)
                else:
                    (own if found.skill_id == skill.skill_id else inner).append(found)
        except RefusalError as error:
            dropped.append(error.row(skill.skill_id))
            if error.filter == "broken_archive":
                state.forget(skill.skill_id)
    skills, repeated = merge_sources([own, inner], drop_duplicates=False)
    return sorted(skills, key=lambda skill: skill.skill_id), dropped + repeated


def _read_archive(content: bytes, listed: Listed, source: str) -> Iterator[Skill | Dropped]:
    """The skills in an archive, under the registry's own id, and those of them that are no text. Raises RefusalError.

    The only SKILL.md of an archive is the listed skill, wherever it lies; of several each has its path behind the id.
    """
    files = read_skill_files(content)
    for folder, file in files.items():
        inner, skill_id = one_line(clean_text(folder)), listed.skill_id
        name = inner.rpartition("/")[2] or listed.name or skill_id.rpartition("/")[2]
        if inner and len(files) > 1:
            skill_id = f"{skill_id}/{inner}"
        text = decode_text(file)
        if text is None:
            yield Dropped("", skill_id, "not_text", "its SKILL.md is not text")
        else:
            yield parse_skill_file(text, skill_id, name, source)
