"""Stage `lists`: training lists, each a query with its positives and negatives."""

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field, model_validator

from skilltrain.config import InputPath, PoolPath, Seed
from skilltrain.data.sampling import stable_number
from skilltrain.data.screening import Flag, flags_to_leave_out
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import plugin_paths
from skilltrain.records import POSITIVE, Dropped, Verdict, counted
from skilltrain.stage import Stage, Summary
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

GOLD = "gold"
JUDGED = "judged"


class Lists(Stage):
    """Build the lists that training reads."""

    example = (
        "pool=runs/pool queries=runs/queries rankings=runs/filtered quotas='{semantic: 4, "
        "lexical: 3, taxonomy: 2, random: 1}' out=runs/encoder_lists"
    )
    result = "{num_lists} lists: {by_source}; left out: {dropped}"
    next_command = "inspect {out}  # then skilltrain train RECIPE data.pool={pool} data.lists={out}"

    stage: Literal["lists"]
    pool: PoolPath
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables")
    rankings: InputPath = Field(description="RANKINGS, false negatives already filtered out")
    split: str | None = Field(
        default="train", description="build for the queries of this split only; null for all"
    )
    quotas: dict[str, Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        description="negatives by source, sampled; SkillRouter: {semantic: 4, lexical: 3, "
        "taxonomy: 2, random: 1}. Negatives that a source lacks are taken from the others, in this "
        "order. The source judged is drawn first: skills judged rejected, then irrelevant ones",
    )
    list_size: int | None = Field(
        default=None,
        ge=2,
        description="skills per list, from the top of one ranking, positives included; SkillRouter "
        "20. With quotas={judged: 4}, 4 of them are skills judged rejected or irrelevant",
    )
    best_of: tuple[str, ...] = Field(
        default=(),
        description="sources of quotas that give their best candidates instead of a sample; "
        "SkillRouter: [lexical]",
    )
    absent_gold: Literal["add", "drop"] = Field(
        default="add",
        description="gold outside the top list_size: add appends it to the list; drop leaves it "
        "out, and the whole list if no required skill is left (SkillRouter)",
    )
    flagged: Literal["leave_out", "use"] = Field(
        default="leave_out",
        description="whether skills that the safety screening flagged can be positives",
    )
    min_negatives: int = Field(
        default=1, ge=0, description="a list with fewer negatives is dropped"
    )
    seed: Seed = Field(default=0, description="seed of the sampling")
    out: Path = Field(description="folder to write: LISTS, their QUERIES and JUDGEMENTS, DROPPED")

    @model_validator(mode="after")
    def _check_combination(self) -> "Lists":
        """Check that the settings fit together."""
        if self.list_size is None:
            is_valid = self.quotas is not None
        else:
            # With `list_size`, the only possible quota is that of judged negatives.
            is_valid = self.quotas is None or self.quotas.keys() == {JUDGED}
        if not is_valid:
            raise ValueError(
                "set either 'quotas' (the encoder's lists) or 'list_size' (the reranker's), alone "
                "or with the quota 'judged'"
            )
        if self.quotas is not None and not sum(self.quotas.values()):
            raise ValueError("all 'quotas' are 0")
        # `best_of` names sources whose best candidates are taken instead of a random sample.
        unknown = set(self.best_of).difference(self.quotas or {})
        if unknown:
            raise ValueError(f"best_of: '{min(unknown)}' is no source of 'quotas'")

        # Lists made with quotas always hold all gold skills, so none can be dropped.
        if self.absent_gold == "drop" and (self.list_size is None or self.quotas):
            raise ValueError("absent_gold: drop needs 'list_size', and no 'quotas'")
        return self

    def run(self, out: Path) -> Summary:
        """Build a list for each query, and return counts.

        Writes LISTS, the QUERIES and JUDGEMENTS of the lists, and DROPPED.

        Raises:
            SkilltrainError: The rankings do not fit the settings or the pool, or no list is left.
        """
        queries = {query.query_id: query for query in select_queries(self.queries, self.split)}
        judgements = read_table(self.queries, JUDGEMENTS)
        # Ids of the pool's skills.
        pool = set(read_table(self.pool, SKILLS).column("skill_id").to_pylist())
        rankings = read_table(self.rankings, RANKINGS)
        _check_sources(rankings, self)
        check_ranked(rankings, pool, self.pool)

        # Build the lists. A flagged skill (a warning of the safety screening) is no positive.
        flags = flags_to_leave_out(self.pool) if self.flagged == "leave_out" else {}
        verdicts = verdicts_by_query(judgements)
        rows = rows_by_query(rankings)  # row numbers in `rankings`, by query id
        skill_ids = texts_of(rankings.column("skill_id"))
        sources = texts_of(rankings.column("stage"))  # the source of each candidate
        ranks = rankings.column("rank").to_pylist()

        dropped: list[Dropped] = []
        lists: dict[str, dict[str, Any]] = {}  # row of LISTS by query id
        for query_id in track(queries, "building lists", len(queries)):
            judged = _judged_in_pool(query_id, verdicts.get(query_id, {}), pool, flags, dropped)
            if judged is None:
                continue  # no required skill can be a positive
            candidates = [
                Candidate(skill_ids[row], sources[row], ranks[row])
                for row in rows.get(query_id, ())
            ]
            list_row = _list_row(judged, build_list(judged, candidates, self), self, dropped)
            if list_row is not None:
                lists[query_id] = list_row
        if not lists:
            problem = f"no list is left of {len(queries)} queries; the first: {dropped[0].reason}"
            present = ", ".join(sorted({*sources}))
            fix = f"the rankings hold: {present}; rankings, queries and pool must belong together"
            raise SkilltrainError("nothing-left", problem, where=self.rankings, fix=fix)

        # Write them with their queries and judgements.
        write_table(lists.values(), LISTS, out)
        list_judgements = [row for row in judgements.to_pylist() if row["query_id"] in lists]
        list_judgements.sort(key=lambda row: row["query_id"])
        write_queries((queries[query_id] for query_id in lists), list_judgements, dropped, out)
        lengths = [len(row["skill_ids"]) for row in lists.values()]
        return {
            "num_lists": len(lists),
            "by_source": counted(chain.from_iterable(row["sources"] for row in lists.values())),
            "by_verdict": counted(chain.from_iterable(row["verdicts"] for row in lists.values())),
            "list_length": {
                "min": min(lengths),
                "mean": round(sum(lengths) / len(lengths), 2),
                "max": max(lengths),
            },
            "dropped": counted(row.filter for row in dropped),
        }


class Candidate(NamedTuple):
    """A skill of a list. `rank` counts from 1 within `source`; 0 is an unranked gold skill."""

    skill_id: str
    source: str
    rank: int


class JudgedSkills(NamedTuple):
    """The judged skills of a query.

    Attributes:
        verdicts: All verdicts by skill id.
        positives: Skills of the pool that can be positives of the list.
        negatives: Skills of the pool judged irrelevant or rejected.
    """

    query_id: str
    verdicts: Mapping[str, Verdict]
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()


def _check_sources(rankings: pa.Table, config: Lists) -> None:
    """Raise SkilltrainError if the sources of the rankings do not fit the settings.

    Args:
        rankings: The candidates. The column `stage` names the source of each candidate.
        config: Settings of the stage.
    """
    sources = sorted(rankings.column("stage").unique().to_pylist())
    present = f"the rankings hold: {', '.join(sources) or 'nothing'}"

    # A fixed size takes the top of one ranking. Ranks of several sources cannot be compared.
    if config.list_size is not None and len(sources) > 1:
        problem = f"'list_size' takes the top of one ranking; {present}"
        raise SkilltrainError(
            "conflicting-settings", problem, where=config.rankings, fix="set quotas instead"
        )

    # A quota may name a source of the rankings, a source plug-in, or the judgements.
    known_sources = {*sources, *plugin_paths("source"), JUDGED}
    quotas = config.quotas or {}
    unknown = [source for source in quotas if source not in known_sources]
    if unknown:
        problem = f"'quotas' names an unknown source '{unknown[0]}'; {present}"
        raise SkilltrainError("unknown-source", problem, where=config.rankings)


def _judged_in_pool(
    query_id: str,
    verdicts: Mapping[str, Verdict],
    pool: Collection[str],
    flags: Mapping[str, Sequence[Flag]],
    dropped: list[Dropped],
) -> JudgedSkills | None:
    """Return the judged skills that a list may hold.

    Args:
        query_id: The query of the list.
        verdicts: Verdict by skill id.
        pool: Ids of the pool's skills.
        flags: Safety flags by skill id. A flagged skill cannot be a positive.
        dropped: Rows of DROPPED, to which the skills and queries that are left out are added.

    Returns:
        None if no required skill can be a positive: the query is left out.
    """
    positives: list[str] = []  # ids of skills with the verdict `required` or `useful`
    negatives: list[str] = []  # ids of skills with the verdict `irrelevant` or `rejected`
    for skill_id, verdict in sorted(verdicts.items()):
        if skill_id not in pool:
            reason = f"judged {verdict}, not in the pool"
            dropped.append(Dropped(query_id, skill_id, "not_in_pool", reason))
        elif verdict not in POSITIVE:
            negatives.append(skill_id)
        elif skill_id in flags:
            rules = ", ".join(sorted({flag.rule for flag in flags[skill_id]}))
            reason = f"a positive with the flag {rules}"
            dropped.append(Dropped(query_id, skill_id, "flagged", reason))
        else:
            positives.append(skill_id)

    # A list needs a required skill. Useful skills alone do not answer the query.
    if any(verdicts[skill_id] is Verdict.REQUIRED for skill_id in positives):
        return JudgedSkills(query_id, verdicts, tuple(positives), tuple(negatives))
    reason = "no required skill of this query can be a positive"
    dropped.append(Dropped(query_id, "", "no_positive", reason))
    return None


def _list_row(
    judged: JudgedSkills, candidates: Sequence[Candidate], config: Lists, dropped: list[Dropped]
) -> dict[str, Any] | None:
    """Return a list as a row of LISTS.

    The list may lack some positives of the query. This happens only with the setting
    `absent_gold: drop`, if a positive is not among the top of the ranking.

    Args:
        judged: The judged skills of the query.
        candidates: The skills of the list (see `build_list`).
        config: Settings of the stage.
        dropped: Rows of DROPPED, to which the positives and lists that are left out are added.

    Returns:
        The row. None if the list has no required skill or fewer than `min_negatives` negatives.
    """
    query_id = judged.query_id
    skill_ids = [candidate.skill_id for candidate in candidates]

    # Find the positives that are in the list, and report the absent ones.
    positives: list[str] = []
    for skill_id in judged.positives:
        if skill_id in skill_ids:
            positives.append(skill_id)
        else:
            reason = f"a positive outside the top {config.list_size}"
            dropped.append(Dropped(query_id, skill_id, "outside_top", reason))

    # Leave out a list without a required skill, or with too few negatives.
    if not any(judged.verdicts[skill_id] is Verdict.REQUIRED for skill_id in positives):
        return None
    num_negatives = len(candidates) - len(positives)
    if num_negatives < config.min_negatives:
        reason = f"{num_negatives} negative(s), at least {config.min_negatives} wanted"
        dropped.append(Dropped(query_id, "", "min_negatives", reason, float(num_negatives)))
        return None

    # A candidate that nobody judged counts as irrelevant.
    verdicts = [str(judged.verdicts.get(skill_id, Verdict.IRRELEVANT)) for skill_id in skill_ids]
    return {
        "query_id": query_id,
        "skill_ids": skill_ids,
        "verdicts": verdicts,
        "sources": [candidate.source for candidate in candidates],
        "ranks": [candidate.rank for candidate in candidates],
    }


def build_list(
    judged: JudgedSkills, candidates: Sequence[Candidate], config: Lists
) -> list[Candidate]:
    """Choose the positives and negatives of one training list.

    A list holds the skills that training compares with one query. Gold skills are the positives.

    There are three kinds of lists. A known positive is never a negative.

    - Without `list_size`: all gold skills, and negatives sampled by `quotas`.
    - With `list_size` and `absent_gold: drop`: the top of the ranking.
    - With `list_size` and `absent_gold: add`: all gold skills and the quota of judged negatives,
      filled up from the top of the ranking.

    The result depends only on the judged skills, the set of candidates and the seed.

    Args:
        judged: The judged skills of the query: its gold skills, and skills judged not to fit.
        candidates: The skills that rankers have mined for the query, from all sources.
        config: Settings of the stage.

    Returns:
        The skills of the list, fewer than asked for if there are too few candidates.
    """
    quotas = config.quotas or {}  # number of negatives by source
    # Rank 0 says that no ranker has found the skill.
    golds = [Candidate(skill_id, GOLD, rank=0) for skill_id in judged.positives]
    # Skills that a judge rejected, then skills judged irrelevant, both in random order.
    judged_negatives = _judged_negatives(judged, config.seed)
    # A mined skill with a positive verdict would be a false negative.
    mined_negatives = [
        candidate
        for candidate in candidates
        if judged.verdicts.get(candidate.skill_id) not in POSITIVE
    ]

    # Lists without a fixed size, for an encoder: sample the negatives of each source.
    if config.list_size is None:
        seed = f"{config.seed}/{judged.query_id}"
        negatives = judged_negatives + mined_negatives
        # From the sources in `best_of`, the best candidates are taken instead of random ones.
        return golds + sample_negatives(negatives, quotas, seed, config.best_of)

    # Take the top of the ranking. Gold skills that are absent from it are not added.
    if config.absent_gold == "drop":
        ranked_golds = [
            candidate for candidate in candidates if candidate.skill_id in judged.positives
        ]
        ranking = sorted(ranked_golds + mined_negatives, key=_rank_key)
        return ranking[: config.list_size]

    # Take all gold skills and some judged negatives, and fill the list with mined negatives.
    fixed = golds + judged_negatives[: quotas.get(JUDGED, 0)]
    return _fill_list(fixed, candidates, mined_negatives, config.list_size)


def _fill_list(
    fixed: Sequence[Candidate],
    candidates: Sequence[Candidate],
    mined_negatives: Sequence[Candidate],
    list_size: int,
) -> list[Candidate]:
    """Complete a list of fixed skills with the best mined negatives.

    Args:
        fixed: Gold skills and judged negatives that the list must hold.
        candidates: The mined candidates of the query. Some of the fixed skills may be among them.
        mined_negatives: Those of `candidates` that are not positives.
        list_size: Number of skills in the list. A list with more fixed skills is longer.

    Returns:
        The mined skills of the list in order of rank, fixed or not, as they are in `candidates`.
        Then the fixed skills that were not mined, as they are in `fixed`.
    """
    # Separate the fixed skills that were mined, which have a rank, from those that were not.
    fixed_ids = {candidate.skill_id for candidate in fixed}
    mined_fixed = [candidate for candidate in candidates if candidate.skill_id in fixed_ids]
    mined_fixed_ids = {candidate.skill_id for candidate in mined_fixed}
    other_fixed = [candidate for candidate in fixed if candidate.skill_id not in mined_fixed_ids]

    # Fill the free slots with the best mined negatives that are not fixed.
    fill = [candidate for candidate in mined_negatives if candidate.skill_id not in fixed_ids]
    fill.sort(key=_rank_key)
    num_free = max(0, list_size - len(fixed))
    return sorted(mined_fixed + fill[:num_free], key=_rank_key) + other_fixed


def _judged_negatives(judged: JudgedSkills, seed: int) -> list[Candidate]:
    """Return the judged negatives: rejected skills, then irrelevant ones, both in random order.

    Args:
        judged: The judged skills of a query.
        seed: Seed of the random order.
    """

    def sort_key(skill_id: str) -> tuple[bool, int]:
        # False sorts before True, so rejected skills come first. The number is pseudo-random.
        is_irrelevant = judged.verdicts[skill_id] is not Verdict.REJECTED
        return is_irrelevant, stable_number(seed, JUDGED, judged.query_id, skill_id)

    # The rank keeps this order in functions that sort candidates by rank.
    skill_ids = sorted(judged.negatives, key=sort_key)
    return [Candidate(skill_id, JUDGED, rank) for rank, skill_id in enumerate(skill_ids, 1)]


def sample_negatives(
    candidates: Sequence[Candidate],
    quotas: Mapping[str, int],
    seed: str,
    best_of: Collection[str] = (),
) -> list[Candidate]:
    """Sample hard negatives for one query according to per-source quotas.

    Args:
        candidates: Candidates of the query, from all sources.
        quotas: Number of negatives to take from each source.
        seed: Seed of this query. Every source has its own random stream, so changing one quota
            does not change the order in which the other sources are sampled.
        best_of: Sources whose best-ranked candidates are taken instead of a random sample.
            Judged negatives are always taken in rank order.

    Returns:
        At most `sum(quotas.values())` candidates with distinct skills. If a source has too few
        candidates, the remaining slots are filled from the other sources, in the order of `quotas`.
    """
    # Order the candidates of each source: at random, or by rank. They are sorted before they are
    # shuffled, so that the result does not depend on the order of `candidates`.
    by_source: dict[str, list[Candidate]] = {}
    for source in quotas:
        matching = [candidate for candidate in candidates if candidate.source == source]
        matching.sort(key=_rank_key)
        if source != JUDGED and source not in best_of:
            random.Random(f"{seed}/{source}").shuffle(matching)
        by_source[source] = matching

    # Fill the quota of each source. `_add_unselected` adds to `selected`, and skips skills that are
    # there already. Judged negatives come first, because they are the most reliable.
    judged_first = sorted(quotas, key=lambda source: source != JUDGED)
    selected: dict[str, Candidate] = {}
    for source in judged_first:
        _add_unselected(by_source[source], selected, limit=quotas[source])

    # Fill the slots that are still free with further candidates of all sources.
    for source in quotas:
        num_free = sum(quotas.values()) - len(selected)
        _add_unselected(by_source[source], selected, limit=num_free)
    return list(selected.values())


def _add_unselected(
    candidates: Sequence[Candidate], selected: dict[str, Candidate], limit: int
) -> None:
    """Add to `selected` the first `limit` candidates of skills that are not selected yet.

    Args:
        candidates: The candidates, the preferred ones first.
        selected: Selected candidates by skill id. New ones are added.
        limit: Number of candidates to add at most.
    """
    for candidate in candidates:
        if limit > 0 and candidate.skill_id not in selected:
            selected[candidate.skill_id] = candidate
            limit -= 1


def _rank_key(candidate: Candidate) -> tuple[int, str]:
    return candidate.rank, candidate.skill_id
