"""What filter layers compare: facts on the skills of a pool, and the candidates of one query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from skilltrain.data.near_duplicates import name_numbers
from skilltrain.data.trigrams import Positions, TrigramSets
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, SkillEncoder, encode_queries, encode_skills, open_encoder
from skilltrain.tables import CLUSTERS, read_table
from skilltrain.workers import WorkersConfig


@dataclass(frozen=True)
class Candidates:
    """One query's candidates that are still open, each array with an entry a candidate; skills are places in the pool.

    `query` is the query's place among all, `golds` its gold skills in order of id.
    """

    query: int
    golds: Positions
    skills: Int64[np.ndarray, " candidate"]
    ranks: Int64[np.ndarray, " candidate"]
    scores: Float64[np.ndarray, " candidate"]
    sources: Sequence[str]
    weakest_golds: Mapping[str, tuple[int, float]]
    """source → the gold skill to which it gave the lowest score, and the score; only where it ranked one."""

    def only(self, which: Bool[np.ndarray, " candidate"]) -> "Candidates":
        """Those of the candidates that are still open after a layer."""
        sources = [source for source, stays in zip(self.sources, which, strict=True) if stays]
        arrays = {name: getattr(self, name)[which] for name in ("skills", "ranks", "scores")}
        return replace(self, sources=sources, **arrays)


@dataclass
class FilterPool:
    """What layers may ask of skills and queries; each fact is computed when a layer first asks for it."""

    skills: Sequence[Skill]
    in_use: Positions
    """The skills that are candidates or golds: only these are encoded."""
    query_texts: Sequence[str]
    sources: frozenset[str]
    """All sources of candidates."""
    encoder_source: EncoderSource | None
    clusters_path: Path | None
    workers: WorkersConfig
    _trigrams: dict[int | None, TrigramSets] = field(default_factory=dict)

    @cached_property
    def names(self) -> Positions:
        """Equal numbers for equal names; -1 for none."""
        return name_numbers([skill.name for skill in self.skills])

    def trigrams(self, max_names: int | None) -> TrigramSets:
        """Body trigrams, without those that stand under more than `max_names` names."""
        if max_names not in self._trigrams:
            if max_names is None:
                sets = TrigramSets.of([skill.body for skill in self.skills], self.workers)
            else:
                sets = self.trigrams(None).without_templates(self.names, max_names)
            self._trigrams[max_names] = sets
        return self._trigrams[max_names]

    @cached_property
    def vectors(self) -> Float32[np.ndarray, "skill dim"]:
        """Unit vectors; zeros for skills that no query is concerned with."""
        vectors = np.zeros((len(self.skills), self._encoder.model.dim), dtype=np.float32)
        vectors[self.in_use] = encode_skills(self._encoder, [self.skills[place] for place in self.in_use])
        return vectors

    @cached_property
    def query_vectors(self) -> Float32[np.ndarray, "query dim"]:
        """Unit vectors of the ranked queries."""
        return encode_queries(self._encoder, self.query_texts)

    @cached_property
    def clusters(self) -> Positions:
        """Near-duplicate clusters. Raises SkilltrainError for a skill in use that is in none."""
        assert self.clusters_path is not None  # the settings see to it
        table = read_table(self.clusters_path, CLUSTERS)
        of = dict(zip(table.column("skill_id").to_pylist(), table.column("cluster").to_pylist(), strict=True))
        used = (self.skills[place].skill_id for place in self.in_use)
        if missing := [skill_id for skill_id in used if skill_id not in of]:
            what = f"{len(missing)} skill(s) of the pool are in no cluster, '{min(missing)}' among them"
            raise SkilltrainError(what, where=self.clusters_path, fix="make the clusters of this pool")
        return np.array([of.get(skill.skill_id, -1) for skill in self.skills], dtype=np.int64)

    def cosines(
        self, skills: Int64[np.ndarray, " skill"], vector: Float32[np.ndarray, " dim"]
    ) -> Float64[np.ndarray, " skill"]:
        """The cosine of each of `skills` to `vector`; no matrix product: its last bits depend on what is beside."""
        return np.einsum("sd,d->s", self.vectors[skills], vector, optimize=False).astype(np.float64)

    @cached_property
    def _encoder(self) -> SkillEncoder:
        assert self.encoder_source is not None  # the settings see to it
        return open_encoder(self.encoder_source)
