"""Stage `pool`: join skills from many sources in one table with unique ids and categories."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float32
from pydantic import AfterValidator, Field, field_validator, model_validator

from skilltrain.config import Config, InputPath, parse_yaml, validate
from skilltrain.data.pool.read import CUT, HF_PREFIX, find_skill_file, merge_sources, read_sources
from skilltrain.data.screening import screen_pool, write_flags
from skilltrain.data.screening.findings import add_findings, inherited_findings
from skilltrain.errors import SkilltrainError
from skilltrain.files import LOCAL_FILE, write_json
from skilltrain.records import Dropped, Skill, counted
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.stage import Stage, Summary
from skilltrain.tables import DROPPED, SKILLS, write_table
from skilltrain.terminal import say
from skilltrain.texts import clean_text, num_words, one_line
from skilltrain.workers import WorkersConfig

DEFAULT_TAXONOMY = Path(__file__).with_name("taxonomy.yaml")


class Pool(Stage):
    """Make one pool of skills from many sources, and screen it for malware and injections."""

    example = "sources=examples/skill_library/skills out=runs/pool"
    result = (
        "{num_skills} skills in {num_categories} categories; left out: {num_dropped}; flagged: "
        "{num_flagged_skills}"
    )
    next_command = (
        "synthesize pool={out} out={near}/queries  # where you have queries: skilltrain "
        "queries files=FILES"
    )

    stage: Literal["pool"] = "pool"
    sources: list[InputPath | str] = Field(
        min_length=1,
        description="folders of SKILL.md files, .jsonl(.gz), .parquet, folders of these, folders "
        "of BEIR, hf:NAME[:split]",
    )
    drop_duplicates: bool = Field(
        default=True, description="keep one of the skills with the same name, description and body"
    )
    categories: Literal["keep", "taxonomy", "from_pool"] = Field(
        default="keep",
        description="category of a skill without one: none, the nearest of the taxonomy, or the "
        "nearest of the pool's own",
    )
    taxonomy: InputPath | None = Field(
        default=None, description="YAML list of name and description; null: the built-in one"
    )
    encoder: EncoderSource | None = Field(
        default=None, description="the encoder that finds the nearest category"
    )
    workers: WorkersConfig = Field(default=WorkersConfig(), description="who screens the skills")
    out: Path = Field(
        description="folder to write skills.parquet, dropped.parquet and flags.parquet to"
    )

    @field_validator("sources", mode="before")
    @classmethod
    def _parse_sources(cls, value: Any) -> Any:
        """Return the sources as a list. Texts become paths unless they start with `hf:`."""
        sources = []
        for source in value if isinstance(value, list | tuple) else [value]:
            if isinstance(source, dict):
                raise ValueError(f"write a path, or {HF_PREFIX}NAME without a space")
            is_path = isinstance(source, str) and not source.startswith(HF_PREFIX)
            sources.append(Path(source) if is_path else source)
        return sources

    @model_validator(mode="before")
    @classmethod
    def _set_default_categories(cls, values: Any) -> Any:
        """Make `taxonomy` the default of `categories` if there is an encoder."""
        # In `{"a": 1, **values}`, a value that the user gives replaces the default.
        has_encoder = isinstance(values, dict) and values.get("encoder") is not None
        return {"categories": "taxonomy", **values} if has_encoder else values

    @model_validator(mode="after")
    def _check_categories(self) -> "Pool":
        """Check that the encoder and the taxonomy fit the setting `categories`.

        All values except `keep` need an encoder. Only `taxonomy` uses a taxonomy.
        """
        needs_encoder = self.categories != "keep"
        has_encoder = self.encoder is not None
        if needs_encoder and not has_encoder:
            raise ValueError("categories: taxonomy and from_pool need a section encoder")
        if has_encoder and not needs_encoder:
            raise ValueError("categories: there is a section encoder, which keep does not use")
        if self.categories != "taxonomy" and self.taxonomy is not None:
            raise ValueError(
                f"taxonomy has no effect with categories: {self.categories}; "
                "set categories: taxonomy"
            )
        return self

    def run(self, out: Path) -> Summary:
        """Join the sources in one pool, and write SKILLS, DROPPED and FLAGS.

        Returns:
            Numbers of skills found, dropped, categorised and flagged.

        Raises:
            SkilltrainError: A source cannot be read, or no skill is left.
        """
        skills_by_source, dropped = read_sources(self.sources)
        num_found = _count_found(self.sources, skills_by_source, dropped)

        # Join the sources, and find the missing categories. `merged` holds the skills as they were
        # read, and `skills` the same skills with categories.
        merged_by_source, duplicates = merge_sources(skills_by_source, self.drop_duplicates)
        dropped += duplicates
        merged = list(chain.from_iterable(merged_by_source))
        skills = _fill_categories(merged, self)
        num_own_category = sum(skill.category is not None for skill in merged)
        num_with_category = sum(skill.category is not None for skill in skills)
        if not num_with_category:
            say(
                "warning: no skill has a category, so mining will find no taxonomy negatives; "
                "give an encoder: encoder.source=…"
            )

        # Files beside a SKILL.md are screened with it.
        files = {skill.skill_id: find_skill_file(skill) for skill in skills}
        folders = {skill_id: file.parent for skill_id, file in files.items() if file}
        flags = screen_pool(skills, self.workers, folders)
        # A source may be a pool that a chat model has read. Its findings still apply.
        flags = add_findings(flags, inherited_findings(skills, self.sources))

        # Write the tables, and the number of skills of each source.
        write_table(skills, SKILLS, out)
        write_table(dropped, DROPPED, out)
        write_flags(flags, out)
        paths = [clean_text(str(Path(source).resolve())) for source in self.sources]
        num_by_path = dict(zip(paths, map(len, merged_by_source), strict=True))
        write_json(out / LOCAL_FILE, num_by_path)

        rules = []  # each rule once for a skill
        for skill_flags in flags.values():
            rules += {flag.rule for flag in skill_flags}
        return {
            "num_skills": len(skills),
            "num_found": num_found,
            "num_dropped": counted(row.filter for row in dropped if row.filter != CUT),
            "num_cut": sum(row.filter == CUT for row in dropped),
            "num_by_lang": counted(skill.lang or "unknown" for skill in skills),
            "num_with_own_category": num_own_category,
            "num_with_assigned_category": num_with_category - num_own_category,
            "num_categories": len({skill.category for skill in skills} - {None}),
            "description_words": audit([skill.description for skill in skills]),
            "body_words": audit([skill.body for skill in skills]),
            "num_flagged_skills": len(flags),
            "num_flagged": counted(rules),
        }


def _count_found(
    sources: Sequence[Path | str],
    skills_by_source: Sequence[Sequence[Skill]],
    dropped: Sequence[Dropped],
) -> dict[str, int]:
    """Count the skills of each source, including skills that could not be read.

    Args:
        sources: Paths or names of the sources.
        skills_by_source: Skills of each source that could be read.
        dropped: Rows of DROPPED from the reading of all sources.
    """
    # A row with the filter CUT reports a skill with a shortened body, which was read and kept.
    num_unreadable = Counter(row.source for row in dropped if row.filter != CUT)
    num_found = {}
    for source, skills in zip(sources, skills_by_source, strict=True):
        source_in_rows = clean_text(str(source))  # the rows hold cleaned names of sources
        num_found[str(source)] = len(skills) + num_unreadable[source_in_rows]
    return num_found


def audit(texts: Sequence[str]) -> dict[str, float]:
    """Measure how long texts are, in words.

    Returns:
        Shares of texts that are empty, and that have under 10 and under 25 words. Mean, median and
        90th percentile of the number of words.
    """
    lengths = np.array([num_words(text) for text in texts])  # [text]
    median, p90 = np.quantile(lengths, (0.5, 0.9)).tolist()
    # Each share counts the texts with fewer words than its limit.
    limits = {"empty": 1, "under_10": 10, "under_25": 25}
    shares = {name: round(float((lengths < limit).mean()), 4) for name, limit in limits.items()}
    mean = round(float(lengths.mean()), 1)
    return shares | {"mean": mean, "median": median, "p90": p90}


def _fill_categories(skills: Sequence[Skill], config: Pool) -> Sequence[Skill]:
    """Give each skill without a category the nearest one. Nothing changes without an encoder.

    Args:
        skills: The skills.
        config: Settings of the stage. `categories` says where the categories come from.

    Returns:
        The skills in the same order, all with a category if there is an encoder.

    Raises:
        SkilltrainError: The categories come from the pool, and no skill has one.
    """
    uncategorised = [skill for skill in skills if skill.category is None]
    if config.encoder is None or not uncategorised:
        return skills
    categorised = [skill for skill in skills if skill.category is not None]
    if config.categories == "from_pool" and not categorised:
        raise SkilltrainError(
            "wrong-pool", "no skill of the pool has a category", fix="set categories: taxonomy"
        )

    # The vector of a category is that of its description, or the mean over its skills.
    encoder = open_encoder(config.encoder)
    if config.categories == "taxonomy":
        taxonomy = load_taxonomy(config.taxonomy or DEFAULT_TAXONOMY)
        names = [category.name for category in taxonomy]
        # A category is encoded like a skill without a body.
        vectors = encoder.encode_skills(
            [Skill(entry.name, entry.name, entry.description, body="") for entry in taxonomy]
        )
    else:
        names, vectors = mean_vectors(
            encoder.encode_skills(categorised), [skill.category or "" for skill in categorised]
        )

    similarities = encoder.encode_skills(uncategorised) @ vectors.T  # [skill, category]
    nearest = similarities.argmax(axis=1).tolist()  # the first of equally near categories
    filled = {
        skill.skill_id: replace(skill, category=names[position])
        for skill, position in zip(uncategorised, nearest, strict=True)
    }
    return [filled.get(skill.skill_id, skill) for skill in skills]


Line = Annotated[str, AfterValidator(one_line), Field(pattern=r"\S")]


class Category(Config):
    """A category of skills. Its description says what the skills do, in words that they use."""

    name: Line
    description: Line


class Taxonomy(Config):
    """Content of a taxonomy file."""

    entries: list[Category] = Field(min_length=1)


def load_taxonomy(path: Path) -> list[Category]:
    """Read the categories of a YAML file, in order.

    Args:
        path: File with a list of maps, each with a `name` and a `description`.

    Raises:
        SkilltrainError: An entry is wrong, or a name appears twice.
    """
    entries = parse_yaml(path.read_text(encoding="utf-8-sig"), path)
    taxonomy = validate(Taxonomy, {"entries": entries}, path)
    names = [category.name for category in taxonomy.entries]
    for name in names:
        if names.count(name) > 1:
            raise SkilltrainError("repeated-name", f"category '{name}' appears twice", where=path)
    return taxonomy.entries


def mean_vectors(
    vectors: Float32[np.ndarray, "skill dim"], names: Sequence[str]
) -> tuple[list[str], Float32[np.ndarray, "category dim"]]:
    """Return the distinct categories in order of name, and the unit mean vector of each.

    Args:
        vectors: Vectors of skills.
        names: Category of each skill.
    """
    # A number stands for a category: its position in `categories`.
    categories, numbers = np.unique(np.array(names), return_inverse=True)  # numbers: [skill]
    sums = np.zeros((len(categories), vectors.shape[1]))  # [category, dim]
    np.add.at(sums, numbers, vectors)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)  # [category, 1]
    # The direction of the mean is that of the sum. The maximum avoids a division by zero.
    return categories.tolist(), (sums / np.maximum(norms, 1e-12)).astype(np.float32)
