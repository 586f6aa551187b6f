"""Stage `synthesize`: requests that need a skill of the pool and never name it (SkillRouter, section 4.1).

The paper has GPT-4o-mini write them from metadata and body, stratified by category, 160 words in the mean; here any
chat model does, or, without one, they are passages of the skills' own texts (own_text.py).
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.draws import sample_skills, stable_number
from skilltrain.data.own_text import own_queries
from skilltrain.data.query_profile import query_profile
from skilltrain.data.query_prompt import PromptName, WantedQuery, query_request, read_query
from skilltrain.data.screening import flags_to_leave_out, read_flags, write_flags
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLMConfig, OpenAIConfig, Questions, SmolLM2Config, ask_until, cost_of, open_llm
from skilltrain.records import OWN_TEXT, Dropped, Query, Skill, Verdict
from skilltrain.tables import (
    CLUSTERS,
    DROPPED,
    JUDGEMENTS,
    QUERIES,
    SKILLS,
    read_table,
    rows_of,
    skills_from_table,
    write_table,
)
from skilltrain.texts import num_words

_TOKENS_PER_WORD = 1.5  # of an answer, in the mean of English (1.3) and languages that take more
Written = list[tuple[WantedQuery, str]]


class OwnTextConfig(Config):
    """Passages of the skills' own texts: no model, no key, no network."""

    kind: Literal["own_text"] = "own_text"


class SynthesizeConfig(Config):
    """Write queries for the skills of a pool."""

    stage: Literal["synthesize"] = "synthesize"
    pool: InputPath = Field(description="SKILLS table, or the folder that holds it")
    llm: Annotated[OpenAIConfig | SmolLM2Config | OwnTextConfig, Field(discriminator="kind")] = Field(
        default=OwnTextConfig(), description="who writes: kind own_text (no model), openai or smollm2"
    )
    flagged: Literal["leave_out", "use"] = Field(
        default="leave_out", description="skills that the pool's safety screening flagged: no queries, or as any other"
    )
    num_queries_per_skill: int = Field(default=1, ge=1, le=1000, description="queries asked for each skill")
    max_skills: int | None = Field(default=None, ge=1, description="sample this many, stratified by category and lang")
    prompt: PromptName = Field(
        default="styles",
        description="styles: a style for each query; skillrouter: after the paper's table 2, with the skill's category",
    )
    style: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="style of all queries, in words; it stands in their origin, so that reports tell styles apart; "
        "null: one of seven, drawn for each",
    )
    num_words: int = Field(default=160, ge=5, description="length a model is asked for (the paper's mean)")
    max_words: int = Field(default=240, ge=5, description="longer answers are refused")
    terse_share: float = Field(
        default=0.0, ge=0, le=1, description="share of queries that a model writes in 4 to 14 words, as typed"
    )
    body_chars: int = Field(default=4000, ge=1, description="how much of a body a model is shown")
    max_attempts: int = Field(default=3, ge=1, description="answers tried for one query before it is dropped")
    dev_share: float = Field(default=0.05, ge=0, le=1, description="share of skills whose queries are split dev")
    clusters: InputPath | None = Field(
        default=None, description="CLUSTERS table: near-duplicate skills have their queries in one split"
    )
    seed: Seed = Field(default=0, description="decides sample, styles, split and the models' seeds")
    out: Path = Field(description="folder for queries, judgements and dropped; with own_text also for the skills "
                      "without the passages that became queries: the pool to train on")  # fmt: skip

    @model_validator(mode="after")
    def _style_is_used(self) -> "SynthesizeConfig":
        if self.style is not None and (self.prompt != "styles" or isinstance(self.llm, OwnTextConfig)):
            raise ValueError("style is for a chat model and prompt: styles")
        return self


def run_synthesize(config: SynthesizeConfig, out: Path) -> dict[str, Any]:
    """Write QUERIES, JUDGEMENTS and DROPPED into `out`; every query asked for is in one of the first and last.

    Interrupted runs lose nothing: a model's answers are cached, and a new run finds them there. Raises SkilltrainError
    where no query was made at all.
    """
    pool, flagged, wanted = _read_pool(config)
    used: dict[str, Any] = {}
    if isinstance(config.llm, OwnTextConfig):
        written, dropped = _from_own_text(config, pool, wanted, out)
    else:
        questions = _questions(config, config.llm, wanted)
        cost_of(questions)
        asked = ask_until(questions)
        written, dropped, used = asked.values, asked.dropped, asked.used
    num_skills = len(wanted) // config.num_queries_per_skill
    if not written:
        first = dropped[0].reason if dropped else "every skill is flagged"
        fix = "answers are kept in llm.cache; set another seed to have others asked for" if used else ""
        raise SkilltrainError(f"made no query for {num_skills} skills; the first reason: {first}", fix=fix)

    origin, split_of = _origin(config), _splits(config)
    queries = [Query(ask.query_id, text, "single", origin, split_of(ask.skill_id)) for ask, text in written]
    required = {"verdict": str(Verdict.REQUIRED), "judge": origin}
    judgements = [{"query_id": ask.query_id, "skill_id": ask.skill_id} | required for ask, _ in written]
    dropped = [Dropped("", i, "flagged", "the safety screening flagged the skill") for i in flagged] + dropped
    write_table(rows_of(queries), QUERIES, out)
    write_table(judgements, JUDGEMENTS, out)
    write_table([row.row() for row in dropped], DROPPED, out)
    return {
        "num_skills": num_skills, "num_asked": len(wanted),
        "num_queries": len(queries), "num_dropped": len(dropped),
        "dropped": dict(sorted(Counter(row.filter for row in dropped).items())),
        "num_dev": sum(query.split == "dev" for query in queries),
        "mean_words": round(sum(num_words(text) for _, text in written) / len(written), 1), "origin": origin, **used,
        "profile": query_profile([query.text for query in queries]),
    }  # fmt: skip


def plan_synthesize(config: SynthesizeConfig) -> dict[str, Any]:
    """What a run would ask for and about what it would cost, found without asking anybody (`--dry-run`)."""
    _, flagged, wanted = _read_pool(config)
    num_skills = len(wanted) // config.num_queries_per_skill
    counts = {"num_skills": num_skills, "num_flagged": len(flagged), "num_asked": len(wanted)}
    cost = {} if isinstance(config.llm, OwnTextConfig) else cost_of(_questions(config, config.llm, wanted))
    return counts | {"origin": _origin(config)} | cost


def _read_pool(config: SynthesizeConfig) -> tuple[list[Skill], list[str], list[WantedQuery]]:
    """(the pool, the ids left out because they are flagged, the queries to be made of the others)."""
    pool = skills_from_table(read_table(config.pool, SKILLS))
    if not pool:
        raise SkilltrainError("the pool holds no skill", where=config.pool)
    left_out = flags_to_leave_out(config.pool) if config.flagged == "leave_out" else {}
    usable = [skill for skill in pool if skill.skill_id not in left_out]
    flagged = [skill.skill_id for skill in pool if skill.skill_id in left_out]
    # Six digits for all that tells one run's queries from another's of the same skills, so that both can be merged.
    parts = _origin(config), config.seed, config.num_words, config.terse_share, config.body_chars
    parts += (config.prompt, config.style) if (config.prompt, config.style) != ("styles", None) else ()
    run, total = hashlib.sha256(repr(parts).encode()).hexdigest()[:6], config.num_queries_per_skill
    wanted = [
        WantedQuery(f"{skill.skill_id}#{run}-{number}", skill, number, total, config.seed, is_terse, config.style or "")
        for skill in sample_skills(usable, config.max_skills, config.seed)
        for number in range(1, total + 1)
        for is_terse in [stable_number(config.seed, "terse", skill.skill_id, number) < config.terse_share * 2**64]
    ]
    return pool, flagged, wanted


def _origin(config: SynthesizeConfig) -> str:
    """Who writes, as the tables name it."""
    if isinstance(config.llm, OwnTextConfig):
        return OWN_TEXT
    return f"llm:{open_llm(config.llm).model}" + (f", {config.style}" if config.style else "")


def _questions(config: SynthesizeConfig, llm: LLMConfig, wanted: list[WantedQuery]) -> Questions[WantedQuery, str]:
    """What a chat model is asked."""
    return Questions(
        llm=open_llm(llm),
        asked=wanted,
        request=partial(query_request, config.prompt, config.num_words, config.body_chars),
        check=partial(read_query, set(), config.max_words),
        attempts=config.max_attempts,
        answer_tokens=round(config.num_words * _TOKENS_PER_WORD),
        description="writing queries",
    )


def _from_own_text(
    config: SynthesizeConfig, pool: list[Skill], wanted: list[WantedQuery], out: Path
) -> tuple[Written, list[Dropped]]:
    """Queries from the skills' own texts; SKILLS in `out` has the pool without the passages that they are."""
    written: Written = []
    dropped: list[Dropped] = []
    rest = {skill.skill_id: skill for skill in pool}
    texts: list[str] = []
    first: dict[str, str] = {}
    for ask in wanted:
        if ask.number == 1:
            texts, rest[ask.skill_id] = own_queries(ask.skill, ask.total, config.seed)
        if ask.number > len(texts):
            reason = "its own text holds no further passage that can be a query"
            dropped.append(Dropped(ask.query_id, ask.skill_id, "empty", reason))
            continue
        text = texts[ask.number - 1]
        if (other_id := first.setdefault(text.casefold(), ask.skill_id)) != ask.skill_id:
            reason = "another skill has the same passage"
            dropped.append(Dropped(ask.query_id, ask.skill_id, "duplicate", reason, other_id=other_id))
        else:
            written.append((ask, text))
    write_table(rows_of(rest.values()), SKILLS, out)
    if (flags := read_flags(config.pool)) is not None:
        write_flags(flags, out)
    return written, dropped


def _splits(config: SynthesizeConfig) -> Callable[[str], str]:
    """skill_id → `dev` or `train`. All queries of a skill and of its near-duplicates stay together.

    A cluster goes where its lowest skill_id goes, so that a grown pool seldom moves one.
    """
    lowest: dict[int, str] = {}
    group_of: dict[str, str] = {}
    if config.clusters is not None:
        for row in sorted(read_table(config.clusters, CLUSTERS).to_pylist(), key=lambda row: row["skill_id"]):
            group_of[row["skill_id"]] = lowest.setdefault(row["cluster"], row["skill_id"])

    def split_of(skill_id: str) -> str:
        number = stable_number(config.seed, "split", group_of.get(skill_id, skill_id))
        return "dev" if number < config.dev_share * 2**64 else "train"

    return split_of
