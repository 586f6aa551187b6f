"""Stage `rewrite`: queries as a person would type them, tersely, or as a paraphrase; R3's prompt is not public."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.asking import PROMPTS, TOKENS_PER_WORD, ask, prompt, questions_of
from skilltrain.data.query_texts import MAX_TERSE_WORDS, fit_query
from skilltrain.errors import SkilltrainError
from skilltrain.llm import AnswerError, LLMConfig, Questions, estimate_cost
from skilltrain.llm.untrusted import untrusted_line, untrusted_text
from skilltrain.records import Query, Skill, counted, positives_of
from skilltrain.tables import JUDGEMENTS, read_skills, read_table, select_judged, write_queries
from skilltrain.texts import language_of, num_words


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A query, and the skills that answer it, which it must not name."""

    query_id: str
    query: Query
    golds: tuple[Skill, ...]
    skill_id: str = ""


class RewriteConfig(Config):
    """Have a chat model rewrite queries; what is judged of them stays."""

    stage: Literal["rewrite"] = "rewrite"
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    pool: InputPath = Field(
        description="SKILLS table: a query must not name a skill that answers it"
    )
    llm: LLMConfig = Field(description="the chat model that rewrites")
    style: Literal["typed", "paraphrase", "terse"] = Field(
        default="typed", description="terse: in 4 to 14 words"
    )
    seed: Seed = Field(default=0, description="decides the model's seeds")
    out: Path = Field(description="folder for queries, judgements and dropped")


def run_rewrite(config: RewriteConfig, out: Path) -> dict[str, Any]:
    """Write QUERIES, JUDGEMENTS and DROPPED with what could not be rewritten. SkilltrainError: no query could."""
    asked = ask(_questions(config))
    if not asked.values:
        raise SkilltrainError(
            f"rewrote no query; the first reason: {asked.dropped[0].reason}", where=config.queries
        )
    origin = f"{config.style} by llm:{config.llm.model}"
    written = {
        one.query_id: replace(one.query, text=text, origin=origin) for one, text in asked.values
    }
    judged = [
        row
        for row in read_table(config.queries, JUDGEMENTS).to_pylist()
        if row["query_id"] in written
    ]
    write_queries(written.values(), judged, asked.dropped, out)
    return {
        "num_asked": len(written) + len(asked.dropped),
        "num_rewritten": len(written),
        "mean_words": round(
            sum(num_words(query.text) for query in written.values()) / len(written), 1
        ),
        "dropped": counted(row.filter for row in asked.dropped),
        **asked.used,
    }


def plan_rewrite(config: RewriteConfig) -> dict[str, Any]:
    """What a run would ask for and about what it would cost, found without asking anybody (`--dry-run`)."""
    return estimate_cost(_questions(config))


def _questions(config: RewriteConfig) -> Questions[Rewriting, str]:
    skills = {skill.skill_id: skill for skill in read_skills(config.pool)}
    wanted: list[Rewriting] = []
    for query, judged in select_judged(config.queries, None):
        golds = tuple(skills[skill_id] for skill_id in positives_of(judged) if skill_id in skills)
        wanted.append(Rewriting(query.query_id, query, golds))
    seen = {one.query.text.casefold() for one in wanted}
    style = PROMPTS["rewrite"]["styles"][config.style]

    def prompt_of(one: Rewriting) -> tuple[str, str]:
        names = "; ".join(untrusted_line(skill.name) for skill in one.golds) or "(none)"
        return prompt("rewrite", untrusted_text(one.query.text, 4000), style=style, names=names)

    def read(one: Rewriting, answer: str) -> str:
        most = MAX_TERSE_WORDS + (0 if config.style == "terse" else 2 * num_words(one.query.text))
        if (was := language_of(one.query.text)) and language_of(answer) not in (was, None):
            raise AnswerError("language", "it is in another language than the query")
        return fit_query(answer, seen, most, one.golds)

    tokens = round(TOKENS_PER_WORD * sum(num_words(one.query.text) for one in wanted) / len(wanted))
    return questions_of(
        config.llm, wanted, prompt_of, read, config.seed, tokens, "rewriting queries"
    )
