"""Stage `synthesize`: requests that need a skill of the pool and never name it (SkillRouter, section 4.1).

The paper has GPT-4o-mini write them from metadata and body, stratified by category, 160 words in the mean; here any
chat model does, or, without one, they are passages of the skills' own texts (own_text.py).
"""

import re
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from skilltrain.data.screening import flags_to_leave_out, read_flags, write_flags
from skilltrain.data.synthesize.name_leak import common_words, names_skill
from skilltrain.data.synthesize.own_text import own_queries
from skilltrain.data.synthesize.query_prompt import WantedQuery, query_request, run_digest
from skilltrain.data.synthesize.sampling import sample_skills, stable_number
from skilltrain.data.synthesize.settings import OwnTextConfig, SynthesizeConfig
from skilltrain.errors import SkilltrainError
from skilltrain.llm import Questions, ask_until, cost_of, open_llm
from skilltrain.records import Dropped, Query, Skill, Verdict
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
_REFUSAL = re.compile(
    r"(?:i['’]?m sorry|sorry,? (?:but )?i|i (?:can ?not|can['’]t|am unable to|won['’]t) (?:assist|help with"
    r"|comply|fulfil|write|create|generate|provide)"
    r"|as an ai\b|很?抱歉|对不起|我(?:无法|不能)(?:协助|提供|帮助|生成|满足))", re.I)  # fmt: skip
_LABEL = re.compile(r"^(?:(?:user )?(?:request|query|task)(?: \d+)?|请求|用户请求)\s*[:：]\s*", re.I)


Written = list[tuple[WantedQuery, str]]


def run_synthesize(config: SynthesizeConfig, out: Path) -> dict[str, Any]:
    """Write QUERIES, JUDGEMENTS and DROPPED into `out`; every query asked for is in one of the first and last.

    Interrupted runs lose nothing: a model's answers are cached, and a new run finds them there. Raises SkilltrainError
    where no query was made at all.
    """
    pool, flagged, chosen = _read_pool(config)
    written, dropped, used = _write_queries(config, pool, chosen, out)
    if not written:
        first = dropped[0].reason if dropped else "every skill is flagged"
        fix = "answers are kept in llm.cache; set another seed to have others asked for" if used else ""
        raise SkilltrainError(f"made no query for {len(chosen)} skills; the first reason: {first}", fix=fix)

    origin, split_of = _origin(config), _splits(config)
    texts = [text for _, text in written]
    queries = [Query(ask.query_id, text, "single", origin, split_of(ask.skill_id)) for ask, text in written]
    write_table(rows_of(queries), QUERIES, out)
    write_table([_judgement(ask, origin) for ask, _ in written], JUDGEMENTS, out)
    dropped = [Dropped("", i, "flagged", "the safety screening flagged the skill") for i in flagged] + dropped
    write_table([row.row() for row in dropped], DROPPED, out)
    return {
        "num_skills": len(chosen), "num_asked": len(chosen) * config.num_queries_per_skill,
        "num_queries": len(queries), "num_dropped": len(dropped),
        "dropped": dict(sorted(Counter(row.filter for row in dropped).items())),
        "num_dev": sum(query.split == "dev" for query in queries),
        "mean_words": round(sum(map(num_words, texts)) / len(texts), 1), "origin": origin, **used,
    }  # fmt: skip


def plan_synthesize(config: SynthesizeConfig) -> dict[str, Any]:
    """What a run would ask for and about what it would cost, found without asking anybody (`--dry-run`)."""
    pool, flagged, chosen = _read_pool(config)
    num_asked = len(chosen) * config.num_queries_per_skill
    counts = {"num_skills": len(chosen), "num_flagged": len(flagged), "num_asked": num_asked}
    cost = {} if isinstance(config.llm, OwnTextConfig) else cost_of(_questions(config, pool, chosen))
    return counts | {"origin": _origin(config)} | cost


def _read_pool(config: SynthesizeConfig) -> tuple[list[Skill], list[str], list[Skill]]:
    """(the pool, the ids left out because they are flagged, the skills that get queries)."""
    pool = skills_from_table(read_table(config.pool, SKILLS))
    if not pool:
        raise SkilltrainError("the pool holds no skill", where=config.pool)
    left_out = flags_to_leave_out(config.pool) if config.flagged == "leave_out" else {}
    usable = [skill for skill in pool if skill.skill_id not in left_out]
    flagged = [skill.skill_id for skill in pool if skill.skill_id in left_out]
    return pool, flagged, sample_skills(usable, config.max_skills, config.seed)


def _origin(config: SynthesizeConfig) -> str:
    """Who writes, as the tables name it."""
    if isinstance(config.llm, OwnTextConfig):
        return config.llm.kind
    return f"llm:{open_llm(config.llm).model}"


def _wanted(config: SynthesizeConfig, chosen: list[Skill]) -> list[WantedQuery]:
    run = run_digest(_origin(config), config)
    numbers = range(1, config.num_queries_per_skill + 1)
    return [WantedQuery(skill, number, run) for skill in chosen for number in numbers]


def _write_queries(
    config: SynthesizeConfig, pool: list[Skill], chosen: list[Skill], out: Path
) -> tuple[Written, list[Dropped], dict[str, Any]]:
    """(queries with their texts, those that came to nothing, what was used)."""
    if isinstance(config.llm, OwnTextConfig):
        return *_from_own_text(config, pool, chosen, out), {}
    questions = _questions(config, pool, chosen)
    cost_of(questions)
    asked = ask_until(questions)
    return [(ask, text) for ask, text, _ in asked.values], asked.dropped, asked.used


def _questions(config: SynthesizeConfig, pool: list[Skill], chosen: list[Skill]) -> Questions[WantedQuery, str]:
    """What a chat model is asked."""
    if isinstance(config.llm, OwnTextConfig):
        raise TypeError("no model is asked")
    share = config.exempt_share
    exempt = common_words((skill.body for skill in pool), share) if share else frozenset[str]()
    return Questions(
        llm=open_llm(config.llm),
        asked=_wanted(config, chosen),
        request=partial(query_request, config),
        check=partial(_check, set(), config.max_words, exempt),
        attempts=config.max_attempts,
        answer_tokens=round(config.num_words * _TOKENS_PER_WORD),
        description="writing queries",
    )


def _check(seen: set[str], max_words: int, exempt: Collection[str], wanted: WantedQuery, answer: str) -> str | Dropped:
    """An answer's text as a query, which `seen` then holds, or why it is none."""
    refused = partial(Dropped, wanted.query_id, wanted.skill_id)
    text = _LABEL.sub("", " ".join(answer.strip().strip("`").split()))
    if len(text) > 1 and text[0] + text[-1] in ('""', "“”", "「」", "''"):
        text = text[1:-1].strip()
    length = num_words(text)
    if _REFUSAL.match(text):
        return refused("refused", "the model declined to answer")
    if not length:
        return refused("empty", "there was no text in the answer")
    if length > max_words:
        return refused("too_long", f"it had {length} words, more than {max_words}", length)
    if names_skill(text, wanted.skill.name, exempt):
        return refused("name_leak", "it named the capability")
    if text.casefold() in seen:
        return refused("duplicate", "the same text was written before")
    seen.add(text.casefold())
    return text


def _from_own_text(
    config: SynthesizeConfig, pool: list[Skill], chosen: list[Skill], out: Path
) -> tuple[Written, list[Dropped]]:
    """Queries from the skills' own texts; SKILLS in `out` has the pool without the passages that they are."""
    written: Written = []
    dropped: list[Dropped] = []
    rest = {skill.skill_id: skill for skill in pool}
    made: dict[str, list[str]] = {}
    for skill in chosen:
        made[skill.skill_id], rest[skill.skill_id] = own_queries(skill, config.num_queries_per_skill, config.seed)
    seen: dict[str, str] = {}
    for wanted in _wanted(config, chosen):
        texts = made[wanted.skill_id]
        if wanted.number > len(texts):
            reason = "its own text holds no further passage that can be a query"
            dropped.append(Dropped(wanted.query_id, wanted.skill_id, "empty", reason))
        elif first := seen.get(texts[wanted.number - 1].casefold()):
            reason = "another skill has the same passage"
            dropped.append(Dropped(wanted.query_id, wanted.skill_id, "duplicate", reason, other_id=first))
        else:
            text = texts[wanted.number - 1]
            seen[text.casefold()] = wanted.skill_id
            written.append((wanted, text))
    write_table(rows_of(rest.values()), SKILLS, out)
    if (flags := read_flags(config.pool)) is not None:
        write_flags(flags, out)
    return written, dropped


def _judgement(wanted: WantedQuery, judge: str) -> dict[str, Any]:
    row = {"query_id": wanted.query_id, "skill_id": wanted.skill_id}
    return row | {"verdict": str(Verdict.REQUIRED), "judge": judge}


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
