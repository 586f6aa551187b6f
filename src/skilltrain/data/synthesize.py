"""Stage `synthesize`: requests that need a skill of the pool and never name it (SkillRouter, section 4.1).

The paper has GPT-4o-mini write them, 160 words in the mean; here any chat model does, or own_text.py without one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import jinja2
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from skilltrain.config import Config, InputMark, InputPath, Seed
from skilltrain.data.llm_stage import (
    PROMPTS,
    TOKENS_PER_WORD,
    ask,
    load_prompt,
    prompt,
    questions_of,
    unflagged_skills,
)
from skilltrain.data.near_duplicates import read_clusters
from skilltrain.data.own_text import own_queries
from skilltrain.data.query_texts import MAX_TERSE_WORDS, fit_query, query_profile
from skilltrain.data.sampling import is_drawn, sample_skills, stable_number
from skilltrain.data.screening import read_flags, write_flags
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLMConfig, Outcome, Questions, estimate_cost
from skilltrain.llm.untrusted import untrusted_line, untrusted_skill
from skilltrain.records import OWN_TEXT, Dropped, Judgement, Query, Skill, Verdict, counted
from skilltrain.stage import Stage, Summary
from skilltrain.tables import SKILLS, read_skills, write_queries, write_table
from skilltrain.texts import num_words

TERSE: Final = PROMPTS["rewrite"]["styles"]["terse"].removeprefix("in ")


class OwnTextConfig(Config):
    """Passages of the skills' own texts: no model, no key, no network."""

    kind: Literal["own_text"] = "own_text"


def _as_path(name: object) -> object:
    is_file = isinstance(name, str) and name.endswith((".yaml", ".yml"))
    return Path(str(name)) if is_file else name


def _can_render(name: str | Path) -> str | Path:
    try:
        prompt(load_prompt(name), "", number=1, total=1, length="", lang="en", style="")
    except SkilltrainError as error:
        raise ValueError(error.what) from error
    except jinja2.TemplateError as error:
        raise ValueError(f"cannot render {name}: {error}") from error
    return name


PromptName = Annotated[
    str | Path, InputMark(), BeforeValidator(_as_path), AfterValidator(_can_render)
]
"""A prompt of the kind `prompt` of plug-ins, or the path of a YAML file."""


class Synthesize(Stage):
    """Write queries for skills, with a chat model or from the skills' own texts."""

    example = "pool=runs/pool llm.kind=own_text out=runs/synthetic"
    result = (
        "{num_queries} queries for {num_skills} skills, {num_dev} of them dev; left out: {dropped}"
    )
    next_command = "mine pool={pool} queries={out} encoder.source={base} out={near}/mined"

    stage: Literal["synthesize"] = "synthesize"
    pool: InputPath = Field(description="SKILLS table, or the folder that holds it")
    llm: Annotated[LLMConfig | OwnTextConfig, Field(discriminator="kind")] = Field(
        default=OwnTextConfig(), description="who writes: kind own_text (no model) or openai"
    )
    flagged: Literal["leave_out", "use"] = Field(
        default="leave_out", description="skills that the screening flagged"
    )
    num_queries_per_skill: int = Field(
        default=1, ge=1, le=1000, description="queries asked for each skill"
    )
    max_skills: int | None = Field(
        default=None, ge=1, description="sample this many, stratified by category and lang"
    )
    prompt: PromptName = Field(
        default="styles",
        description="styles: a style for each query; skillrouter: the paper's table 2, with the skill's "
        "category; or a YAML file with the keys system and user",
    )
    style: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="of all queries, in words, which their origin names too; null: one of seven, drawn for each",
    )
    num_words: int = Field(
        default=160, ge=5, description="words asked for (the paper's mean); half more are refused"
    )
    terse_share: float = Field(
        default=0.0, ge=0, le=1, description="share of queries written in 4 to 14 words"
    )
    body_chars: int = Field(default=4000, ge=1, description="how much of a body a model is shown")
    dev_share: float = Field(
        default=0.05, ge=0, le=1, description="share of skills whose queries are split dev"
    )
    clusters: InputPath | None = Field(
        default=None, description="CLUSTERS table: near-duplicates are in one split"
    )
    seed: Seed = Field(default=0, description="decides sample, styles, split and the models' seeds")
    out: Path = Field(
        description="folder for queries, judgements, dropped; of own_text also the pool without these"
    )

    @model_validator(mode="after")
    def _style_is_used(self) -> "Synthesize":
        if self.style is not None and (
            self.prompt != "styles" or isinstance(self.llm, OwnTextConfig)
        ):
            raise ValueError("style is for a chat model and prompt: styles")
        return self

    @property
    def origin(self) -> str:
        """Who writes, as the tables name it."""
        if isinstance(self.llm, OwnTextConfig):
            return OWN_TEXT
        return f"llm:{self.llm.model}" + (f", {self.style}" if self.style else "")

    def run(self, out: Path) -> Summary:
        """Write QUERIES, JUDGEMENTS and DROPPED. Every query asked for is in QUERIES or in DROPPED.

        Raises:
            SkilltrainError: No query was made at all.
        """
        wanted, flagged = _wanted(self)
        if isinstance(self.llm, OwnTextConfig):
            asked = _from_own_text(self, wanted, out)
        else:
            asked = ask(_questions(self, self.llm, wanted))
        num_skills = len(wanted) // self.num_queries_per_skill
        if not asked.values:
            first = asked.dropped[0].reason if asked.dropped else "every skill is flagged"
            fix = (
                "answers are kept in llm.cache; set another seed to have others asked for"
                if asked.used
                else ""
            )
            raise SkilltrainError(
                "nothing-generated",
                f"made no query for {num_skills} skills; the first reason: {first}",
                fix=fix,
            )

        origin, cluster_of, dropped = (
            self.origin,
            _cluster_of(self.clusters),
            flagged + asked.dropped,
        )
        queries, judgements = list[Query](), list[Judgement]()
        for one, text in asked.values:
            is_dev = is_drawn(
                self.dev_share, self.seed, "split", cluster_of.get(one.skill_id, one.skill_id)
            )
            queries.append(
                Query(one.query_id, text, "single", origin, "dev" if is_dev else "train")
            )
            judgements.append(Judgement(one.query_id, one.skill_id, Verdict.REQUIRED, origin))
        write_queries(queries, judgements, dropped, out)
        return {
            "num_skills": num_skills,
            "num_asked": len(wanted),
            "num_queries": len(queries),
            "num_dropped": len(dropped),
            "dropped": counted(row.filter for row in dropped),
            "num_dev": sum(query.split == "dev" for query in queries),
            "mean_words": round(sum(num_words(query.text) for query in queries) / len(queries), 1),
            "origin": origin,
            **asked.used,
            "profile": query_profile([query.text for query in queries]),
        }

    def dry_run(self) -> Summary:
        """Count the queries and estimate their cost. Asks no chat model."""
        wanted, flagged = _wanted(self)
        num_skills = len(wanted) // self.num_queries_per_skill
        cost = (
            {}
            if isinstance(self.llm, OwnTextConfig)
            else estimate_cost(_questions(self, self.llm, wanted))
        )
        counts = {"num_skills": num_skills, "num_flagged": len(flagged), "num_asked": len(wanted)}
        return counts | {"origin": self.origin} | cost


@dataclass(frozen=True, slots=True)
class WantedQuery:
    """The `number`-th query of a skill; `is_terse`, in few words."""

    query_id: str
    skill_id: str
    skill: Skill
    number: int
    is_terse: bool


def _wanted(config: Synthesize) -> tuple[list[WantedQuery], list[Dropped]]:
    """The queries to be made, skill by skill, and the skills left out because they are flagged."""
    usable, flagged = (
        unflagged_skills(config.pool)
        if config.flagged == "leave_out"
        else (read_skills(config.pool), [])
    )
    if not usable and not flagged:
        raise SkilltrainError("empty-pool", "the pool holds no skill", where=config.pool)
    # Six digits for all that tells one run's queries from another's of the same skills, so that both can be merged.
    parts = config.origin, config.seed, config.num_words, config.terse_share, config.body_chars
    parts += (
        (config.prompt, config.style) if (config.prompt, config.style) != ("styles", None) else ()
    )
    run = hashlib.sha256(repr(parts).encode()).hexdigest()[:6]
    wanted: list[WantedQuery] = []
    for skill in sample_skills(usable, config.max_skills, config.seed):
        for number in range(1, config.num_queries_per_skill + 1):
            is_terse = is_drawn(config.terse_share, config.seed, "terse", skill.skill_id, number)
            query_id = f"{skill.skill_id}#{run}-{number}"
            wanted.append(WantedQuery(query_id, skill.skill_id, skill, number, is_terse))
    return wanted, flagged


def query_prompt(config: Synthesize, wanted: WantedQuery) -> tuple[str, str]:
    """What a chat model is told, so that it writes a query. Its style is the same in every attempt."""
    skill, styles = wanted.skill, PROMPTS["styles"]["drawn"]
    drawn = styles[
        stable_number(config.seed, "style", f"{skill.skill_id}#{wanted.number}") % len(styles)
    ]
    material = untrusted_skill(skill, 500, config.body_chars)
    texts = load_prompt(config.prompt)
    if texts.get("shows_category"):
        material = f"Category: {untrusted_line(skill.category or 'unknown')}\n{material}"
    return prompt(
        texts,
        material,
        number=wanted.number,
        total=config.num_queries_per_skill,
        length=TERSE if wanted.is_terse else f"about {config.num_words} words",
        lang=skill.lang or "en",
        style="terse" if wanted.is_terse else config.style or drawn,
    )


def _questions(
    config: Synthesize, llm: LLMConfig, wanted: Sequence[WantedQuery]
) -> Questions[WantedQuery, str]:
    seen: set[str] = set()

    def read(one: WantedQuery, answer: str) -> str:
        return fit_query(
            answer,
            seen,
            MAX_TERSE_WORDS if one.is_terse else config.num_words * 3 // 2,
            [one.skill],
        )

    tokens = round(config.num_words * TOKENS_PER_WORD)
    return questions_of(
        llm, wanted, partial(query_prompt, config), read, config.seed, tokens, "writing queries"
    )


def _from_own_text(
    config: Synthesize, wanted: Sequence[WantedQuery], out: Path
) -> Outcome[WantedQuery, str]:
    """Queries from the skills' own texts; SKILLS in `out` has the pool without the passages that they are."""
    written, dropped = list[tuple[WantedQuery, str]](), list[Dropped]()
    rest = {skill.skill_id: skill for skill in read_skills(config.pool)}
    texts, first = list[str](), dict[str, str]()
    for one in wanted:
        if one.number == 1:
            texts, rest[one.skill_id] = own_queries(
                one.skill, config.num_queries_per_skill, config.seed
            )
        if not texts:
            reason = "its own text holds no further passage that can be a query"
            dropped.append(Dropped(one.query_id, one.skill_id, "empty", reason))
            continue
        text = texts.pop(0)
        if (other_id := first.setdefault(text.casefold(), one.skill_id)) != one.skill_id:
            reason = "another skill has the same passage"
            dropped.append(
                Dropped(one.query_id, one.skill_id, "duplicate", reason, other_id=other_id)
            )
        else:
            written.append((one, text))
    write_table(rest.values(), SKILLS, out)
    if (flags := read_flags(config.pool)) is not None:
        write_flags(flags, out)
    return Outcome(written, dropped, {})


def _cluster_of(clusters: Path | None) -> dict[str, str]:
    """skill_id → the lowest one of its cluster, which decides the split: a grown pool seldom moves a cluster."""
    found = read_clusters(clusters, ()) if clusters is not None else {}
    lowest: dict[int, str] = {}
    return {
        skill_id: lowest.setdefault(cluster, skill_id)
        for skill_id, cluster in sorted(found.items())
    }
