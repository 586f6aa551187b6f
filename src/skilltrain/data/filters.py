"""Stage `filter`: takes false negatives out of mined candidates, and says of each why.

A layer answers, for candidates held against one gold skill, keep or drop with the value that decided. To add one:
1. write a Config with `name: Literal["yours"]`, its settings, `prepare(pool)` and `explain(value)`, as below;
2. add the class to the union `Layer`.
A recipe then lists it under `layers:`; counts, DROPPED rows and the order of layers need no further line.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Float64, Int64
from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.near_duplicates import TrigramReader, jaccard
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill, Verdict, name_key
from skilltrain.retrieval.dense import EncoderSource, encode_skills, open_encoder
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    RANKINGS,
    SKILLS,
    read_table,
    skills_from_table,
    verdicts_by_query,
    write_table,
)
from skilltrain.terminal import track

POSITIVE = frozenset({Verdict.REQUIRED, Verdict.USEFUL})

Check = Callable[[int, Int64[np.ndarray, " candidate"]], Float64[np.ndarray, " candidate"]]
"""(a gold skill, candidates; both as positions in the pool) → NaN to keep a candidate, else the value against it."""


@dataclass
class FilterPool:
    """The skills that are compared, and what layers may ask of them: made once, when first asked for."""

    skills: Sequence[Skill]
    encoder: EncoderSource | None

    @cached_property
    def trigrams(self) -> TrigramReader:
        """Body trigrams by position."""
        return TrigramReader(self.skills)

    @cached_property
    def vectors(self) -> Float32[np.ndarray, "skill dim"]:
        """Unit vectors by position."""
        if self.encoder is None:
            raise SkilltrainError("the layer 'cosine' needs an encoder", fix="set encoder.source")
        return encode_skills(open_encoder(self.encoder), self.skills)


class FilterLayer(Protocol):
    """One ground on which a candidate is taken for a false negative."""

    @property
    def name(self) -> str: ...

    def prepare(self, pool: FilterPool) -> Check:
        """The check over `pool`; costly preparation happens here, once."""
        ...

    def explain(self, value: float) -> str:
        """What `value` means, to stand before the gold skill's id in a DROPPED row."""
        ...


class NameLayer(Config):
    """Drops a candidate that bears a gold skill's name (SkillRouter, section 4.2, layer 1); the value is 1."""

    name: Literal["name"] = "name"

    def prepare(self, pool: FilterPool) -> Check:
        """Names are compared by `name_key`; a name of separators only equals nothing."""
        numbers: dict[str, int] = {}
        keys = np.array([numbers.setdefault(name_key(skill.name), len(numbers)) for skill in pool.skills])
        nameless = numbers.get("", -1)

        def check(gold: int, candidates: Int64[np.ndarray, " candidate"]) -> Float64[np.ndarray, " candidate"]:
            same = (keys[candidates] == keys[gold]) & (keys[gold] != nameless)
            return np.where(same, 1.0, np.nan)

        return check

    def explain(self, value: float) -> str:
        """A name is the same or it is not: the value adds nothing."""
        return "same name as"


class JaccardLayer(Config):
    """Drops a candidate whose body shares most word trigrams with a gold skill's (layer 2)."""

    name: Literal["jaccard"] = "jaccard"
    above: float = Field(default=0.6, ge=0, le=1, description="drop above this Jaccard index of body trigrams")

    def prepare(self, pool: FilterPool) -> Check:
        """Exact; sets whose sizes alone keep them below the threshold are not intersected."""
        trigrams, above = pool.trigrams, self.above

        def check(gold: int, candidates: Int64[np.ndarray, " candidate"]) -> Float64[np.ndarray, " candidate"]:
            values = np.full(len(candidates), np.nan)
            size = len(trigrams[gold])
            for place, candidate in enumerate(candidates.tolist()):
                other = len(trigrams[candidate])
                if min(size, other) <= above * max(size, other):
                    continue
                value = jaccard(trigrams[gold], trigrams[candidate])
                if value > above:
                    values[place] = value
            return values

        return check

    def explain(self, value: float) -> str:
        """The Jaccard index and its limit."""
        return f"body overlap {value:.3f} > {self.above:g} with"


class CosineLayer(Config):
    """Drops a candidate whose vector is all but a gold skill's (layer 3); the encoder is the stage's `encoder`."""

    name: Literal["cosine"] = "cosine"
    above: float = Field(default=0.92, ge=-1, le=1, description="drop above this cosine to a gold skill")

    def prepare(self, pool: FilterPool) -> Check:
        """Cosines of unit vectors."""
        vectors, above = pool.vectors, self.above

        def check(gold: int, candidates: Int64[np.ndarray, " candidate"]) -> Float64[np.ndarray, " candidate"]:
            values = (vectors[candidates] @ vectors[gold]).astype(np.float64)
            return np.where(values > above, values, np.nan)

        return check

    def explain(self, value: float) -> str:
        """The cosine and its limit."""
        return f"cosine {value:.3f} > {self.above:g} to"


Layer = Annotated[NameLayer | JaccardLayer | CosineLayer, Field(discriminator="name")]


class FilterConfig(Config):
    """Take false negatives out of mined candidates."""

    stage: Literal["filter"]
    pool: InputPath = Field(description="SKILLS table (file or folder)")
    queries: InputPath = Field(description="folder with the JUDGEMENTS table")
    rankings: InputPath = Field(description="RANKINGS to filter: mined, or the trained encoder's candidates")
    encoder: EncoderSource | None = Field(default=None, description="encoder of the layer 'cosine'")
    layers: tuple[Layer, ...] = Field(
        default=(NameLayer(), JaccardLayer(), CosineLayer()),
        description="layers in order (name, jaccard, cosine); leave one out to switch it off",
    )
    judged_positives: Literal["drop", "keep"] = Field(
        default="drop",
        description="what to do with a query's own positives; keep them in a reranker's candidates, so that "
        "its lists know at which rank they were found",
    )
    out: Path = Field(description="folder to write: RANKINGS kept, DROPPED")

    @model_validator(mode="after")
    def _consistent(self) -> "FilterConfig":
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            raise ValueError("a layer stands twice in 'layers'")
        if "cosine" in names and self.encoder is None:
            raise ValueError("the layer 'cosine' needs the section 'encoder' (or leave the layer out of 'layers')")
        return self


@dataclass(frozen=True)
class Finding:
    """Why one row of a ranking is dropped."""

    row: int
    filter: str
    value: float | None
    reason: str


def run_filter(config: FilterConfig, out: Path) -> dict[str, Any]:
    """Counts of what stayed and what went, by layer and by source; writes RANKINGS and DROPPED.

    A candidate judged irrelevant or rejected stays whatever it resembles: a judgement outranks a likeness.
    """
    rankings = read_table(config.rankings, RANKINGS)
    verdicts = verdicts_by_query(read_table(config.queries, JUDGEMENTS))
    pool = FilterPool(_skills_in_use(config.pool, rankings, verdicts), config.encoder)
    findings = find_false_negatives(rankings, verdicts, pool, config.layers)
    if config.judged_positives == "keep":
        findings = [finding for finding in findings if finding.filter != "judged"]
    kept = np.ones(rankings.num_rows, dtype=bool)
    kept[[finding.row for finding in findings]] = False
    write_table(rankings.filter(pa.array(kept)), RANKINGS, out)
    write_table(_dropped_rows(rankings, findings), DROPPED, out)
    return _summary(rankings, kept, findings, config)


def find_false_negatives(
    rankings: pa.Table, verdicts: dict[str, dict[str, Verdict]], pool: FilterPool, layers: Sequence[FilterLayer]
) -> list[Finding]:
    """Rows of `rankings` to drop, in row order, each with the first ground found: judged positive, then `layers`."""
    position = {skill.skill_id: place for place, skill in enumerate(pool.skills)}
    checks = [(layer, layer.prepare(pool)) for layer in layers]
    skill_ids = texts_of(rankings.column("skill_id"))
    groups = rows_by_query(rankings)
    findings: list[Finding] = []
    for query_id, rows in track(groups.items(), "filtering", len(groups)):
        judged = verdicts.get(query_id, {})
        golds = sorted(skill_id for skill_id, verdict in judged.items() if verdict in POSITIVE)
        open_rows: list[int] = []
        for row in rows.tolist():
            verdict = judged.get(skill_ids[row])
            if verdict in POSITIVE:
                findings.append(Finding(row, "judged", None, f"judged {verdict} for this query"))
            elif verdict is None:
                open_rows.append(row)
        candidates = np.array([position[skill_ids[row]] for row in open_rows], dtype=np.int64)
        places = [position[gold] for gold in golds if gold in position]
        findings += _check_query(np.array(open_rows, dtype=np.int64), candidates, places, checks, pool)
    return sorted(findings, key=lambda finding: finding.row)


def _check_query(
    rows: Int64[np.ndarray, " candidate"],
    candidates: Int64[np.ndarray, " candidate"],
    golds: Sequence[int],
    checks: Sequence[tuple[FilterLayer, Check]],
    pool: FilterPool,
) -> list[Finding]:
    """Findings among one query's candidates; a layer sees only what the layers before it kept."""
    findings: list[Finding] = []
    for layer, check in checks:
        for gold in golds:
            values = check(gold, candidates)
            against = ~np.isnan(values)
            for row, value in zip(rows[against].tolist(), values[against].tolist(), strict=True):
                reason = f"{layer.explain(value)} gold skill {pool.skills[gold].skill_id}"
                findings.append(Finding(row, layer.name, value, reason))
            rows, candidates = rows[~against], candidates[~against]
    return findings


def rows_by_query(rankings: pa.Table) -> dict[str, Int64[np.ndarray, " row"]]:
    """query_id → its rows in `rankings`, in row order; the queries in order of id."""
    if not rankings.num_rows:
        return {}
    encoded = rankings.column("query_id").combine_chunks().dictionary_encode()
    names, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable").astype(np.int64)
    groups = np.split(order, np.cumsum(np.bincount(codes, minlength=len(names)))[:-1])
    return dict(sorted(zip(names, groups, strict=True)))


def texts_of(column: pa.ChunkedArray) -> list[str]:
    """A text column as a list in which equal texts are one object, so that millions of rows stay small."""
    encoded = column.combine_chunks().dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    return [texts[code] for code in encoded.indices.to_numpy(zero_copy_only=False)]


def _skills_in_use(pool: Path, rankings: pa.Table, verdicts: dict[str, dict[str, Verdict]]) -> list[Skill]:
    """The skills that are candidates or golds of ranked queries, in order of id; a candidate must be in the pool."""
    queries = rankings.column("query_id").unique().to_pylist()
    ranked = set(rankings.column("skill_id").unique().to_pylist())
    golds = {s for query in queries for s, verdict in verdicts.get(query, {}).items() if verdict in POSITIVE}
    skills = [skill for skill in skills_from_table(read_table(pool, SKILLS)) if skill.skill_id in ranked | golds]
    if unknown := ranked - {skill.skill_id for skill in skills}:
        raise SkilltrainError(
            f"{len(unknown)} ranked skill(s) are not in this pool, '{min(unknown)}' among them",
            where=pool,
            fix="give the pool that was mined",
        )
    return sorted(skills, key=lambda skill: skill.skill_id)


def _dropped_rows(rankings: pa.Table, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    taken = rankings.take(pa.array([finding.row for finding in findings], pa.int64()))
    rows = taken.select(["query_id", "skill_id", "stage"]).to_pylist()
    return [
        {
            "query_id": row["query_id"], "skill_id": row["skill_id"], "filter": finding.filter,
            "value": finding.value, "reason": f"{finding.reason} ({row['stage']} candidate)",
        }
        for row, finding in zip(rows, findings, strict=True)
    ]  # fmt: skip


def _summary(rankings: pa.Table, kept: np.ndarray, findings: Sequence[Finding], config: FilterConfig) -> dict[str, Any]:
    stages = texts_of(rankings.column("stage"))
    by_filter = Counter(finding.filter for finding in findings)
    kept_by_source = Counter(stage for stage, stays in zip(stages, kept.tolist(), strict=True) if stays)
    return {
        "num_candidates": rankings.num_rows,
        "num_kept": int(kept.sum()),
        "num_dropped": len(findings),
        "dropped_by_layer": {name: by_filter[name] for name in ["judged", *(layer.name for layer in config.layers)]},
        "dropped_by_source": dict(sorted(Counter(stages[finding.row] for finding in findings).items())),
        "kept_by_source": dict(sorted(kept_by_source.items())),
    }
