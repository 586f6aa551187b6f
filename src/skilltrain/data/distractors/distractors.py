"""Stage `distractors`: what makes an Easy tier Hard (SkillRouter, section 3 and appendix B).

The paper has GPT-4o-mini write 780 skills that resemble gold skills and are functionally distinct. The table made
here is one more source for the stage `pool`: Hard = Easy + distractors.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from skilltrain.data.distractors.check import KnownSkills, length_fault, read_draft
from skilltrain.data.distractors.prompt import STRATEGIES, Ask, Gold, request
from skilltrain.data.distractors.settings import DistractorsConfig
from skilltrain.data.screening import count_flagged, screen, write_flags
from skilltrain.data.screening.rule import Flag
from skilltrain.data.synthesis.check import LASTING, Fault
from skilltrain.data.synthesis.skill_phrases import num_words
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.files import write_text
from skilltrain.llm import LLM, Answer, cost_of, in_order, open_llm, say_cost, used_of
from skilltrain.records import Skill
from skilltrain.tables import DROPPED, SKILLS, read_batches, rows_of, write_table
from skilltrain.terminal import progress

ORIGINS_FILE: Final = "origins.jsonl"
_UNSAFE = re.compile(r"[^\w.-]+")
_SLUG_CHARS = 80


@dataclass
class _Made:
    """What has come of the asks so far; `turned_down` counts every answer that was, also where a later one was good."""

    skills: dict[str, Skill]
    asks: dict[str, Ask]
    faults: dict[str, Fault]
    turned_down: Counter[str]


def run_distractors(config: DistractorsConfig, out: Path) -> dict[str, Any]:
    """Write SKILLS, DROPPED and FLAGS into `out`, and origins.jsonl: which gold skill each was made after, and how.

    Every distractor asked for stands in SKILLS or, with its last fault, in DROPPED. A flag of the safety screening is
    a note and drops nothing. Interrupted runs lose nothing: answers are cached, and a new run finds them there.
    """
    golds = gold_skills(config)
    asks = asks_for(golds, config.num_distractors)
    llm = open_llm(config.llm)
    _told_cost(llm, asks, config)
    made = _write_all(llm, asks, golds, config)

    skills = [made.skills[ask.skill_id] for ask in asks if ask.skill_id in made.skills]
    flags = {skill.skill_id: found for skill in skills if (found := screen(skill))}
    write_table(rows_of(skills), SKILLS, out)
    write_flags(flags, out)
    write_text(out / ORIGINS_FILE, "".join(_origin(made.asks[s.skill_id], flags.get(s.skill_id, ())) for s in skills))
    dropped = [_dropped(ask.skill_id, made.faults[ask.skill_id]) for ask in asks if ask.skill_id in made.faults]
    write_table(dropped, DROPPED, out)
    return {
        "num_gold_skills": len(golds), "num_asked": len(asks), "num_distractors": len(skills),
        "num_by_strategy": _counts(made.asks[skill.skill_id].strategy for skill in skills),
        "num_dropped": len(dropped), "dropped": _counts(row["filter"] for row in dropped),
        "turned_down": dict(sorted(made.turned_down.items())),
        "mean_words": round(sum(num_words(skill.body) for skill in skills) / max(1, len(skills)), 1),
        "num_flagged_skills": len(flags), "flagged": count_flagged(flags), "source": source_of(llm),
        **used_of(llm.budget),
    }  # fmt: skip


def plan_distractors(config: DistractorsConfig) -> dict[str, Any]:
    """What a run would ask for and about what it would cost at most, found without asking anybody (`--dry-run`).

    Answers are reckoned at the longest that is asked for.
    """
    golds = gold_skills(config)
    asks = asks_for(golds, config.num_distractors)
    return {"num_gold_skills": len(golds), "num_asked": len(asks)} | _told_cost(open_llm(config.llm), asks, config)


def _told_cost(llm: LLM, asks: Sequence[Ask], config: DistractorsConfig) -> dict[str, Any]:
    cost = cost_of(llm, (request(ask, config) for ask in asks), config.num_tokens)
    say_cost(cost, config.max_attempts)
    return cost


def source_of(llm: LLM) -> str:
    """What the pool says of where the skills come from."""
    return f"distractors:{llm.model}"


def gold_skills(config: DistractorsConfig) -> list[Gold]:
    """The gold skills of the benchmark's queries, in the order in which these need them.

    Raises SkilltrainError where neither the benchmark's folder nor the pool holds one.
    """
    benchmark = load_benchmark(config.benchmark, config.split)
    siblings: dict[str, dict[str, None]] = {}
    for task in benchmark.tasks:
        gold = sorted(task.relevance.gold)
        for skill_id in gold:
            siblings.setdefault(skill_id, {}).update(dict.fromkeys(other for other in gold if other != skill_id))
    known = {skill.skill_id: skill for skill in benchmark.gold_skills}
    if config.pool is not None:
        known |= _from_pool(config.pool, siblings.keys() - known.keys())
    if missing := [skill_id for skill_id in siblings if skill_id not in known]:
        where = config.benchmark if config.pool is None else config.pool
        fix = "set pool to a SKILLS table that holds it" if config.pool is None else "choose the benchmark's own pool"
        what = f"holds no text of gold skill '{missing[0]}'; missing in all: {len(missing)} of {len(siblings)}"
        raise SkilltrainError(what, where=where, fix=fix)
    return [Gold(known[i], tuple(known[other] for other in others)) for i, others in siblings.items()]


def _from_pool(pool: Path, skill_ids: set[str]) -> dict[str, Skill]:
    """The skills of a SKILLS table with these ids; the table is read a piece at a time."""
    found: dict[str, Skill] = {}
    for batch in read_batches(pool, SKILLS, SKILLS.schema.names, 1024) if skill_ids else ():
        places = [place for place, i in enumerate(batch.column("skill_id").to_pylist()) if i in skill_ids]
        found |= {row["skill_id"]: Skill(**row) for row in batch.take(places).to_pylist()}
    return found


def asks_for(golds: Sequence[Gold], num_distractors: int) -> list[Ask]:
    """One ask a distractor: each gold skill's go through the strategies in turn, and have ids that tell both."""
    slugs = slugs_of([gold.skill.skill_id for gold in golds])
    strategies = list(STRATEGIES)
    asks: list[Ask] = []
    for gold in golds:
        for place in range(num_distractors):
            turn, which = divmod(place, len(strategies))
            strategy = strategies[which]
            skill_id = f"distractor/{slugs[gold.skill.skill_id]}-{strategy}" + (f"-{turn + 1}" if turn else "")
            total = len(range(which, num_distractors, len(strategies)))
            asks.append(Ask(skill_id, gold, strategy, turn + 1, total))
    return asks


def slugs_of(skill_ids: Sequence[str]) -> dict[str, str]:
    """skill_id → a name of letters, digits, dots and hyphens, no two alike: where two would be, a digest tells them."""
    plain = {skill_id: _UNSAFE.sub("-", skill_id).strip("-")[:_SLUG_CHARS] for skill_id in skill_ids}
    counts = Counter(slug.casefold() for slug in plain.values())
    return {
        skill_id: f"{slug}-{hashlib.sha256(skill_id.encode(errors='replace')).hexdigest()[:8]}"
        if counts[slug.casefold()] > 1 or not slug
        else slug
        for skill_id, slug in plain.items()
    }


def _write_all(llm: LLM, asks: Sequence[Ask], golds: Sequence[Gold], config: DistractorsConfig) -> _Made:
    """Rounds of asking, each for what the last one left; answers are judged in the order of the asks."""
    made = _Made({}, {}, {}, Counter())
    known = KnownSkills((gold.skill for gold in golds), config.max_jaccard)
    pending = list(asks)
    for attempt in range(config.max_attempts):
        if not pending:
            break
        again: list[Ask] = []
        for ask, answer in zip(pending, in_order(_asked(llm, pending, config, attempt)), strict=True):
            found = _checked(answer, ask, llm, known, config)
            if isinstance(found, Skill):
                made.skills[ask.skill_id], made.asks[ask.skill_id] = found, ask
                made.faults.pop(ask.skill_id, None)
                continue
            made.faults[ask.skill_id] = found
            made.turned_down[found.filter] += 1
            if found.filter not in LASTING:
                again.append(replace(ask, attempt=attempt + 1, fault=found.filter))
        pending = again
    return made


def _checked(answer: Answer, ask: Ask, llm: LLM, known: KnownSkills, config: DistractorsConfig) -> Skill | Fault:
    """The distractor in an answer, which is then known, or why it is turned down."""
    draft = read_draft(answer)
    if isinstance(draft, Fault):
        return draft
    gold = ask.gold.skill
    skill = Skill(
        ask.skill_id, draft.name, draft.description, draft.body, gold.category, gold.lang, source_of(llm), None
    )
    return length_fault(skill.body, config.accepted_words) or known.add(skill) or skill


def _asked(llm: LLM, asks: Sequence[Ask], config: DistractorsConfig, attempt: int) -> Iterator[tuple[int, Answer]]:
    """The model's answers, under a progress bar."""
    name = "writing distractors" + (f", attempt {attempt + 1}" if attempt else "")
    with progress(name, len(asks)) as (bar, task):
        for found in llm.complete_all(request(ask, config) for ask in asks):
            yield found
            bar.advance(task)


def _origin(ask: Ask, flags: Sequence[Flag]) -> str:
    """A line of origins.jsonl."""
    record = {
        "skill_id": ask.skill_id, "gold_skill_id": ask.gold.skill.skill_id, "strategy": ask.strategy,
        "attempt": ask.attempt + 1, "flags": sorted({flag.rule for flag in flags}),
    }  # fmt: skip
    return json.dumps(record, ensure_ascii=False) + "\n"


def _dropped(skill_id: str, fault: Fault) -> dict[str, Any]:
    row = {"query_id": "", "skill_id": skill_id}
    return {**row, "filter": fault.filter, "value": fault.value, "reason": fault.reason}


def _counts(words: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))
