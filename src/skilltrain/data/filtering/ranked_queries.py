"""A RANKINGS table by query: its rows in row order, and as arrays in files that workers map."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64

from skilltrain.data.filtering.pool import Candidates
from skilltrain.data.near_duplicates.trigrams import Positions
from skilltrain.errors import SkilltrainError
from skilltrain.records import POSITIVE, Verdict

VERDICTS = tuple(Verdict)


def rows_by_query(rankings: pa.Table) -> dict[str, Int64[np.ndarray, " row"]]:
    """query_id → its rows in `rankings`, in row order; the queries in order of id."""
    query_ids, rows, starts = _grouped(rankings)
    return dict(zip(query_ids, np.split(rows, starts[1:-1]), strict=True)) if query_ids else {}


def _grouped(rankings: pa.Table) -> tuple[list[str], Positions, Positions]:
    """Queries in order of id, the rows of one after those of the other, and where each query's begin (and the last's
    end).
    """
    query_ids, codes = _codes(rankings.column("query_id"))
    rows = np.argsort(codes, kind="stable").astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(query_ids)))]).astype(np.int64)
    return query_ids, rows, starts


def _codes(column: pa.ChunkedArray) -> tuple[list[str], Positions]:
    """The distinct texts of a column in order, and for each row the number of its text."""
    if not len(column):
        return [], np.zeros(0, dtype=np.int64)
    encoded = column.combine_chunks().dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    order = sorted(range(len(texts)), key=texts.__getitem__)
    number = np.empty(len(texts), dtype=np.int64)
    number[order] = np.arange(len(texts))
    return [texts[place] for place in order], number[encoded.indices.to_numpy(zero_copy_only=False)]


def texts_of(column: pa.ChunkedArray) -> list[str]:
    """A text column as a list in which equal texts are one object, so that millions of rows stay small."""
    texts, codes = _codes(column)
    return [texts[code] for code in codes]


@dataclass(frozen=True)
class RankedQueries:
    """Candidates, golds and judgements of each query; skills are rows of the pool. Queries stand in order of id, the
    candidates of each in the order of the table's rows.
    """

    query_ids: list[str]
    source_names: tuple[str, ...]
    arrays: Mapping[str, np.ndarray]
    """rows, skills, ranks, scores, sources, verdicts (a number in VERDICTS, -1 for none): an entry a candidate;
    starts: where each query's candidates begin; golds, gold_starts: likewise for its gold skills, in order of id."""

    @classmethod
    def write(
        cls,
        rankings: pa.Table,
        verdicts: Mapping[str, Mapping[str, Verdict]],
        pool: tuple[list[str], object],
        folder: Path,
    ) -> "RankedQueries":
        """The arrays of `rankings`, in files of `folder` too; `pool` is its skill ids, and where it is.

        Raises SkilltrainError for a ranked skill outside the pool.
        """
        skill_ids, _ = pool
        query_ids, rows, starts = _grouped(rankings)
        source_names, sources = _codes(rankings.column("stage"))
        skills = _positions(rankings.column("skill_id"), *pool)
        judged = _Judged.of(query_ids, verdicts, skill_ids)
        queries = np.repeat(np.arange(len(query_ids)), np.diff(starts))
        arrays = {
            "rows": rows, "starts": starts, "skills": skills[rows], "sources": sources[rows],
            "ranks": rankings.column("rank").to_numpy()[rows].astype(np.int64),
            "scores": rankings.column("score").to_numpy()[rows],
            "verdicts": judged.verdict_of(queries, skills[rows]),
            "golds": judged.golds, "gold_starts": judged.gold_starts,
        }  # fmt: skip
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        np.save(folder / "source_names.npy", np.array(source_names, dtype=np.str_))
        return cls(query_ids, tuple(source_names), arrays)

    @classmethod
    @lru_cache(maxsize=1)
    def open(cls, folder: Path) -> "RankedQueries":
        """What was written into `folder`, mapped; without the ids, which no check needs."""
        names = ("rows", "starts", "skills", "sources", "ranks", "scores", "verdicts", "golds", "gold_starts")
        sources = tuple(np.load(folder / "source_names.npy").tolist())
        return cls([], sources, {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names})

    def in_use(self) -> Positions:
        """The skills that are candidates or golds, in the order of the pool."""
        return np.union1d(self.arrays["skills"], self.arrays["golds"])

    def judged_positives(self) -> tuple[Positions, list[str]]:
        """Rows of the table that a judge called positives of their query, in row order, and the verdicts."""
        verdicts = self.arrays["verdicts"]
        places = np.flatnonzero(np.isin(verdicts, [VERDICTS.index(verdict) for verdict in POSITIVE]))
        places = places[np.argsort(self.arrays["rows"][places])]
        return self.arrays["rows"][places], [VERDICTS[number] for number in verdicts[places]]

    def candidates(self, queries: range) -> Iterator[tuple[Positions, Candidates]]:
        """For each query its rows without a verdict, and what they hold: what a judge has seen is not for layers."""
        a, num_sources = self.arrays, len(self.source_names)
        for query in queries:
            span = slice(a["starts"][query], a["starts"][query + 1])
            golds = np.array(a["golds"][a["gold_starts"][query] : a["gold_starts"][query + 1]])
            skills, sources, scores = np.array(a["skills"][span]), a["sources"][span], a["scores"][span]
            weakest, lowest = np.full(num_sources, -1), np.full(num_sources, np.nan)
            for place in np.flatnonzero(np.isin(skills, golds)):
                source = sources[place]
                if not scores[place] >= lowest[source]:
                    weakest[source], lowest[source] = skills[place], scores[place]
            open_ = a["verdicts"][span] < 0
            yield a["rows"][span][open_], Candidates(
                query, golds, skills[open_], a["ranks"][span][open_], scores[open_], sources[open_],
                self.source_names, weakest, lowest,
            )  # fmt: skip


@dataclass(frozen=True)
class _Judged:
    """Judgements of ranked queries on skills of the pool."""

    num_skills: int
    keys: Positions
    """Sorted query · num_skills + skill."""
    verdicts: Positions
    golds: Positions
    gold_starts: Positions

    @classmethod
    def of(cls, query_ids: list[str], verdicts: Mapping[str, Mapping[str, Verdict]], skill_ids: list[str]) -> "_Judged":
        position = {skill_id: place for place, skill_id in enumerate(skill_ids)}
        found: list[tuple[int, int]] = []
        golds: list[list[int]] = []
        for query, query_id in enumerate(query_ids):
            of_query = sorted((s, v) for s, v in verdicts.get(query_id, {}).items() if s in position)
            found += [(query * len(skill_ids) + position[s], VERDICTS.index(verdict)) for s, verdict in of_query]
            golds.append([position[s] for s, verdict in of_query if verdict in POSITIVE])
        keys, numbers = np.array(sorted(found), dtype=np.int64).reshape(-1, 2).T
        flat = np.array([gold for of_query in golds for gold in of_query], dtype=np.int64)
        gold_starts = np.cumsum([0, *(len(of_query) for of_query in golds)])
        return cls(len(skill_ids), keys, numbers, flat, gold_starts)

    def verdict_of(self, queries: Positions, skills: Positions) -> Positions:
        """The number of each (query, skill)'s verdict; -1 where there is none."""
        if not len(self.keys):
            return np.full(len(skills), -1)
        wanted = queries * self.num_skills + skills
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[places] == wanted, self.verdicts[places], -1)


def _positions(column: pa.ChunkedArray, skill_ids: list[str], where: object) -> Positions:
    """Rows of the pool by skill_id. Raises SkilltrainError where a skill is in none."""
    found = pc.call_function("index_in", [column], pc.SetLookupOptions(pa.array(skill_ids, pa.string())))
    if found.null_count:
        unknown = pc.call_function("filter", [column, pc.call_function("is_null", [found])]).unique().to_pylist()
        what = f"{len(unknown)} ranked skill(s) are not in this pool, '{min(unknown)}' among them"
        raise SkilltrainError(what, where=where, fix="give the pool that was mined")
    return found.to_numpy().astype(np.int64)
