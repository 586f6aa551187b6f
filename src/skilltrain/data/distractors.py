"""Stage `distractors`: what makes an Easy tier Hard (SkillRouter, section 3 and appendix B).

The paper has GPT-4o-mini write 780 skills that resemble gold skills and are functionally distinct. The table made
here is one more source for the stage `pool`: Hard = Easy + distractors. Three things differ on purpose: a request asks
for one distractor, so that what fails is asked for again alone; the other gold skills of the same tasks are named as
what must not be written either, for they often solve the "different problem of the same domain"; and no query is
shown, so that the benchmark's words do not leak into the pool.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.asking import PROMPTS, Line, ask, prompt, questions_of
from skilltrain.data.contamination import open_benchmarks
from skilltrain.data.near_duplicates import Trigrams, jaccard, word_trigrams
from skilltrain.data.pool.skill_file import split_header
from skilltrain.llm import AnswerError, LLMConfig, Questions, estimate_cost, read_object
from skilltrain.llm.untrusted import untrusted_line, untrusted_skill
from skilltrain.records import Skill, counted
from skilltrain.tables import DROPPED, SKILLS, write_table
from skilltrain.texts import clean_text, name_key, num_words

STRATEGIES: Final[dict[str, str]] = PROMPTS["distractor"]["strategies"]
ASKED_WORDS: Final = 400, 1200
ACCEPTED_WORDS: Final = 150, 2400  # of a body
MAX_JACCARD: Final = 0.6  # of a body's trigrams with those of a gold body or another distractor, as in stage `filter`
# Of the longest answer asked for, as a JSON string: 1.3 a word in English prose, more in code and other scripts.
NUM_TOKENS: Final = math.ceil(ASKED_WORDS[1] * 1.6) + 100
_MAX_SIBLINGS, _BODY_CHARS = 12, 4000  # that the model is shown


class DistractorsConfig(Config):
    """Write skills that resemble the gold skills of a benchmark and do not do their work."""

    stage: Literal["distractors"] = "distractors"
    benchmark: InputPath = Field(
        description="benchmark whose gold skills are resembled; queries of split train aside"
    )
    pool: InputPath | None = Field(
        default=None, description="SKILLS with the gold skills that the benchmark lacks"
    )
    llm: LLMConfig = Field(description="who writes; needs a long llm.max_tokens, such as 3000")
    num_distractors: int = Field(
        default=3, ge=1, le=9, description="for each gold skill, in three strategies by turns"
    )
    seed: Seed = Field(default=0, description="decides the model's seeds")
    out: Path = Field(description="folder for skills and dropped")

    @model_validator(mode="after")
    def _enough_tokens(self) -> "DistractorsConfig":
        if self.llm.max_tokens < NUM_TOKENS:
            few = f"llm.max_tokens is {self.llm.max_tokens}, too few for a body of {ASKED_WORDS[1]} words"
            raise ValueError(f"{few}; set llm.max_tokens={NUM_TOKENS} or more")
        return self


@dataclass(frozen=True, slots=True)
class Distractor:
    """One distractor to be written: the `number`-th of a strategy's `total` for a gold skill.

    `siblings` are the other gold skills of the queries that need the gold skill.
    """

    skill_id: str
    gold: Skill
    siblings: tuple[Skill, ...]
    strategy: str
    number: int
    total: int
    query_id: str = ""


def run_distractors(config: DistractorsConfig, out: Path) -> dict[str, Any]:
    """Write SKILLS and DROPPED into `out`; an id says which gold skill it was made after, and how.

    Every distractor asked for is in SKILLS or, with its last fault, in DROPPED. The stage `pool` screens them.
    """
    questions = _questions(config)
    asked = ask(questions)
    skills = [skill for _, skill in asked.values]
    write_table(skills, SKILLS, out)
    write_table(asked.dropped, DROPPED, out)
    return _num_asked(questions) | {
        "num_distractors": len(skills),
        "num_dropped": len(asked.dropped),
        "dropped": counted(row.filter for row in asked.dropped),
        **asked.used,
    }


def plan_distractors(config: DistractorsConfig) -> dict[str, Any]:
    """What a run would ask for and what it would cost at most, found without asking anybody (`--dry-run`)."""
    questions = _questions(config)
    return _num_asked(questions) | estimate_cost(questions)


def _num_asked(questions: Questions[Distractor, Skill]) -> dict[str, Any]:
    num_golds = len({wanted.gold.skill_id for wanted in questions.items})
    return {"num_gold_skills": num_golds, "num_asked": len(questions.items)}


def _questions(config: DistractorsConfig) -> Questions[Distractor, Skill]:
    """For each gold skill its distractors, in the strategies by turns."""
    golds, order, wanted = gold_skills(config), [*STRATEGIES], list[Distractor]()
    for gold, siblings in golds:
        for place in range(config.num_distractors):
            turn, which = divmod(place, len(order))
            total = len(range(which, config.num_distractors, len(order)))
            skill_id = f"distractor/{gold.skill_id}/{order[which]}" + (
                f"-{turn + 1}" if turn else ""
            )
            wanted.append(Distractor(skill_id, gold, siblings, order[which], turn + 1, total))
    known = [(gold, word_trigrams(gold.body)) for gold, _ in golds]

    def read(one: Distractor, answer: str) -> Skill:
        skill = read_draft(one, answer, f"distractors:{config.llm.model}")
        trigrams = word_trigrams(skill.body)
        _check(skill, trigrams, known, len(golds))
        known.append((skill, trigrams))
        return skill

    return questions_of(
        config.llm, wanted, _prompt, read, config.seed, NUM_TOKENS, "writing distractors"
    )


def gold_skills(config: DistractorsConfig) -> list[tuple[Skill, tuple[Skill, ...]]]:
    """The gold skills of the benchmark's queries, each with the other gold skills of its queries.

    Raises SkilltrainError where neither the benchmark's folder nor the pool holds one.
    """
    [benchmark] = open_benchmarks([config.benchmark], config.pool, need_golds=True)
    known = {gold.skill_id: gold for gold in benchmark.golds}
    siblings: dict[str, dict[str, None]] = {}
    for task in benchmark.tasks:
        gold = sorted(task.relevance.gold)
        for skill_id in gold:
            siblings.setdefault(skill_id, {}).update(
                dict.fromkeys(other for other in gold if other != skill_id)
            )
    return [(known[i], tuple(known[other] for other in others)) for i, others in siblings.items()]


def _prompt(wanted: Distractor) -> tuple[str, str]:
    """What a chat model is told, so that it writes a skill that resembles the gold skill in a search and is wrong."""
    gold = wanted.gold
    lines = [
        f"Category: {untrusted_line(gold.category or 'none given')}",
        untrusted_skill(gold, 500, _BODY_CHARS),
    ]
    siblings = [
        f"- {untrusted_line(one.name)}: {untrusted_line(one.description, 160)}"
        for one in wanted.siblings
    ]
    lines += ["Not these either:", *(siblings[:_MAX_SIBLINGS] or ["(none)"])]
    low, high = ASKED_WORDS
    return prompt(
        "distractor",
        "\n".join(lines),
        strategy=STRATEGIES[wanted.strategy],
        number=wanted.number,
        total=wanted.total,
        low=low,
        high=high,
        lang=gold.lang,
    )


class _Draft(BaseModel):
    """What an answer must hold: texts, and no other kind of value; keys that were not asked for are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    name: Annotated[Line, Field(min_length=1, max_length=100, pattern=r"\w")]
    description: Annotated[Line, Field(min_length=1, max_length=1500)]
    body: Annotated[
        str,
        AfterValidator(lambda text: split_header(clean_text(text))[1].strip()),
        Field(min_length=1),
    ]


def read_draft(wanted: Distractor, answer: str, source: str) -> Skill:
    """The skill in the one JSON object of an answer, bare or in a fenced block, its texts cleaned; or ValueError."""
    draft, gold = read_object(answer, _Draft), wanted.gold
    return Skill(
        wanted.skill_id, draft.name, draft.description, draft.body, gold.category, gold.lang, source
    )


def _check(
    skill: Skill, trigrams: Trigrams, known: Sequence[tuple[Skill, Trigrams]], num_golds: int
) -> None:
    """Raise AnswerError where a body is too short or too long, or a copy of a known one; gold skills are known first.

    A copy of a gold skill would be a right answer counted as wrong.
    """
    count, (fewest, most) = num_words(skill.body), ACCEPTED_WORDS
    if not fewest <= count <= most:
        kind = "too_short" if count < fewest else "too_long"
        raise AnswerError(kind, f"its body has {count} words, {fewest} to {most} are wanted", count)
    for place, (other, others) in enumerate(known):
        if name_key(skill.name) == name_key(other.name):
            raise AnswerError(
                "same_name", f"it has the name of {other.skill_id}", other_id=other.skill_id
            )
        if (likeness := jaccard(trigrams, others)) > MAX_JACCARD:
            kind, reason = (
                "near_copy" if place < num_golds else "duplicate",
                f"its body is nearly {other.skill_id}'s",
            )
            raise AnswerError(kind, reason, round(likeness, 4), other.skill_id)
