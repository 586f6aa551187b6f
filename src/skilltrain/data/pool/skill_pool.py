"""The stage `pool`: skills from many sources become one table with unique ids, cleaned texts and categories."""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.merge import DUPLICATE_REASON, content_digest, merge_sources
from skilltrain.data.pool.read import guess_lang, read_pool
from skilltrain.data.pool.skill_sources import HF_PREFIX, Refused, read_source
from skilltrain.data.pool.taxonomy import DEFAULT_TAXONOMY, assign_categories, categories_from_members, load_taxonomy
from skilltrain.data.screening import count_flagged, screen_pool, write_flags
from skilltrain.data.stored_skills import StoredSkills
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, SkillEncoder, encode_skills, open_encoder
from skilltrain.tables import (
    DROPPED,
    SKILLS,
    rows_of,
    table_from_rows,
    table_path,
    table_writer,
    write_table,
)
from skilltrain.terminal import progress, say, track
from skilltrain.workers import WorkersConfig

_ENCODED_AT_ONCE = 8192  # skills whose vectors are in memory at once


class PoolConfig(Config):
    """Settings of the stage `pool`."""

    stage: Literal["pool"] = "pool"
    sources: list[InputPath | str] = Field(
        min_length=1,
        description="folders with SKILL.md files, .jsonl, .jsonl.gz or .parquet files or folders of them, "
        "hf:owner/name[:split]; the earlier source keeps an id that two share",
    )
    max_body_chars: int = Field(default=200_000, ge=1, description="longer bodies are cut to this many characters")
    drop_duplicates: bool = Field(default=True, description="keep one of the skills with the same name and body")
    categories: Literal["keep", "taxonomy", "from_pool"] = Field(
        default="keep",
        description="skills without a category: keep leaves them so, taxonomy gives the nearest of the taxonomy, "
        "from_pool the nearest of those that other skills have",
    )
    taxonomy: InputPath | None = Field(
        default=None, description="YAML list of name and description, for categories: taxonomy; else the packaged one"
    )
    encoder: EncoderSource | None = Field(default=None, description="what tells which category is nearest")
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who screens the skills")
    out: Path = Field(description="folder to write skills.parquet, dropped.parquet and flags.parquet to")

    @field_validator("sources", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """A single source as a list of one; what does not start with `hf:` as a path."""
        sources = value if isinstance(value, list | tuple) else [value]
        local = [isinstance(source, str) and not source.startswith(HF_PREFIX) for source in sources]
        return [Path(source) if is_local else source for source, is_local in zip(sources, local, strict=True)]

    @model_validator(mode="after")
    def _consistent(self) -> "PoolConfig":
        if self.categories != "keep" and self.encoder is None:
            raise ValueError(f"categories: {self.categories} needs a section encoder")
        if self.categories == "keep" and self.encoder is not None:
            raise ValueError("encoder has no effect with categories: keep; set taxonomy or from_pool")
        if self.categories != "taxonomy" and self.taxonomy is not None:
            raise ValueError(f"taxonomy has no effect with categories: {self.categories}; set categories: taxonomy")
        return self


def run_pool(config: PoolConfig, out: Path) -> dict[str, Any]:
    """Write SKILLS, DROPPED and FLAGS; the counts of what was found, dropped, renamed, categorised and flagged.

    Texts pass through a file beside the tables; in memory are about 0.5 KB a skill and what was dropped or flagged.
    Raises SkilltrainError where a source cannot be read at all or where no skill is left.
    """
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=out) as scratch:
        pool = _gather(config, config.drop_duplicates, Path(scratch))
        skills = pool.skills
        if not skills:
            raise SkilltrainError(
                f"no skill is left of {len(config.sources)} source(s)",
                where=config.sources[0],
                fix=_reasons(pool.dropped),
            )
        num_own = _num_known(pool.categories)
        categories = fill_categories(skills, pool.categories, config)
        flags = screen_pool(skills, config.workers)
        num_by_lang = _write_skills(skills, categories, out)
    write_flags(flags, out)
    write_table(({**asdict(drop), "query_id": ""} for drop in pool.dropped), DROPPED, out)
    return {
        "num_skills": len(skills),
        "num_found": {str(source): num for source, num in zip(config.sources, pool.num_found, strict=True)},
        "num_dropped": _counts(drop.filter for drop in pool.dropped),
        "num_renamed": pool.num_renamed,
        "num_by_lang": num_by_lang,
        "num_with_own_category": num_own,
        "num_with_assigned_category": _num_known(categories) - num_own,
        "num_categories": len(set(categories) - {None}),
        "num_flagged_skills": len(flags),
        "num_flagged": count_flagged(flags),
    }


def _num_known(categories: Sequence[str | None]) -> int:
    return sum(category is not None for category in categories)


def _write_skills(skills: StoredSkills, categories: Iterable[str | None], out: Path) -> dict[str, int]:
    """Write SKILLS, each skill in its category; language → number of skills."""
    langs: Counter[str] = Counter()
    category_of = iter(categories)
    with table_writer(SKILLS, out, whole="skill_id") as append:
        for block in track(skills.blocks(), "writing skills", skills.num_blocks):
            langs.update(skill.lang or "unknown" for skill in block)
            append(table_from_rows(rows_of(replace(s, category=next(category_of)) for s in block), SKILLS))
    return dict(sorted(langs.items()))


def _counts(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))


def _reasons(dropped: Sequence[Refused]) -> str:
    return f"the first of {len(dropped)} refused: {dropped[0].reason}" if dropped else "the sources are empty"


def open_pool(path: Path) -> list[Skill]:
    """`read_pool`, under its old name."""
    return read_pool(path)


def store_pool(path: Path, folder: Path) -> StoredSkills:
    """What `open_pool` gives, with the texts in a file of `folder` and not in memory."""
    file = table_path(path, SKILLS)
    if file.is_file() and file.name == f"{SKILLS.name}.parquet":
        return StoredSkills.of_table(file, folder)
    found = _gather(PoolConfig(sources=[path], out=path), False, folder)
    if not found.skills:
        raise SkilltrainError("holds no skill", where=path, fix=_reasons(found.dropped))
    if found.dropped:
        why = ", ".join(f"{name} {num}" for name, num in _counts(drop.filter for drop in found.dropped).items())
        num_all = len(found.skills) + len(found.dropped)
        say(f"{path}: {len(found.dropped)} of {num_all} left out ({why}); `skilltrain pool sources={path}` lists them")
    return found.skills


@dataclass(frozen=True)
class _Gathered:
    """The skills of all sources under unique ids, the category that each brought, and what became of the rest."""

    skills: StoredSkills
    categories: list[str | None]
    num_found: list[int]
    dropped: list[Refused]
    num_renamed: int


@dataclass(frozen=True)
class _Notes:
    """What is kept of the skills while they are read, in the order of reading; `num_found` has a number a source."""

    contents: list[bytes] = field(default_factory=list)
    categories: list[str | None] = field(default_factory=list)
    num_found: list[int] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def _gather(config: PoolConfig, drop_duplicates: bool, folder: Path) -> _Gathered:
    notes = _Notes()
    read = StoredSkills.write(_usable_skills(config, notes), folder / "skills.jsonl")
    merged = merge_sources(read.skill_ids, notes.contents, notes.num_found, drop_duplicates)
    skills = read.select(merged.places, merged.skill_ids)
    categories = [notes.categories[place] for place in merged.places]
    return _Gathered(skills, categories, notes.num_found, notes.refused + merged.dropped, merged.num_renamed)


def _usable_skills(config: PoolConfig, notes: _Notes) -> Iterator[Skill]:
    """Yield the skills of all sources that have a body, and note what is to be known of them without their texts."""
    with progress("reading skills", None) as (bar, task):
        for source in config.sources:
            num_before = len(notes.contents)
            for found in read_source(source):
                bar.advance(task)
                if isinstance(found, Refused):
                    notes.refused.append(found)
                elif not found.body:
                    notes.refused.append(Refused(found.skill_id, "empty_body", "the skill has no body"))
                else:
                    skill, cut = _cut_body(found, config.max_body_chars)
                    notes.refused.extend(cut)
                    notes.contents.append(content_digest(skill))
                    notes.categories.append(sys.intern(skill.category) if skill.category else None)
                    yield skill if skill.lang else replace(skill, lang=guess_lang(skill))
            notes.num_found.append(len(notes.contents) - num_before)


def _cut_body(skill: Skill, max_chars: int) -> tuple[Skill, list[Refused]]:
    num_chars = len(skill.body)
    if num_chars <= max_chars:
        return skill, []
    reason = f"kept, its body cut from {num_chars:,} to {max_chars:,} characters"
    cut = Refused(skill.skill_id, "body_too_long", reason, float(num_chars))
    return replace(skill, body=skill.body[:max_chars].rstrip()), [cut]


def kept_duplicates(dropped: pa.Table) -> dict[str, str]:
    """id of a dropped duplicate → id of the skill kept in its place, from the DROPPED table of this stage."""
    rows = (row for row in dropped.to_pylist() if row["filter"] == "duplicate")
    return {row["skill_id"]: row["reason"].removeprefix(DUPLICATE_REASON) for row in rows}


def fill_categories(skills: StoredSkills, categories: Sequence[str | None], config: PoolConfig) -> Sequence[str | None]:
    """A category for each skill, those they have untouched; `categories` as they are with `categories: keep`."""
    without = [place for place, category in enumerate(categories) if category is None]
    if config.encoder is None or not without:
        return categories
    if config.categories == "from_pool" and len(without) == len(skills):
        raise SkilltrainError("no skill of the pool has a category", fix="set categories: taxonomy")
    taxonomy = load_taxonomy(config.taxonomy or DEFAULT_TAXONOMY) if config.categories == "taxonomy" else []
    encoder = open_encoder(config.encoder)
    if taxonomy:
        entries = [Skill(category.name, category.name, category.description, "") for category in taxonomy]
        category_vectors = encode_skills(encoder, entries)
    else:
        members = [place for place, category in enumerate(categories) if category is not None]
        names = ([categories[place] or "" for place in places] for places in _blocks(members))
        taxonomy, category_vectors = categories_from_members(
            zip(_vectors(encoder, skills, members), names, strict=True)
        )
    result = list(categories)
    for places, vectors in zip(_blocks(without), _vectors(encoder, skills, without), strict=True):
        for place, name in zip(places, assign_categories(vectors, category_vectors, taxonomy), strict=True):
            result[place] = name
    return result


def _blocks(places: Sequence[int]) -> Iterator[Sequence[int]]:
    return (places[start : start + _ENCODED_AT_ONCE] for start in range(0, len(places), _ENCODED_AT_ONCE))


def _vectors(encoder: SkillEncoder, skills: StoredSkills, places: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the vectors of the skills at `places`, in blocks."""
    for block in _blocks(places):
        yield encode_skills(encoder, skills.select(block))
