"""Stage `lists`: what trainers read, each query with its positives and its negatives."""

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.draws import stable_number
from skilltrain.data.mine import SOURCES
from skilltrain.data.screening import Flag, flags_to_leave_out
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Dropped, Verdict, counted
from skilltrain.tables import (
    JUDGEMENTS,
    LISTS,
    RANKINGS,
    SKILLS,
    check_ranked,
    read_table,
    rows_by_query,
    select_queries,
    texts_of,
    verdicts_by_query,
    write_queries,
    write_table,
)
from skilltrain.terminal import track

GOLD, JUDGED = "gold", "judged"


class ListsConfig(Config):
    """Build training lists: `quotas` of sampled negatives for the encoder, or `list_size` top candidates to rerank."""

    stage: Literal["lists"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    rankings: InputPath = Field(description="RANKINGS, false negatives already filtered out")
    split: str | None = Field(
        default="train", description="build for the queries of this split only; null for all"
    )
    quotas: dict[str, Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        description="negatives by source, sampled; SkillRouter: {semantic: 4, lexical: 3, taxonomy: 2, random: 1}. "
        "Where a source has too few, the others fill up in this order. The source judged holds what a judge turned "
        "down, rejected skills first, and is drawn before the others",
    )
    list_size: int | None = Field(
        default=None,
        ge=2,
        description="skills per list, from the top of one ranking, positives included; SkillRouter "
        "20. With quotas={judged: 4}, so many of the skills that a judge turned down are among them",
    )
    best_of: tuple[str, ...] = Field(
        default=(),
        description="sources of quotas whose best are taken instead of drawn; SkillRouter: [lexical]",
    )
    absent_gold: Literal["add", "drop"] = Field(
        default="add",
        description="gold outside the top list_size: add puts it at the list's end; drop leaves it out, "
        "and the whole list where no required skill is left, as SkillRouter",
    )
    flagged: Literal["leave_out", "use"] = Field(
        default="leave_out",
        description="may skills with a flag of the safety screening be positives (use), or not",
    )
    min_negatives: int = Field(
        default=1, ge=0, description="a list with fewer negatives is dropped"
    )
    seed: Seed = Field(default=0, description="seed of the sampling")
    out: Path = Field(description="folder to write: LISTS, their QUERIES and JUDGEMENTS, DROPPED")

    @model_validator(mode="after")
    def _one_way(self) -> "ListsConfig":
        of_judged = self.quotas is not None and self.quotas.keys() == {JUDGED}
        if (self.quotas is None) == (self.list_size is None) and not (of_judged and self.list_size):
            raise ValueError(
                "set either 'quotas' (the encoder's lists) or 'list_size' (the reranker's)"
            )
        if self.quotas is not None and not sum(self.quotas.values()):
            raise ValueError("all 'quotas' are 0")
        if unknown := set(self.best_of).difference(self.quotas or {}):
            raise ValueError(f"best_of: '{min(unknown)}' is no source of 'quotas'")
        if self.absent_gold == "drop" and (self.list_size is None or self.quotas):
            raise ValueError("absent_gold: drop needs 'list_size', and no 'quotas'")
        return self


class Entry(NamedTuple):
    """One skill of a list; `rank` counts from 1 within `source`. A gold that no ranking held: source gold, rank 0."""

    skill_id: str
    source: str
    rank: int


class ListPlan(NamedTuple):
    """A list to be built: its query's id and judgements, its positives, and skills of the pool judged otherwise."""

    query_id: str
    judged: Mapping[str, Verdict]
    positives: tuple[str, ...]
    turned_down: tuple[str, ...] = ()


def run_lists(config: ListsConfig, out: Path) -> dict[str, Any]:
    """Counts by source, verdict and length; writes LISTS, DROPPED, and the lists' own QUERIES and JUDGEMENTS.

    Raises SkilltrainError where not one list is left.
    """
    queries = {query.query_id: query for query in select_queries(config.queries, config.split)}
    judgements = read_table(config.queries, JUDGEMENTS)
    pool = set(read_table(config.pool, SKILLS).column("skill_id").to_pylist())
    rankings = read_table(config.rankings, RANKINGS)
    _check_sources(rankings, config)
    check_ranked(rankings, pool, config.pool)
    flags = flags_to_leave_out(config.pool) if config.flagged == "leave_out" else {}
    verdicts, dropped = verdicts_by_query(judgements), list[Dropped]()
    rows, ranks = rows_by_query(rankings), rankings.column("rank").to_pylist()
    skill_ids, sources = texts_of(rankings.column("skill_id")), texts_of(rankings.column("stage"))
    built: dict[str, dict[str, Any]] = {}
    for query_id in track(queries, "building lists", len(queries)):
        if plan := _plan(query_id, verdicts.get(query_id, {}), pool, flags, dropped):
            candidates = [
                Entry(skill_ids[row], sources[row], ranks[row]) for row in rows.get(query_id, ())
            ]
            if found := _row(plan, build_list(plan, candidates, config), config, dropped):
                built[query_id] = found
    if not built:
        what = f"no list is left of {len(queries)} queries; the first: {dropped[0].reason}"
        fix = "check that rankings, queries and pool belong together"
        raise SkilltrainError(what, where=config.rankings, fix=fix)
    write_table(built.values(), LISTS, out)
    judged = sorted(
        (row for row in judgements.to_pylist() if row["query_id"] in built),
        key=lambda r: r["query_id"],
    )
    write_queries((queries[query_id] for query_id in built), judged, dropped, out)
    lengths = [len(row["skill_ids"]) for row in built.values()]
    return {
        "num_lists": len(built),
        "by_source": counted(chain.from_iterable(row["sources"] for row in built.values())),
        "by_verdict": counted(chain.from_iterable(row["verdicts"] for row in built.values())),
        "list_length": {
            "min": min(lengths),
            "mean": round(sum(lengths) / len(lengths), 2),
            "max": max(lengths),
        },
        "dropped": counted(drop.filter for drop in dropped),
    }


def _check_sources(rankings: pa.Table, config: ListsConfig) -> None:
    """Raise SkilltrainError where the sources of the rankings do not fit the way lists are to be built."""
    sources = sorted(rankings.column("stage").unique().to_pylist())
    here = f"the rankings hold: {', '.join(sources) or 'nothing'}"
    if config.list_size is not None and len(sources) > 1:
        what = f"'list_size' takes the top of one ranking; {here}"
        raise SkilltrainError(what, where=config.rankings, fix="set quotas instead")
    if unknown := [
        source for source in config.quotas or {} if source not in {*sources, *SOURCES, JUDGED}
    ]:
        raise SkilltrainError(
            f"'quotas' names an unknown source '{unknown[0]}'; {here}", where=config.rankings
        )


def _plan(
    query_id: str,
    judged: Mapping[str, Verdict],
    pool: Collection[str],
    flags: Mapping[str, Sequence[Flag]],
    dropped: list[Dropped],
) -> ListPlan | None:
    """The list to build, None where no required skill can be in it; what cannot be used goes to `dropped`."""
    positives, turned_down = list[str](), list[str]()
    for skill_id, verdict in sorted(judged.items()):
        if skill_id not in pool:
            dropped.append(
                Dropped(query_id, skill_id, "not_in_pool", f"judged {verdict}, not in the pool")
            )
        elif verdict not in POSITIVE:
            turned_down.append(skill_id)
        elif skill_id in flags:
            rules = ", ".join(sorted({flag.rule for flag in flags[skill_id]}))
            dropped.append(
                Dropped(query_id, skill_id, "flagged", f"a positive with the flag {rules}")
            )
        else:
            positives.append(skill_id)
    if any(judged[skill_id] is Verdict.REQUIRED for skill_id in positives):
        return ListPlan(query_id, judged, tuple(positives), tuple(turned_down))
    dropped.append(
        Dropped(query_id, "", "no_positive", "no required skill of this query can be a positive")
    )
    return None


def _row(
    plan: ListPlan, entries: Sequence[Entry], config: ListsConfig, dropped: list[Dropped]
) -> dict[str, Any]:
    """The row of LISTS; none, and why in `dropped`, where no required skill or too few negatives are in it."""
    held = {entry.skill_id for entry in entries}
    outside = sorted(set(plan.positives) - held)
    why = f"a positive outside the top {config.list_size}"
    dropped += [Dropped(plan.query_id, skill_id, "outside_top", why) for skill_id in outside]
    if not any(plan.judged[s] is Verdict.REQUIRED for s in held.intersection(plan.positives)):
        return {}
    num_negatives = len(entries) - len(plan.positives) + len(outside)
    if num_negatives < config.min_negatives:
        reason = f"{num_negatives} negative(s), at least {config.min_negatives} wanted"
        dropped.append(Dropped(plan.query_id, "", "min_negatives", reason, float(num_negatives)))
        return {}
    skill_ids, sources, ranks = (list(column) for column in zip(*entries, strict=True))
    # A mined candidate that nobody judged is taken for irrelevant: that is what mining assumes.
    verdicts = [str(plan.judged.get(skill_id, Verdict.IRRELEVANT)) for skill_id in skill_ids]
    columns = {"skill_ids": skill_ids, "verdicts": verdicts, "sources": sources, "ranks": ranks}
    return {"query_id": plan.query_id, **columns}


def build_list(plan: ListPlan, candidates: Sequence[Entry], config: ListsConfig) -> list[Entry]:
    """The entries of one list, positives among them; fewer than asked for where candidates are lacking.

    A known positive is never a negative, whatever the ranking says. Depends on the plan, the candidates as a set
    and the seed only.
    """
    negatives = [entry for entry in candidates if plan.judged.get(entry.skill_id) not in POSITIVE]
    judged, quotas = _turned_down(plan, config.seed), config.quotas or {}
    golds = [Entry(skill_id, GOLD, 0) for skill_id in plan.positives]
    if config.list_size is None:
        return golds + sample_negatives(
            [*judged, *negatives], quotas, f"{config.seed}/{plan.query_id}", config.best_of
        )
    if config.absent_gold == "drop":
        ranked = [entry for entry in candidates if entry.skill_id in plan.positives]
        return sorted([*ranked, *negatives], key=_in_order)[: config.list_size]
    wanted = {entry.skill_id: entry for entry in (*golds, *judged[: quotas.get(JUDGED, 0)])}
    found = {entry.skill_id: entry for entry in candidates if entry.skill_id in wanted}
    absent = [entry for skill_id, entry in wanted.items() if skill_id not in found]
    room = max(0, config.list_size - len(wanted))
    others = sorted((entry for entry in negatives if entry.skill_id not in wanted), key=_in_order)
    return sorted([*found.values(), *others[:room]], key=_in_order) + absent


def _turned_down(plan: ListPlan, seed: int) -> list[Entry]:
    """What a judge turned down for the query, rejected skills first, those of one verdict in an order by chance."""
    by_chance = sorted(
        plan.turned_down, key=lambda skill_id: stable_number(seed, JUDGED, plan.query_id, skill_id)
    )
    in_order = sorted(by_chance, key=lambda skill_id: plan.judged[skill_id] is not Verdict.REJECTED)
    return [Entry(skill_id, JUDGED, place) for place, skill_id in enumerate(in_order, 1)]


def sample_negatives(
    candidates: Sequence[Entry], quotas: dict[str, int], key: str, best_of: Collection[str] = ()
) -> list[Entry]:
    """Each source's quota, drawn uniformly from its candidates (of those in `best_of` the best) without taking a skill
    twice; the same for one `key`.

    What a source could not give is drawn from what is left of the sources, in the order of `quotas`. Every source has
    draws of its own, so that a change of one quota leaves the sources before it as they were.
    """
    waiting: dict[str, list[Entry]] = {}
    for source in quotas:
        waiting[source] = sorted(
            (entry for entry in candidates if entry.source == source), key=_in_order
        )
        if source not in (JUDGED, *best_of):
            random.Random(f"{key}/{source}").shuffle(waiting[source])
    chosen: dict[str, Entry] = {}
    for source in sorted(quotas, key=lambda source: source != JUDGED):
        _take(waiting[source], quotas[source], chosen)
    for source in quotas:
        _take(waiting[source], sum(quotas.values()) - len(chosen), chosen)
    return list(chosen.values())


def _take(waiting: Sequence[Entry], count: int, chosen: dict[str, Entry]) -> None:
    """Put the first `count` entries of skills not yet chosen into `chosen`."""
    fresh = [entry for entry in waiting if entry.skill_id not in chosen]
    chosen.update((entry.skill_id, entry) for entry in fresh[: max(0, count)])


def _in_order(entry: Entry) -> tuple[int, str]:
    return entry.rank, entry.skill_id
