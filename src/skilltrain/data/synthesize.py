"""Stage `synthesize`: requests that need a skill and do not name it (SkillRouter, section 4.1).

In the paper GPT-4o-mini writes them, with 160 words on average. Here any chat model can write them,
or own_text.py makes them without a model. Every planned query is either in QUERIES or in DROPPED.

Notes:
- Ids of queries hold a hash of the settings, so that the queries of several runs can be merged. The
  default prompt and style are not hashed: ids are then as in earlier versions of the package, which
  lacked these two settings.
- The styles to draw from belong to the prompt "styles", but they are drawn for every prompt.
- A query that several skills have does not tell which of them is right, so it is dropped.
- A skill may have fewer passages than planned queries.
- The lowest skill id of a cluster decides the split of the cluster. It seldom changes when the pool
  grows.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from skilltrain.config import Config, InputMark, InputPath, Seed
from skilltrain.data.llm_stage import (
    PROMPTS,
    TOKENS_PER_WORD,
    ask,
    load_prompt,
    questions_of,
    render_prompt,
    unflagged_skills,
)
from skilltrain.data.near_duplicates import read_clusters
from skilltrain.data.own_text import own_queries
from skilltrain.data.query_texts import MAX_TERSE_WORDS, query_profile, usable_query
from skilltrain.data.sampling import is_drawn, sample_skills, stable_number
from skilltrain.data.screening import read_flags, write_flags
from skilltrain.errors import SkilltrainError
from skilltrain.llm import LLMConfig, Outcome, Questions, estimate_cost
from skilltrain.llm.prompt_files import check_prompt
from skilltrain.llm.untrusted import untrusted_line, untrusted_skill, untrusted_text
from skilltrain.records import OWN_TEXT, Dropped, Judgement, Query, Skill, Verdict, counted
from skilltrain.stage import Stage, Summary
from skilltrain.tables import SKILLS, read_skills, write_queries, write_table
from skilltrain.texts import num_words

# Length of a terse query as a prompt says it. The style of `rewrite` begins with "in".
TERSE_LENGTH: Final = PROMPTS["rewrite"]["styles"]["terse"].removeprefix("in ")


_DESCRIPTION_CHARS = 500


class OwnTextConfig(Config):
    """Settings for queries from the skills' own texts, which need no model, key or network."""

    kind: Literal["own_text"] = "own_text"


def _as_path(name: object) -> object:
    """Return the name of a YAML file as a path, and everything else unchanged."""
    is_file = isinstance(name, str) and name.endswith((".yaml", ".yml"))
    return Path(str(name)) if is_file else name


def _check_renders(name: str | Path) -> str | Path:
    """Return the name or path of a prompt. Raises ValueError if it cannot be used."""
    placeholders = ("name", "category", "description", "number", "total", "length", "lang", "style")
    values = dict.fromkeys(placeholders, "") | {"body": "(body)", "fenced": "(body)"}
    # Render the prompt with empty values. The body of a skill must appear in its messages, by the
    # placeholder `body` or `fenced`.
    try:
        check_prompt(load_prompt(name), values, {"body or fenced": "(body)"}, name)
    except SkilltrainError as error:
        raise ValueError(f"{name}: {error.problem}; {error.fix}") from error
    return name


PromptName = Annotated[
    str | Path, InputMark(), BeforeValidator(_as_path), AfterValidator(_check_renders)
]
"""A plug-in of the kind `prompt`, or the path of a YAML file."""


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
        default="leave_out", description="what to do with skills that the screening flagged"
    )
    num_queries_per_skill: int = Field(
        default=1, ge=1, le=1000, description="queries asked for each skill"
    )
    max_skills: int | None = Field(
        default=None, ge=1, description="sample this many, stratified by category and lang"
    )
    prompt: PromptName = Field(
        default="styles",
        description="styles: a style for each query; skillrouter: our words for table 2; or a YAML "
        "file with system and user, and {{ body }} or {{ fenced }} in them",
    )
    style: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="one style for all queries, in words, also part of their origin; null: one of "
        "seven, drawn for each query",
    )
    num_words: int = Field(
        default=160,
        ge=5,
        description="words to ask for (mean of the paper); over 1.5 times as many are refused",
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
        description="folder for queries, judgements, dropped; with own_text also the pool without "
        "the passages used"
    )

    @model_validator(mode="after")
    def _check_style(self) -> "Synthesize":
        uses_style = self.prompt == "styles" and isinstance(self.llm, LLMConfig)
        if self.style is not None and not uses_style:
            raise ValueError("style is for a chat model and prompt: styles")
        return self

    @property
    def origin(self) -> str:
        """Author of the queries, as the tables name it."""
        if isinstance(self.llm, OwnTextConfig):
            return OWN_TEXT
        if self.style is not None:
            return f"llm:{self.llm.model}, {self.style}"
        return f"llm:{self.llm.model}"

    def run(self, out: Path) -> Summary:
        """Make queries for skills, and write QUERIES, JUDGEMENTS and DROPPED.

        Args:
            out: Folder to write the tables to.

        Returns:
            Counts for the summary, and the profile of the queries.
        """
        # `flagged` has a row of DROPPED for each skill that the safety screening flagged.
        planned, flagged = _plan_queries(self)
        # The same number of queries is planned for each skill.
        num_skills = len(planned) // self.num_queries_per_skill
        # Get the texts of the queries: from the skills' own texts, or from a chat model.
        if isinstance(self.llm, OwnTextConfig):
            outcome = _from_own_text(self, planned, out)
        else:
            outcome = ask(_questions(self, self.llm, planned))
        if not outcome.values:
            reason = outcome.dropped[0].reason if outcome.dropped else "every skill is flagged"
            problem = f"made no query for {num_skills} skills; the first reason: {reason}"
            fix = ""
            if isinstance(self.llm, LLMConfig):
                # The same seed would get the same answers from the cache.
                fix = "llm.cache holds these answers; set another seed to get other answers"
            raise SkilltrainError("nothing-generated", problem, fix=fix)

        queries, judgements = self._with_judgements(outcome.values)
        dropped = flagged + outcome.dropped
        write_queries(queries, judgements, dropped, out)

        texts = [query.text for query in queries]
        mean_words = sum(map(num_words, texts)) / len(texts)
        return {
            "num_skills": num_skills,
            "num_asked": len(planned),
            "num_queries": len(queries),
            "num_dropped": len(dropped),
            "dropped": counted(row.filter for row in dropped),
            "num_dev": sum(query.split == "dev" for query in queries),
            "mean_words": round(mean_words, 1),
            "origin": self.origin,
            **outcome.used,  # tokens and cost
            "profile": query_profile(texts),
        }

    def _with_judgements(
        self, texts: Sequence[tuple["PlannedQuery", str]]
    ) -> tuple[list[Query], list[Judgement]]:
        """Return the written queries with a split, and the judgement of each query.

        All skills of a near-duplicate cluster are in one split.

        Args:
            texts: Pairs of a planned query and its text.
        """
        # By skill id, the first skill id of its cluster; empty without `clusters`.
        first_id_of = _first_ids_of_clusters(self.clusters)
        queries: list[Query] = []
        judgements: list[Judgement] = []
        for planned, text in texts:
            # The lowest skill id of the cluster decides, so that the cluster is in one split.
            split_key = first_id_of.get(planned.skill_id, planned.skill_id)
            is_dev = is_drawn(self.dev_share, self.seed, "split", split_key)
            split = "dev" if is_dev else "train"
            # The kind `single` is a query that needs one skill.
            queries.append(
                Query(planned.query_id, text, kind="single", origin=self.origin, split=split)
            )
            judgements.append(
                Judgement(planned.query_id, planned.skill_id, Verdict.REQUIRED, self.origin)
            )
        return queries, judgements

    def dry_run(self) -> Summary:
        """Count the queries and estimate their cost. Asks no chat model."""
        planned, flagged = _plan_queries(self)
        summary = {
            "num_skills": len(planned) // self.num_queries_per_skill,
            "num_flagged": len(flagged),
            "num_asked": len(planned),
            "origin": self.origin,
        }
        if isinstance(self.llm, LLMConfig):
            summary |= estimate_cost(_questions(self, self.llm, planned))
        return summary


@dataclass(frozen=True, slots=True)
class PlannedQuery:
    """A query to be written for a skill.

    Attributes:
        number: Number of the query among those of the skill, from 1.
        is_terse: Whether the query has few words.
    """

    query_id: str
    skill_id: str
    skill: Skill
    number: int
    is_terse: bool


def _plan_queries(config: Synthesize) -> tuple[list[PlannedQuery], list[Dropped]]:
    """Plan the queries to write.

    Args:
        config: Settings of the stage.

    Returns:
        The queries, skill by skill, and rows of DROPPED for flagged skills.
    """
    flagged: list[Dropped] = []
    if config.flagged == "leave_out":
        skills, flagged = unflagged_skills(config.pool)
    else:
        skills = read_skills(config.pool)
    if not skills and not flagged:
        raise SkilltrainError("empty-pool", "the pool holds no skill", where=config.pool)

    # Ids hold a hash of the settings, so that the queries of several runs can be merged.
    run_hash = _hash_settings(config)
    planned: list[PlannedQuery] = []
    for skill in sample_skills(skills, config.max_skills, config.seed):
        for number in range(1, config.num_queries_per_skill + 1):
            # Draw whether the query is terse (short). The same seed and skill always draw the same.
            is_terse = is_drawn(config.terse_share, config.seed, "terse", skill.skill_id, number)
            query_id = f"{skill.skill_id}#{run_hash}-{number}"
            planned.append(PlannedQuery(query_id, skill.skill_id, skill, number, is_terse))
    return planned, flagged


def _hash_settings(config: Synthesize) -> str:
    """Return a short hash of the settings, which is a part of each query id."""
    settings = (
        config.origin,
        config.seed,
        config.num_words,
        config.terse_share,
        config.body_chars,
    )
    # Leave out the default prompt and style. So ids stay as in versions without these settings.
    if config.prompt != "styles" or config.style is not None:
        settings += (config.prompt, config.style)
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:6]


def query_prompt(config: Synthesize, query: PlannedQuery) -> tuple[str, str]:
    """Return the system and the user message for one query, the same in every attempt.

    Args:
        config: Settings of the stage.
        query: The planned query.
    """
    style = "terse" if query.is_terse else _choose_style(config, query)
    length = TERSE_LENGTH if query.is_terse else f"about {config.num_words} words"
    skill = query.skill
    # Strangers wrote these texts. `untrusted_line` and `untrusted_text` cut them, remove invisible
    # characters, and break up tokens that end a turn of a chat.
    fields = {
        "name": untrusted_line(skill.name),
        "category": untrusted_line(skill.category or "unknown"),
        "description": untrusted_line(skill.description, _DESCRIPTION_CHARS),
        "body": untrusted_text(skill.body, config.body_chars),
    }

    texts = load_prompt(config.prompt)
    # The same texts as one block, which prompts can show between two marked lines.
    material = untrusted_skill(skill, _DESCRIPTION_CHARS, config.body_chars)
    # Some prompts also show the category of the skill.
    if texts.get("shows_category"):
        material = f"Category: {fields['category']}\n{material}"
    return render_prompt(
        texts,
        material,
        **fields,
        number=query.number,
        total=config.num_queries_per_skill,
        length=length,
        lang=skill.lang or "en",
        style=style,
    )


def _choose_style(config: Synthesize, query: PlannedQuery) -> str:
    """Return the style of all queries, or draw one if the settings give none."""
    if config.style is not None:
        return config.style
    styles = PROMPTS["styles"]["drawn"]
    number = stable_number(config.seed, "style", f"{query.skill_id}#{query.number}")
    return styles[number % len(styles)]


def _questions(
    config: Synthesize, llm: LLMConfig, planned: Sequence[PlannedQuery]
) -> Questions[PlannedQuery, str]:
    """Return the questions that ask the chat model for the queries.

    Args:
        config: Settings of the stage.
        llm: The chat model.
        planned: The queries to write.
    """
    earlier_texts: set[str] = set()  # `usable_query` adds to it

    def read(query: PlannedQuery, answer: str) -> str:
        # A query may have 1.5 times as many words as the prompt asks for.
        max_words = MAX_TERSE_WORDS if query.is_terse else config.num_words * 3 // 2
        return usable_query(answer, earlier_texts, max_words, [query.skill])

    return questions_of(
        llm,
        planned,
        partial(query_prompt, config),
        read,
        seed=config.seed,
        answer_tokens=round(config.num_words * TOKENS_PER_WORD),
        description="writing queries",
    )


def _from_own_text(
    config: Synthesize, planned: Sequence[PlannedQuery], out: Path
) -> Outcome[PlannedQuery, str]:
    """Make queries from the skills' own texts.

    Also writes to `out` the safety flags, and the pool without the passages that became queries.

    Args:
        config: Settings of the stage.
        planned: The queries to make.
        out: Folder to write the pool and the flags to.

    Returns:
        Planned queries with their texts, and rows of DROPPED for the others.
    """
    pool = {skill.skill_id: skill for skill in read_skills(config.pool)}
    texts_by_skill: dict[str, list[str]] = {}
    skill_ids = dict.fromkeys(query.skill_id for query in planned)  # without repetitions
    for skill_id in skill_ids:
        texts, remaining_skill = own_queries(
            pool[skill_id], config.num_queries_per_skill, config.seed
        )
        texts_by_skill[skill_id] = texts
        # The skill in the new pool lacks the passages that became queries. Otherwise, a query would
        # repeat the text of its skill word for word.
        pool[skill_id] = remaining_skill

    # Write the new pool, with the safety flags of the old pool.
    write_table(pool.values(), SKILLS, out)
    flags = read_flags(config.pool)
    if flags is not None:
        write_flags(flags, out)
    return _assign_texts(planned, texts_by_skill)


def _assign_texts(
    planned: Sequence[PlannedQuery], texts_by_skill: Mapping[str, Sequence[str]]
) -> Outcome[PlannedQuery, str]:
    """Give each planned query a text of its skill, and drop queries that get none.

    Args:
        planned: The queries to make.
        texts_by_skill: Passages of each skill that can be queries, by skill id.

    Returns:
        Planned queries with their texts, and rows of DROPPED for the others.
    """
    # Ids of the skills with each text, by casefolded text.
    owners_by_text: defaultdict[str, list[str]] = defaultdict(list)
    for skill_id, texts in texts_by_skill.items():
        for text in texts:
            owners_by_text[text.casefold()].append(skill_id)

    values: list[tuple[PlannedQuery, str]] = []
    dropped: list[Dropped] = []
    for query in planned:
        skill_id = query.skill_id
        texts = texts_by_skill[skill_id]
        # A skill may have fewer passages than planned queries.
        if query.number > len(texts):
            reason = "its own text holds no further passage that can be a query"
            dropped.append(Dropped(query.query_id, skill_id, filter="empty", reason=reason))
            continue
        text = texts[query.number - 1]
        # A passage that several skills have does not tell which of them is right, so drop it.
        owners = owners_by_text[text.casefold()]
        other_ids = [owner for owner in owners if owner != skill_id]
        if other_ids:
            reason = "another skill has the same passage"
            dropped.append(
                Dropped(
                    query.query_id,
                    skill_id,
                    filter="duplicate",
                    reason=reason,
                    other_id=other_ids[0],
                )
            )
        else:
            values.append((query, text))
    return Outcome(values, dropped, used={})  # no tokens and no cost


def _first_ids_of_clusters(clusters: Path | None) -> dict[str, str]:
    """Return the lowest skill id of each skill's cluster, by skill id; empty without `clusters`.

    Args:
        clusters: Path of the CLUSTERS table, which numbers the clusters of near-duplicates.
    """
    if clusters is None:
        return {}
    # Skill ids are visited in order, so the first id of a cluster is its lowest id.
    first_ids: dict[int, str] = {}  # by cluster
    return {
        skill_id: first_ids.setdefault(cluster, skill_id)
        for skill_id, cluster in sorted(read_clusters(clusters, ()).items())
    }
