"""Stage `rewrite`: rewrite queries as a person would type them, tersely, or as a paraphrase.

R3's prompt is not public; this one is ours.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from skilltrain.config import InputPath, Seed
from skilltrain.data.llm_stage import PROMPTS, TOKENS_PER_WORD, ask, questions_of, render_prompt
from skilltrain.data.query_texts import MAX_TERSE_WORDS, usable_query
from skilltrain.errors import SkilltrainError
from skilltrain.llm import AnswerError, LLMConfig, Questions, estimate_cost
from skilltrain.llm.untrusted import untrusted_line, untrusted_text
from skilltrain.records import Query, Skill, counted, positives_of
from skilltrain.stage import Stage, Summary
from skilltrain.tables import JUDGEMENTS, read_skills, read_table, select_judged, write_queries
from skilltrain.texts import language_of, num_words

_EXTRA_WORDS = 20  # that a new text may have, besides twice as many as the old text


class Rewriting(NamedTuple):
    """A query to rewrite, and the skills that answer it, which it must not name."""

    query_id: str
    query: Query
    golds: list[Skill]
    skill_id: str = ""


class Rewrite(Stage):
    """Rewrite queries with a chat model: as a person types, in other words, or tersely."""

    example = "queries=runs/judged pool=runs/pool llm.kind=openai style=typed out=runs/typed"
    result = "{num_rewritten} of {num_asked} queries rewritten; left out: {dropped}"
    next_command = "mine pool={pool} queries={out} encoder.source={base} out={near}/mined"

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

    def run(self, out: Path) -> Summary:
        """Write QUERIES, JUDGEMENTS and DROPPED.

        Raises:
            SkilltrainError: No query was rewritten.
        """
        outcome = ask(_questions(self))
        if not outcome.values:
            problem = f"rewrote no query; the first reason: {outcome.dropped[0].reason}"
            raise SkilltrainError("nothing-generated", problem, where=self.queries)

        # The judgements of a query stay valid for its new text.
        origin = f"{self.style} by llm:{self.llm.model}"
        queries = {
            item.query_id: replace(item.query, text=text, origin=origin)
            for item, text in outcome.values
        }
        rows = read_table(self.queries, JUDGEMENTS).to_pylist()
        judgements = [row for row in rows if row["query_id"] in queries]
        write_queries(queries.values(), judgements, outcome.dropped, out)
        total_words = sum(num_words(query.text) for query in queries.values())
        return {
            "num_asked": len(queries) + len(outcome.dropped),
            "num_rewritten": len(queries),
            "mean_words": round(total_words / len(queries), 1),
            "dropped": counted(row.filter for row in outcome.dropped),
            **outcome.used,
        }

    def dry_run(self) -> Summary:
        """Estimate the cost. Asks no chat model."""
        return estimate_cost(_questions(self))


def _questions(config: Rewrite) -> Questions[Rewriting, str]:
    """Return the questions to the chat model, one for each query."""
    skills = {skill.skill_id: skill for skill in read_skills(config.pool)}
    items = []
    for query, verdicts in select_judged(config.queries, None):
        golds = [skills[skill_id] for skill_id in positives_of(verdicts) if skill_id in skills]
        items.append(Rewriting(query.query_id, query, golds))
    # Texts that a new text must not repeat: the old queries, and the earlier new texts.
    # `usable_query` adds each new text to them.
    forbidden_texts = {item.query.text.casefold() for item in items}
    style = PROMPTS["rewrite"]["styles"][config.style]

    def render(item: Rewriting) -> tuple[str, str]:
        """Return the system message and the user message for a query."""
        # The new text must not name the skills that answer the query.
        names = "; ".join(untrusted_line(skill.name) for skill in item.golds) or "(none)"
        text = untrusted_text(item.query.text, max_chars=4000)
        return render_prompt(PROMPTS["rewrite"], text, style=style, names=names)

    def read_new_text(item: Rewriting, answer: str) -> str:
        """Return the new text in an answer. Raises AnswerError if it is not usable."""
        text = item.query.text  # the old text
        if config.style == "terse":
            max_words = MAX_TERSE_WORDS
        else:
            max_words = 2 * num_words(text) + _EXTRA_WORDS

        # None: the language is unknown.
        old_language = language_of(text)
        new_language = language_of(answer)
        if old_language and new_language and old_language != new_language:
            raise AnswerError("language", "it is in another language than the query")
        return usable_query(answer, forbidden_texts, max_words, item.golds)

    # The estimate of the cost assumes that a new text is as long as the old text.
    mean_words = sum(num_words(item.query.text) for item in items) / len(items)
    num_tokens = round(TOKENS_PER_WORD * mean_words)
    return questions_of(
        config.llm, items, render, read_new_text, config.seed, num_tokens, "rewriting queries"
    )
