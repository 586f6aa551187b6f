"""Stage `distractors`: what makes an Easy tier Hard (SkillRouter, section 3 and appendix B).

The paper has GPT-4o-mini write 780 skills that resemble gold skills and are functionally distinct. The table made
here is one more source for the stage `pool`: Hard = Easy + distractors.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.distractor_prompt import (
    ASKED_WORDS,
    STRATEGIES,
    WantedDistractor,
    distractor_request,
    read_draft,
)
from skilltrain.data.draws import stable_number
from skilltrain.data.screening import count_flagged, screen, write_flags
from skilltrain.data.trigrams import Trigrams, jaccard, word_trigrams
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.llm import LLMConfig, Questions, Request, ask_until, cost_of, open_llm
from skilltrain.records import Dropped, Skill
from skilltrain.tables import DROPPED, SKILLS, read_table, rows_of, skills_from_table, write_table
from skilltrain.texts import name_key, num_words

ACCEPTED_WORDS: Final = 150, 2400  # of a body
MAX_JACCARD: Final = 0.6  # of a body's trigrams with those of a gold body or another distractor, as in stage `filter`
# Of the longest answer asked for, as a JSON string: 1.3 a word in English prose, more in code and other scripts.
NUM_TOKENS: Final = math.ceil(ASKED_WORDS[1] * 1.6) + 100


class DistractorsConfig(Config):
    """Write skills that resemble the gold skills of a benchmark and do not do their work."""

    stage: Literal["distractors"] = "distractors"
    benchmark: InputPath = Field(description="benchmark folder whose gold skills are to be resembled")
    split: str | None = Field(default=None, description="only the gold skills of this split's queries; null: of all")
    pool: InputPath | None = Field(
        default=None, description="SKILLS table with the gold skills that the benchmark's own folder does not hold"
    )
    llm: LLMConfig = Field(description="who writes, kind openai or smollm2; needs a long llm.max_tokens, such as 3000")
    num_distractors: int = Field(
        default=3, ge=1, le=9,
        description="for each gold skill, one after the other in three strategies; the paper: 3-5",
    )  # fmt: skip
    body_chars: int = Field(default=4000, ge=1, description="how much of a gold body the model is shown")
    max_attempts: int = Field(default=3, ge=1, description="answers tried for one distractor before it is dropped")
    seed: Seed = Field(default=0, description="decides the model's seeds")
    out: Path = Field(description="folder for skills, flags and dropped")

    @model_validator(mode="after")
    def _enough_tokens(self) -> "DistractorsConfig":
        if self.llm.max_tokens < NUM_TOKENS:
            raise ValueError(
                f"llm.max_tokens is {self.llm.max_tokens}, but a body of {ASKED_WORDS[1]} words takes about "
                f"{NUM_TOKENS} tokens; set llm.max_tokens={NUM_TOKENS} or more"
            )
        return self


def run_distractors(config: DistractorsConfig, out: Path) -> dict[str, Any]:
    """Write SKILLS, DROPPED and FLAGS into `out`; an id says which gold skill it was made after, and how.

    Every distractor asked for is in SKILLS or, with its last fault, in DROPPED. A flag of the safety screening is
    a note and drops nothing. Interrupted runs lose nothing: answers are cached, and a new run finds them there.
    """
    questions = _questions(config)
    cost_of(questions)
    asked = ask_until(questions)
    skills = [skill for _, skill in asked.values]
    flags = {skill.skill_id: found for skill in skills if (found := screen(skill))}
    write_table(rows_of(skills), SKILLS, out)
    write_flags(flags, out)
    write_table([row.row() for row in asked.dropped], DROPPED, out)
    return _num_asked(questions) | {
        "num_distractors": len(skills), "num_dropped": len(asked.dropped),
        "dropped": dict(sorted(Counter(row.filter for row in asked.dropped).items())),
        "num_flagged_skills": len(flags), "flagged": count_flagged(flags), **asked.used,
    }  # fmt: skip


def plan_distractors(config: DistractorsConfig) -> dict[str, Any]:
    """What a run would ask for and what it would cost at most, found without asking anybody (`--dry-run`).

    Answers are counted at the longest that is asked for.
    """
    questions = _questions(config)
    return _num_asked(questions) | cost_of(questions)


def _num_asked(questions: Questions[WantedDistractor, Skill]) -> dict[str, Any]:
    num_golds = len({wanted.gold.skill_id for wanted in questions.asked})
    return {"num_gold_skills": num_golds, "num_asked": len(questions.asked)}


def _questions(config: DistractorsConfig) -> Questions[WantedDistractor, Skill]:
    siblings, llm = gold_skills(config), open_llm(config.llm)
    known = [(gold, word_trigrams(gold.body)) for gold, _ in siblings]
    num_golds = len(known)

    def request(wanted: WantedDistractor, attempt: int, fault: Dropped | None) -> Request:
        seed = stable_number(config.seed, wanted.skill_id, attempt) >> 33  # servers take seeds below 2**31
        return distractor_request(wanted, config.body_chars, seed, fault)

    def check(wanted: WantedDistractor, answer: str) -> Skill | Dropped:
        found = read_draft(wanted, answer, f"distractors:{llm.model}")
        if isinstance(found, Dropped):
            return found
        fault = length_fault(found) or copy_fault(found, known, num_golds)
        if fault is None:
            known.append((found, word_trigrams(found.body)))
        return fault or found

    asked = wanted_distractors(siblings, config.num_distractors)
    return Questions(llm, asked, request, check, config.max_attempts, NUM_TOKENS, "writing distractors")


def gold_skills(config: DistractorsConfig) -> list[tuple[Skill, tuple[Skill, ...]]]:
    """The gold skills of the benchmark's queries, each with the other gold skills of its queries.

    Raises SkilltrainError where neither the benchmark's folder nor the pool holds one.
    """
    benchmark = load_benchmark(config.benchmark, config.split)
    siblings: dict[str, dict[str, None]] = {}
    for task in benchmark.tasks:
        gold = sorted(task.relevance.gold)
        for skill_id in gold:
            siblings.setdefault(skill_id, {}).update(dict.fromkeys(other for other in gold if other != skill_id))
    pool = skills_from_table(read_table(config.pool, SKILLS)) if config.pool is not None else []
    known = {skill.skill_id: skill for skill in (*pool, *benchmark.gold_skills)}
    if missing := [skill_id for skill_id in siblings if skill_id not in known]:
        where = config.benchmark if config.pool is None else config.pool
        fix = "set pool to a SKILLS table that holds it" if config.pool is None else "choose the benchmark's own pool"
        what = f"holds no text of gold skill '{missing[0]}'; missing in all: {len(missing)} of {len(siblings)}"
        raise SkilltrainError(what, where=where, fix=fix)
    return [(known[i], tuple(known[other] for other in others)) for i, others in siblings.items()]


def wanted_distractors(
    golds: Sequence[tuple[Skill, tuple[Skill, ...]]], num_distractors: int
) -> list[WantedDistractor]:
    """Each gold skill's distractors, in the strategies by turns; their ids name the gold skill and the strategy."""
    strategies = list(STRATEGIES)
    wanted: list[WantedDistractor] = []
    for gold, siblings in golds:
        for place in range(num_distractors):
            turn, which = divmod(place, len(strategies))
            skill_id = f"distractor/{gold.skill_id}/{strategies[which]}" + (f"-{turn + 1}" if turn else "")
            total = len(range(which, num_distractors, len(strategies)))
            wanted.append(WantedDistractor(skill_id, gold, siblings, strategies[which], turn + 1, total))
    return wanted


def length_fault(skill: Skill) -> Dropped | None:
    """Why a body is too short or too long; None where it is neither."""
    count, (fewest, most) = num_words(skill.body), ACCEPTED_WORDS
    if fewest <= count <= most:
        return None
    kind, limit = ("too_short", f"fewer than {fewest}") if count < fewest else ("too_long", f"more than {most}")
    return Dropped("", skill.skill_id, kind, f"its body has {count} words, {limit}", count)


def copy_fault(skill: Skill, known: Sequence[tuple[Skill, Trigrams]], num_golds: int) -> Dropped | None:
    """Why `skill` is a copy of one that is known, the first `num_golds` of which are gold skills; None where it is not.

    A copy of a gold skill would be a right answer counted as wrong.
    """
    name, trigrams = name_key(skill.name), word_trigrams(skill.body)
    for other, _ in known:
        if name == name_key(other.name):
            reason = f"it has the name of {other.skill_id}"
            return Dropped("", skill.skill_id, "same_name", reason, other_id=other.skill_id)
    for place, (other, others) in enumerate(known):
        likeness = jaccard(trigrams, others)
        if likeness > MAX_JACCARD:
            kind = "near_copy" if place < num_golds else "duplicate"
            reason = f"its body is nearly that of {other.skill_id}"
            return Dropped("", skill.skill_id, kind, reason, round(likeness, 4), other_id=other.skill_id)
    return None
