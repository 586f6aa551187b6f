"""The stage `pool`: skills from many sources become one table with unique ids, cleaned texts and categories."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.skill_sources import HF_PREFIX, Refused, read_source
from skilltrain.data.pool.taxonomy import DEFAULT_TAXONOMY, assign_categories, categories_from_members, load_taxonomy
from skilltrain.data.screening import count_flagged, screen_pool, write_flags
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, encode_skills, open_encoder
from skilltrain.tables import DROPPED, SKILLS, read_table, rows_of, skills_from_table, table_path, write_table
from skilltrain.terminal import progress

DUPLICATE_REASON = "has the same name and body as "  # and the id of the skill that was kept
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA_OR_HANGUL = re.compile(r"[\u3040-\u30ff\uac00-\ud7af]")
_LATIN_WORD = re.compile(r"[^\W\d_\u3040-\uffff]+")
_ENGLISH_WORD = re.compile(r"the|and|to|of|for|with|this|when|from|by|if|be|your|it|that|are|not|use|using")


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

    Raises SkilltrainError where a source cannot be read at all or where no skill is left.
    """
    by_source, dropped = read_sources(config.sources, config.max_body_chars)
    skills, duplicates, num_renamed = merge_sources(by_source, config.drop_duplicates)
    dropped += duplicates
    if not skills:
        raise SkilltrainError(
            f"no skill is left of {len(config.sources)} source(s)", where=config.sources[0], fix=_reasons(dropped)
        )
    num_own = sum(skill.category is not None for skill in skills)
    skills = fill_categories(skills, config)
    flags = screen_pool(skills)
    write_table(rows_of(skills), SKILLS, out)
    write_flags(flags, out)
    write_table(({**asdict(drop), "query_id": ""} for drop in dropped), DROPPED, out)
    return {
        "num_skills": len(skills),
        "num_found": {str(source): len(found) for source, found in zip(config.sources, by_source, strict=True)},
        "num_dropped": _counts(drop.filter for drop in dropped),
        "num_renamed": num_renamed,
        "num_by_lang": _counts(skill.lang or "unknown" for skill in skills),
        "num_with_own_category": num_own,
        "num_with_assigned_category": sum(skill.category is not None for skill in skills) - num_own,
        "num_categories": len({skill.category for skill in skills} - {None}),
        "num_flagged_skills": len(flags),
        "num_flagged": count_flagged(flags),
    }


def _counts(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))


def _reasons(dropped: Sequence[Refused]) -> str:
    return f"the first of {len(dropped)} refused: {dropped[0].reason}" if dropped else "the sources are empty"


def open_pool(path: Path) -> list[Skill]:
    """The skills of a SKILLS table, or of any source that the stage `pool` reads, duplicates kept."""
    file = table_path(path, SKILLS)
    if file.is_file() and file.name == f"{SKILLS.name}.parquet":
        return skills_from_table(read_table(file, SKILLS))
    config = PoolConfig(sources=[path], out=path)
    skills, _, _ = merge_sources(read_sources(config.sources, config.max_body_chars)[0], drop_duplicates=False)
    if not skills:
        raise SkilltrainError("holds no skill", where=path)
    return skills


def read_sources(sources: Sequence[Path | str], max_body_chars: int) -> tuple[list[list[Skill]], list[Refused]]:
    """(the usable skills of each source in order of id, what was refused or cut)."""
    by_source: list[list[Skill]] = []
    refused: list[Refused] = []
    with progress("reading skills", None) as (bar, task):
        for source in sources:
            skills: list[Skill] = []
            for found in read_source(source):
                bar.advance(task)
                if isinstance(found, Refused):
                    refused.append(found)
                elif not found.body:
                    refused.append(Refused(found.skill_id, "empty_body", "the skill has no body"))
                else:
                    skill, cut = _cut_body(found, max_body_chars)
                    skills.append(skill if skill.lang else replace(skill, lang=guess_lang(skill)))
                    refused += cut
            by_source.append(sorted(skills, key=lambda skill: skill.skill_id))
    return by_source, refused


def _cut_body(skill: Skill, max_chars: int) -> tuple[Skill, list[Refused]]:
    num_chars = len(skill.body)
    if num_chars <= max_chars:
        return skill, []
    reason = f"kept, its body cut from {num_chars:,} to {max_chars:,} characters"
    cut = Refused(skill.skill_id, "body_too_long", reason, float(num_chars))
    return replace(skill, body=skill.body[:max_chars].rstrip()), [cut]


def merge_sources(
    by_source: Sequence[Sequence[Skill]], drop_duplicates: bool
) -> tuple[list[Skill], list[Refused], int]:
    """(skills with unique ids, dropped duplicates, number of skills that got another id).

    The same id with the same name and body is one skill. With another content the later skill is called `~2`,
    `~3`, …, passing over names that some source itself uses, so that no id given by a source changes its meaning.
    """
    given = {skill.skill_id for skills in by_source for skill in skills}
    kept: dict[str, Skill] = {}
    first_with: dict[bytes, str] = {}
    seen: set[tuple[str, bytes]] = set()
    last_suffix: Counter[str] = Counter()
    dropped: list[Refused] = []
    num_renamed = 0
    for skill in (skill for skills in by_source for skill in skills):
        content = content_digest(skill)
        if (skill.skill_id, content) in seen or (drop_duplicates and content in first_with):
            dropped.append(Refused(skill.skill_id, "duplicate", DUPLICATE_REASON + first_with[content]))
            continue
        seen.add((skill.skill_id, content))
        skill_id = skill.skill_id
        while skill_id in kept or (skill_id != skill.skill_id and skill_id in given):
            last_suffix[skill.skill_id] += 1
            skill_id = f"{skill.skill_id}~{last_suffix[skill.skill_id] + 1}"
        num_renamed += skill_id != skill.skill_id
        first_with.setdefault(content, skill_id)
        kept[skill_id] = replace(skill, skill_id=skill_id)
    return list(kept.values()), dropped, num_renamed


def kept_duplicates(dropped: pa.Table) -> dict[str, str]:
    """id of a dropped duplicate → id of the skill kept in its place, from the DROPPED table of this stage."""
    rows = (row for row in dropped.to_pylist() if row["filter"] == "duplicate")
    return {row["skill_id"]: row["reason"].removeprefix(DUPLICATE_REASON) for row in rows}


def content_digest(skill: Skill) -> bytes:
    """16 bytes that are equal for skills whose name and body differ in case and white space only."""
    parts = (" ".join(part.casefold().split()) for part in (skill.name, skill.body))
    return hashlib.blake2b("\x00".join(parts).encode(), digest_size=16).digest()


def guess_lang(skill: Skill) -> str | None:
    """zh where a quarter of the words are Han characters, en where common English words occur, else None.

    Tried on 26,308 skills labelled en or zh: 98.9% agree, the others are Spanish or Japanese and come out as None.
    """
    text = f"{skill.name}\n{skill.description}\n{skill.body[:4000]}"
    words = _LATIN_WORD.findall(text.lower())
    num_han = len(_HAN.findall(text))
    if len(_KANA_OR_HANGUL.findall(text)) > 0.1 * num_han + 5:
        return None
    if num_han and num_han >= 0.25 * (num_han + len(words)):
        return "zh"
    num_english = sum(_ENGLISH_WORD.fullmatch(word) is not None for word in words)
    return "en" if num_english and num_english >= 0.01 * len(words) else None


def fill_categories(skills: Sequence[Skill], config: PoolConfig) -> list[Skill]:
    """`skills` with a category each, those that they have untouched; as they are with `categories: keep`."""
    without = [skill for skill in skills if skill.category is None]
    if config.encoder is None or not without:
        return list(skills)
    if config.categories == "from_pool" and len(without) == len(skills):
        raise SkilltrainError("no skill of the pool has a category", fix="set categories: taxonomy")
    taxonomy = load_taxonomy(config.taxonomy or DEFAULT_TAXONOMY) if config.categories == "taxonomy" else []
    encoder = open_encoder(config.encoder)
    if taxonomy:
        entries = [Skill(category.name, category.name, category.description, "") for category in taxonomy]
        assigned = assign_categories(encode_skills(encoder, without), encode_skills(encoder, entries), taxonomy)
    else:
        vectors = encode_skills(encoder, skills)
        taxonomy, category_vectors = categories_from_members(vectors, [skill.category for skill in skills])
        rows = [row for row, skill in enumerate(skills) if skill.category is None]
        assigned = assign_categories(vectors[rows], category_vectors, taxonomy)
    new: Mapping[str, str] = dict(zip((skill.skill_id for skill in without), assigned, strict=True))
    return [skill if skill.category else replace(skill, category=new[skill.skill_id]) for skill in skills]
