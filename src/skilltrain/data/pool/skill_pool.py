"""The stage `pool`: skills from many sources become one table with unique ids, cleaned texts and categories."""

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
from skilltrain.errors import SkilltrainError
from skilltrain.files import LOCAL_FILE, write_json
from skilltrain.records import Skill, counted
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.stage import Stage, Summary
from skilltrain.tables import DROPPED, SKILLS, write_table
from skilltrain.terminal import say
from skilltrain.texts import clean_text, num_words, one_line
from skilltrain.workers import WorkersConfig

DEFAULT_TAXONOMY = Path(__file__).with_name("taxonomy.yaml")


class Pool(Stage):
    """Make one pool of skills from many sources, and screen it for malware and prompt injections."""

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
        description="folders of SKILL.md files, .jsonl(.gz), .parquet, folders of these, hf:NAME[:split]",
    )
    drop_duplicates: bool = Field(
        default=True, description="keep one of the skills with the same name and body"
    )
    categories: Literal["keep", "taxonomy", "from_pool"] = Field(
        default="keep",
        description="of skills without one: none, or the nearest of the taxonomy or of other skills",
    )
    taxonomy: InputPath | None = Field(
        default=None, description="YAML list of name and description; else our own"
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
    def _listed(cls, value: Any) -> Any:
        """A single source as a list of one; what does not start with `hf:` as a path."""
        sources = value if isinstance(value, list | tuple) else [value]
        return [
            Path(one) if isinstance(one, str) and not one.startswith(HF_PREFIX) else one
            for one in sources
        ]

    @model_validator(mode="before")
    @classmethod
    def _by_taxonomy(cls, values: Any) -> Any:
        """With an encoder, categories are those of the taxonomy unless something else is asked for."""
        has_encoder = isinstance(values, dict) and values.get("encoder") is not None
        return {"categories": "taxonomy"} | values if has_encoder else values

    @model_validator(mode="after")
    def _consistent(self) -> "Pool":
        if (self.categories == "keep") != (self.encoder is None):
            raise ValueError(
                "categories: taxonomy and from_pool need a section encoder, which keep does not use"
            )
        if self.categories != "taxonomy" and self.taxonomy is not None:
            raise ValueError(
                f"taxonomy has no effect with categories: {self.categories}; set categories: taxonomy"
            )
        return self

    def run(self, out: Path) -> Summary:
        """Write SKILLS, DROPPED and FLAGS; return counts of found, dropped, categorised and flagged skills.

        Raises:
            SkilltrainError: A source cannot be read, or no skill is left.
        """
        sources, dropped = read_sources(self.sources)
        refused = Counter(drop.source for drop in dropped if drop.filter != CUT)
        by_source, repeated = merge_sources(sources, self.drop_duplicates)
        merged = list(chain.from_iterable(by_source))
        dropped += repeated
        skills = _fill_categories(merged, self)
        num_own, num_known = (
            sum(skill.category is not None for skill in some) for some in (merged, skills)
        )
        if not num_known:
            say(
                "warning: no skill has a category, so mining will find no taxonomy negatives; "
                "give an encoder: encoder.source=…"
            )
        places = [source for source in self.sources if isinstance(source, Path) and source.is_dir()]
        files = {skill.skill_id: find_skill_file(places, skill.skill_id) for skill in skills}
        flags = screen_pool(
            skills, self.workers, {own: file.parent for own, file in files.items() if file}
        )
        write_table(skills, SKILLS, out)
        paths = [clean_text(str(Path(source).resolve())) for source in self.sources]
        write_json(out / LOCAL_FILE, dict(zip(paths, map(len, by_source), strict=True)))
        write_flags(flags, out)
        write_table(dropped, DROPPED, out)
        return {
            "num_skills": len(skills),
            "num_found": {
                str(source): len(found) + refused[clean_text(str(source))]
                for source, found in zip(self.sources, sources, strict=True)
            },
            "num_dropped": counted(drop.filter for drop in dropped if drop.filter != CUT),
            "num_cut": sum(drop.filter == CUT for drop in dropped),
            "num_by_lang": counted(skill.lang or "unknown" for skill in skills),
            "num_with_own_category": num_own,
            "num_with_assigned_category": num_known - num_own,
            "num_categories": len({skill.category for skill in skills} - {None}),
            "description_words": audit([skill.description for skill in skills]),
            "num_flagged_skills": len(flags),
            "num_flagged": counted(
                rule for found in flags.values() for rule in {flag.rule for flag in found}
            ),
        }


def audit(texts: Sequence[str]) -> dict[str, float]:
    """What metadata are worth: the shares of empty texts and of those under 10 and 25 words; median and P90 words."""
    words = np.array([num_words(text) for text in texts])
    median, ninth = np.quantile(words, (0.5, 0.9)).tolist()
    limits = {"empty": 1, "under_10": 10, "under_25": 25}
    shares = {name: round(float((words < limit).mean()), 4) for name, limit in limits.items()}
    return shares | {"median": median, "p90": ninth}


def _fill_categories(skills: Sequence[Skill], config: Pool) -> Sequence[Skill]:
    """`skills`, those without a category in the nearest one; as they are with `categories: keep`."""
    without = [skill for skill in skills if skill.category is None]
    if config.encoder is None or not without:
        return skills
    members = [skill for skill in skills if skill.category is not None]
    if config.categories == "from_pool" and not members:
        raise SkilltrainError(
            "wrong-pool", "no skill of the pool has a category", fix="set categories: taxonomy"
        )
    encoder = open_encoder(config.encoder)
    if config.categories == "taxonomy":
        taxonomy = load_taxonomy(config.taxonomy or DEFAULT_TAXONOMY)
        names = [category.name for category in taxonomy]
        vectors = encoder.encode_skills(
            [Skill(entry.name, entry.name, entry.description, "") for entry in taxonomy]
        )
    else:
        names, vectors = mean_vectors(
            encoder.encode_skills(members), [skill.category or "" for skill in members]
        )
    nearest = (encoder.encode_skills(without) @ vectors.T).argmax(
        axis=1
    )  # ties go to the earlier category
    given = iter(nearest.tolist())
    return [
        replace(one, category=names[next(given)]) if one.category is None else one for one in skills
    ]


Line = Annotated[str, AfterValidator(one_line), Field(pattern=r"\S")]


class Category(Config):
    """One functional category; the description says what its skills do, in the words they would use."""

    name: Line
    description: Line


class Taxonomy(Config):
    """What a taxonomy's file holds."""

    entries: list[Category] = Field(min_length=1)


def load_taxonomy(path: Path) -> list[Category]:
    """The categories of a YAML file, in order. Raises SkilltrainError for a wrong entry or a name that stands twice."""
    taxonomy = validate(
        Taxonomy, {"entries": parse_yaml(path.read_text(encoding="utf-8-sig"), path)}, path
    ).entries
    names = [category.name for category in taxonomy]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise SkilltrainError("repeated-name", f"category '{repeated}' appears twice", where=path)
    return taxonomy


def mean_vectors(
    vectors: Float32[np.ndarray, "skill dim"], names: Sequence[str]
) -> tuple[list[str], Float32[np.ndarray, "category dim"]]:
    """The categories that skills already have, in order of name, and the unit mean vector of the members of each."""
    categories, places = np.unique(np.array(names), return_inverse=True)
    sums = np.zeros((len(categories), vectors.shape[1]))
    np.add.at(sums, places, vectors)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return categories.tolist(), (sums / np.maximum(norms, 1e-12)).astype(np.float32)
