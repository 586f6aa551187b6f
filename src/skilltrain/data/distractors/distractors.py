"""Stage `distractors`: what makes an Easy tier Hard (SkillRouter, section 3 and appendix B).

The paper has GPT-4o-mini write 780 skills that resemble gold skills and are functionally distinct. The table made
here is one more source for the stage `pool`: Hard = Easy + distractors.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.distractors.distractor_prompt import STRATEGIES, WantedDistractor, distractor_request
from skilltrain.data.pool.skill_file import split_header
from skilltrain.data.screening import count_flagged, screen, write_flags
from skilltrain.data.synthesize.sampling import stable_number
from skilltrain.data.trigrams import Trigrams, WordHashes, jaccard, word_trigrams
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.files import write_text
from skilltrain.llm import LLMConfig, Questions, Request, ask_until, cost_of, open_llm
from skilltrain.records import Dropped, Skill
from skilltrain.tables import DROPPED, SKILLS, read_table, rows_of, skills_from_table, write_table
from skilltrain.texts import clean_text, name_key, num_words, one_line

ORIGINS_FILE: Final = "origins.jsonl"
_TOKENS_PER_WORD = 1.6  # of a body as a JSON string: 1.3 in English prose, more in code and other scripts
_UNSAFE = re.compile(r"[^\w.-]+")
_SLUG_CHARS = 80
_FENCED = re.compile(r"^```(?:json)?[ \t]*\n(.*)\n[ \t]*```[ \t]*$", re.S | re.M | re.I)


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
    asked_words: tuple[int, int] = Field(default=(400, 1200), description="length of a body asked for, from and to")
    accepted_words: tuple[int, int] = Field(default=(150, 2400), description="other lengths of a body are refused")
    max_jaccard: float = Field(
        default=0.6, gt=0, le=1,
        description="trigram Jaccard with a gold body or another distractor; above: refused",
    )  # fmt: skip
    max_attempts: int = Field(default=3, ge=1, description="answers tried for one distractor before it is dropped")
    seed: int = Field(default=0, ge=0, description="decides the model's seeds")
    out: Path = Field(description="folder for skills, origins.jsonl, flags and dropped")

    @model_validator(mode="after")
    def _consistent(self) -> "DistractorsConfig":
        for name in ("asked_words", "accepted_words"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} must be [fewest, most], found [{low}, {high}]")
        if self.num_tokens > self.llm.max_tokens:
            raise ValueError(
                f"llm.max_tokens is {self.llm.max_tokens}, but a body of {self.asked_words[1]} words takes about "
                f"{self.num_tokens} tokens; set llm.max_tokens={self.num_tokens} or more"
            )
        return self

    @property
    def num_tokens(self) -> int:
        """About the tokens of the longest answer asked for."""
        return math.ceil(self.asked_words[1] * _TOKENS_PER_WORD) + 100


def run_distractors(config: DistractorsConfig, out: Path) -> dict[str, Any]:
    """Write SKILLS, DROPPED and FLAGS into `out`, and origins.jsonl: which gold skill each was made after, and how.

    Every distractor asked for is in SKILLS or, with its last fault, in DROPPED. A flag of the safety screening is
    a note and drops nothing. Interrupted runs lose nothing: answers are cached, and a new run finds them there.
    """
    questions = _questions(config)
    cost_of(questions)
    asked = ask_until(questions)

    skills = [skill for _, skill, _ in asked.values]
    flags = {skill.skill_id: found for skill in skills if (found := screen(skill))}
    write_table(rows_of(skills), SKILLS, out)
    write_flags(flags, out)
    origins = [
        {
            "skill_id": skill.skill_id, "gold_skill_id": wanted.gold.skill_id, "strategy": wanted.strategy,
            "attempt": attempt, "flags": sorted({flag.rule for flag in flags.get(skill.skill_id, ())}),
        }
        for wanted, skill, attempt in asked.values
    ]  # fmt: skip
    write_text(out / ORIGINS_FILE, "".join(json.dumps(origin, ensure_ascii=False) + "\n" for origin in origins))
    write_table([row.row() for row in asked.dropped], DROPPED, out)
    return {
        "num_gold_skills": _num_golds(questions), "num_asked": len(questions.asked), "num_distractors": len(skills),
        "num_by_strategy": _counts(wanted.strategy for wanted, _, _ in asked.values),
        "num_dropped": len(asked.dropped), "dropped": _counts(row.filter for row in asked.dropped),
        "turned_down": dict(sorted(asked.refused.items())),
        "mean_words": round(sum(num_words(skill.body) for skill in skills) / max(1, len(skills)), 1),
        "num_flagged_skills": len(flags), "flagged": count_flagged(flags),
        "source": f"distractors:{questions.llm.model}", **asked.used,
    }  # fmt: skip


def plan_distractors(config: DistractorsConfig) -> dict[str, Any]:
    """What a run would ask for and what it would cost at most, found without asking anybody (`--dry-run`).

    Answers are counted at the longest that is asked for.
    """
    questions = _questions(config)
    return {"num_gold_skills": _num_golds(questions), "num_asked": len(questions.asked)} | cost_of(questions)


def _questions(config: DistractorsConfig) -> Questions[WantedDistractor, Skill]:
    siblings = gold_skills(config)
    llm = open_llm(config.llm)
    known = KnownSkills((gold for gold, _ in siblings), config.max_jaccard)

    def request(wanted: WantedDistractor, attempt: int, fault: Dropped | None) -> Request:
        seed = stable_number(config.seed, wanted.skill_id, attempt) >> 33  # servers take seeds below 2**31
        return distractor_request(wanted, config.body_chars, config.asked_words, fault.filter if fault else None, seed)

    def check(wanted: WantedDistractor, answer: str) -> Skill | Dropped:
        found = read_draft(wanted, answer, f"distractors:{llm.model}")
        if isinstance(found, Dropped):
            return found
        return length_fault(found, config.accepted_words) or known.add(found) or found

    return Questions(
        llm=llm,
        asked=wanted_distractors(siblings, config.num_distractors),
        request=request,
        check=check,
        attempts=config.max_attempts,
        answer_tokens=config.num_tokens,
        description="writing distractors",
    )


def _num_golds(questions: Questions[WantedDistractor, Skill]) -> int:
    return len({wanted.gold.skill_id for wanted in questions.asked})


def _counts(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))


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
    slugs = slugs_of([gold.skill_id for gold, _ in golds])
    strategies = list(STRATEGIES)
    wanted: list[WantedDistractor] = []
    for gold, siblings in golds:
        for place in range(num_distractors):
            turn, which = divmod(place, len(strategies))
            strategy = strategies[which]
            skill_id = f"distractor/{slugs[gold.skill_id]}-{strategy}" + (f"-{turn + 1}" if turn else "")
            total = len(range(which, num_distractors, len(strategies)))
            wanted.append(WantedDistractor(skill_id, gold, siblings, strategy, turn + 1, total))
    return wanted


def slugs_of(skill_ids: Sequence[str]) -> dict[str, str]:
    """skill_id → a name of letters, digits, dots and hyphens; equal names get a digest of their id behind them."""
    slugs = {skill_id: _UNSAFE.sub("-", skill_id).strip("-")[:_SLUG_CHARS] for skill_id in skill_ids}
    counts = Counter(slug.casefold() for slug in slugs.values())
    for skill_id, slug in slugs.items():
        if counts[slug.casefold()] > 1 or not slug:
            slugs[skill_id] = f"{slug}-{hashlib.sha256(skill_id.encode(errors='replace')).hexdigest()[:8]}"
    return slugs


class _Draft(BaseModel):
    """What an answer must hold: texts, and no other kind of value; keys that were not asked for are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    name: str = Field(min_length=1, max_length=100, pattern=r"\w")
    description: str = Field(min_length=1, max_length=1500)
    body: str = Field(min_length=1)


def read_draft(wanted: WantedDistractor, answer: str, source: str) -> Skill | Dropped:
    """The skill in the one JSON object of an answer, bare or in a fenced block, its texts cleaned; or why none is."""
    text = answer.strip()
    fenced = _FENCED.search(text)
    try:
        # Many models put a line break inside a JSON string, which loses nothing.
        values = json.loads(fenced[1] if fenced and not text.startswith("{") else text, strict=False)
        draft = _Draft.model_validate(values)
        cleaned = _Draft(
            name=one_line(clean_text(draft.name)),
            description=one_line(clean_text(draft.description)),
            body=split_header(clean_text(draft.body))[1].strip(),
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = ": ".join([*(str(part) for part in first["loc"]), first["msg"]])
    except (ValueError, RecursionError) as error:
        reason = f"it is not one JSON object: {error}"
    else:
        gold = wanted.gold
        return Skill(wanted.skill_id, cleaned.name, cleaned.description, cleaned.body, gold.category, gold.lang, source)
    return Dropped("", wanted.skill_id, "malformed", reason)


def length_fault(skill: Skill, accepted: tuple[int, int]) -> Dropped | None:
    """Why a body is too short or too long; None where it is neither."""
    count = num_words(skill.body)
    if count < accepted[0]:
        reason = f"its body has {count} words, fewer than {accepted[0]}"
        return Dropped("", skill.skill_id, "too_short", reason, count)
    if count > accepted[1]:
        return Dropped("", skill.skill_id, "too_long", f"its body has {count} words, more than {accepted[1]}", count)
    return None


class KnownSkills:
    """The gold skills and the distractors made so far: a new one shares neither its name nor its body with any."""

    def __init__(self, golds: Iterable[Skill], max_jaccard: float) -> None:
        self._max_jaccard = max_jaccard
        self._hashes = WordHashes()
        self._names: dict[str, str] = {}
        self._bodies: list[tuple[str, str, Trigrams]] = []
        for gold in golds:
            self._keep("near_copy", gold, word_trigrams(gold.body, self._hashes))

    def add(self, skill: Skill) -> Dropped | None:
        """Why `skill` is refused; where nothing speaks against it, None, and it is known from now on.

        Bodies are alike where the Jaccard index of their word trigrams is above the limit, as in stage `filter`: a
        copy of a gold skill would be a right answer counted as wrong.
        """
        if other := self._names.get(name_key(skill.name)):
            return Dropped("", skill.skill_id, "same_name", f"it has the name of {other}", other_id=other)
        trigrams = word_trigrams(skill.body, self._hashes)
        for filter, other, others in self._bodies:
            likeness = jaccard(trigrams, others)
            if likeness > self._max_jaccard:
                reason = f"its body is nearly that of {other}"
                return Dropped("", skill.skill_id, filter, reason, round(likeness, 4), other_id=other)
        self._keep("duplicate", skill, trigrams)
        return None

    def _keep(self, filter: str, skill: Skill, trigrams: Trigrams) -> None:
        self._names.setdefault(name_key(skill.name), skill.skill_id)
        self._bodies.append((filter, skill.skill_id, trigrams))
