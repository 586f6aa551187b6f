"""Stage `synthesize`: requests that need a skill of the pool and never name it (SkillRouter, section 4.1).

The paper has GPT-4o-mini write them from metadata and body, stratified by category, 160 words in the mean; here any
chat model does, or, without one, the skill's own body (data/synthesis/extractive.py).
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skilltrain.data.screening import flags_to_leave_out
from skilltrain.data.stored_skills import StoredSkills, skills_of_table
from skilltrain.data.synthesis.check import LASTING, Fault, check_answer
from skilltrain.data.synthesis.name_leak import common_words
from skilltrain.data.synthesis.prompt import Ask, run_digest
from skilltrain.data.synthesis.settings import SynthesizeConfig
from skilltrain.data.synthesis.skill_phrases import num_words
from skilltrain.data.synthesis.stratify import sample_skills, stable_number
from skilltrain.data.synthesis.writers import Writer, open_writer
from skilltrain.errors import SkilltrainError
from skilltrain.llm import Answer, in_order, say_cost
from skilltrain.records import Query, Skill, Verdict
from skilltrain.tables import (
    CLUSTERS,
    DROPPED,
    JUDGEMENTS,
    QUERIES,
    SKILLS,
    read_columns,
    read_table,
    rows_of,
    write_table,
)
from skilltrain.terminal import progress


@dataclass(frozen=True)
class _Work:
    """What is to be written, and by whom. `exempt` are the names that a query may hold."""

    skills: StoredSkills
    flagged: list[str]
    asks: list[Ask]
    writer: Writer
    exempt: frozenset[str]

    def told(self, asks: Iterable[Ask]) -> Iterator[tuple[Ask, Skill]]:
        """Asks with their skills, each read when its turn has come."""
        return ((ask, self.skills[ask.place]) for ask in asks)


def run_synthesize(config: SynthesizeConfig, out: Path) -> dict[str, Any]:
    """Write QUERIES, JUDGEMENTS and DROPPED into `out`; every query asked for stands in one of the first and last.

    Interrupted runs lose nothing: a model's answers are cached, and a new run finds them there.
    """
    work = _prepare(config, out)
    origin = work.writer.origin
    _told_plan(work, config)
    texts, faults = _write_all(work, config)

    groups = _lowest_of_clusters(config.clusters)
    made = [ask for ask in work.asks if ask.query_id in texts]
    splits = {skill_id: split_of(groups.get(skill_id, skill_id), config) for skill_id in work.skills.skill_ids}
    queries = [Query(a.query_id, texts[a.query_id], "single", origin, splits[a.skill_id]) for a in made]
    write_table(rows_of(queries), QUERIES, out)
    write_table([_judgement(ask, origin) for ask in made], JUDGEMENTS, out)
    dropped = [_dropped("", skill_id, FLAGGED) for skill_id in work.flagged]
    dropped += [_dropped(a.query_id, a.skill_id, faults[a.query_id]) for a in work.asks if a.query_id in faults]
    write_table(dropped, DROPPED, out)
    return {
        "num_skills": len(work.skills), "num_asked": len(work.asks), "num_queries": len(made),
        "num_dropped": len(dropped), "dropped": dict(sorted(Counter(row["filter"] for row in dropped).items())),
        "num_dev": sum(query.split == "dev" for query in queries),
        "mean_words": round(sum(map(num_words, texts.values())) / max(1, len(texts)), 1),
        "origin": origin, **work.writer.usage(),
    }  # fmt: skip


def plan_synthesize(config: SynthesizeConfig) -> dict[str, Any]:
    """What a run would ask for and about what it would cost, found without asking anybody (`--dry-run`)."""
    work = _prepare(config, None)
    counts = {"num_skills": len(work.skills), "num_flagged": len(work.flagged), "num_asked": len(work.asks)}
    return counts | {"origin": work.writer.origin} | _told_plan(work, config)


FLAGGED = Fault("flagged", "the safety screening flagged the skill")


def _prepare(config: SynthesizeConfig, folder: Path | None) -> _Work:
    """What is to be done; the chosen skills' texts are in a file of `folder`, or of a temporary one, until it is."""
    facts = read_columns(config.pool, SKILLS, ("skill_id", "category", "lang")).to_pylist()
    if not facts:
        raise SkilltrainError("the pool holds no skill", where=config.pool)
    left_out = flags_to_leave_out(config.pool) if config.flagged == "leave_out" else {}
    usable = [Skill(**row, name="", description="", body="") for row in facts if row["skill_id"] not in left_out]
    flagged = [row["skill_id"] for row in facts if row["skill_id"] in left_out]
    chosen = {skill.skill_id for skill in sample_skills(usable, config.max_skills, config.seed)}
    with tempfile.TemporaryDirectory(prefix=".scratch-", dir=folder) as scratch:  # an open file outlives its folder
        texts = (skill for skill in skills_of_table(config.pool) if skill.skill_id in chosen)
        skills = StoredSkills.write(texts, Path(scratch) / "skills.jsonl")
    writer = open_writer(config, skills_of_table(config.pool))
    run = run_digest(writer.origin, config)
    numbers = range(1, config.num_queries_per_skill + 1)
    asks = [Ask(place, i, number, run) for place, i in enumerate(skills.skill_ids) for number in numbers]
    bodies = (skill.body for skill in skills_of_table(config.pool))
    exempt = common_words(bodies, config.exempt_share) if config.exempt_share else frozenset[str]()
    return _Work(skills, flagged, asks, writer, exempt)


def _told_plan(work: _Work, config: SynthesizeConfig) -> dict[str, Any]:
    """What the writer will take, after it was said in one line."""
    if plan := work.writer.plan(work.told(work.asks)):
        say_cost(plan, config.max_attempts)
    return plan


def _judgement(ask: Ask, judge: str) -> dict[str, Any]:
    return {"query_id": ask.query_id, "skill_id": ask.skill_id, "verdict": str(Verdict.REQUIRED), "judge": judge}


def _dropped(query_id: str, skill_id: str, fault: Fault) -> dict[str, Any]:
    row = {"query_id": query_id, "skill_id": skill_id}
    return {**row, "filter": fault.filter, "value": fault.value, "reason": fault.reason}


def _write_all(work: _Work, config: SynthesizeConfig) -> tuple[dict[str, str], dict[str, Fault]]:
    """(text by query_id, fault by query_id): rounds of asking, each for what the last one left.

    Answers are judged in the order of the asks, so the outcome does not depend on which one came first.
    """
    texts: dict[str, str] = {}
    faults: dict[str, Fault] = {}
    seen: set[str] = set()
    pending = work.asks
    for attempt in range(config.max_attempts if pending else 0):
        again: list[Ask] = []
        for ask, answer in zip(pending, in_order(_shown(work, pending, attempt)), strict=True):
            checked = check_answer(answer, work.skills[ask.place].name, config.max_words, work.exempt)
            if isinstance(checked, str) and checked.casefold() in seen:
                checked = Fault("duplicate", "the same text was written before")
            if isinstance(checked, str):
                seen.add(checked.casefold())
                texts[ask.query_id] = checked
                faults.pop(ask.query_id, None)
                continue
            faults[ask.query_id] = checked
            if checked.filter not in LASTING:
                again.append(replace(ask, attempt=attempt + 1, fault=checked.reason))
        pending = again
    return texts, faults


def _shown(work: _Work, asks: Sequence[Ask], attempt: int) -> Iterator[tuple[int, Answer]]:
    """What the writer writes, under a progress bar."""
    name = "writing queries" + (f", attempt {attempt + 1}" if attempt else "")
    with progress(name, len(asks)) as (bar, task):
        for found in work.writer.write(work.told(asks)):
            yield found
            bar.advance(task)


def _lowest_of_clusters(clusters: Path | None) -> dict[str, str]:
    """skill_id → the lowest skill_id of its cluster of near-duplicates; empty without a table."""
    if clusters is None:
        return {}
    table = read_table(clusters, CLUSTERS)
    lowest: dict[int, str] = {}
    rows = sorted((str(row["skill_id"]), int(row["cluster"])) for row in table.to_pylist())
    return {skill_id: lowest.setdefault(cluster, skill_id) for skill_id, cluster in rows}


def split_of(skill_id: str, config: SynthesizeConfig) -> str:
    """`dev` or `train`, by the skill: all its queries stay together, and a grown pool moves none."""
    return "dev" if stable_number(config.seed, "split", skill_id) < config.dev_share * 2**64 else "train"
