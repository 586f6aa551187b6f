"""What filter layers compare: facts on skills and queries in files that workers map, and a query's candidates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Float64, Int64

from skilltrain.data.near_duplicates.clusters import name_numbers
from skilltrain.data.near_duplicates.trigrams import BODY_BLOCK, Positions, TrigramSets
from skilltrain.errors import SkilltrainError
from skilltrain.retrieval.dense import EncoderSource, SkillEncoder, encode_queries, encode_skills, open_encoder
from skilltrain.tables import CLUSTERS, SKILLS, read_batches, read_table, skills_from_table
from skilltrain.workers import WorkersConfig

_SKILL_BLOCK = 8192  # skills held at once while their texts are encoded


@dataclass(frozen=True)
class Candidates:
    """One query's candidates that are still open, each array with an entry a candidate; skills are rows of the pool."""

    query: int
    golds: Positions
    skills: Int64[np.ndarray, " candidate"]
    ranks: Int64[np.ndarray, " candidate"]
    scores: Float64[np.ndarray, " candidate"]
    sources: Int64[np.ndarray, " candidate"]
    source_names: tuple[str, ...]
    weakest_golds: Int64[np.ndarray, " source"]
    """The gold skill to which each source gave the lowest score; -1 where it ranked none."""
    weakest_gold_scores: Float64[np.ndarray, " source"]
    """That score; NaN where there is none."""

    def only(self, which: Bool[np.ndarray, " candidate"]) -> "Candidates":
        """Those of the candidates that are still open after a layer."""
        arrays = {name: getattr(self, name)[which] for name in ("skills", "ranks", "scores", "sources")}
        return replace(self, **arrays)


class FilterPool:
    """What layers may ask of skills and queries, as memory-mapped arrays; a `PoolMaker` has written them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trigrams: dict[int | None, TrigramSets] = {}

    @cached_property
    def names(self) -> Int64[np.ndarray, " skill"]:
        """Equal numbers for equal names; -1 for none."""
        return np.load(self.folder / "names.npy", mmap_mode="r")

    @cached_property
    def clusters(self) -> Int64[np.ndarray, " skill"]:
        """Near-duplicate clusters."""
        return np.load(self.folder / "clusters.npy", mmap_mode="r")

    @cached_property
    def vectors(self) -> Float32[np.ndarray, "skill dim"]:
        """Unit vectors; zeros for skills that no query is concerned with."""
        return np.load(self.folder / "vectors.npy", mmap_mode="r")

    @cached_property
    def query_vectors(self) -> Float32[np.ndarray, "query dim"]:
        """Unit vectors."""
        return np.load(self.folder / "query_vectors.npy", mmap_mode="r")

    def trigrams(self, max_names: int | None) -> TrigramSets:
        """Body trigrams, without those that stand under more than `max_names` names."""
        if max_names not in self._trigrams:
            self._trigrams[max_names] = TrigramSets.open(self.folder / _trigrams_folder(max_names))
        return self._trigrams[max_names]

    def cosines(
        self, skills: Int64[np.ndarray, " skill"], vector: Float32[np.ndarray, " dim"]
    ) -> Float64[np.ndarray, " skill"]:
        """The cosine of each of `skills` to `vector`; no matrix product: its last bits depend on what is beside."""
        return np.einsum("sd,d->s", self.vectors[skills], vector, optimize=False).astype(np.float64)


def _trigrams_folder(max_names: int | None) -> str:
    return "trigrams" if max_names is None else f"trigrams_{max_names}"


@dataclass(frozen=True)
class PoolMaker:
    """Writes what layers ask for, each thing once, where a `FilterPool` finds it."""

    folder: Path
    pool: Path
    skills: pa.Table
    """skill_id and name of each row of the pool."""
    in_use: Positions
    """The skills that are candidates or golds: only these are encoded."""
    query_texts: Sequence[str]
    sources: Sequence[str]
    encoder: EncoderSource | None
    clusters_path: Path | None
    workers: WorkersConfig

    def names(self) -> None:
        """Write names as numbers."""
        np.save(self.folder / "names.npy", name_numbers(self.skills.column("name").to_pylist()))

    def trigrams(self, max_names: int | None) -> None:
        """Write the trigrams of all bodies, and those that are left without templates."""
        plain, wanted = self.folder / _trigrams_folder(None), self.folder / _trigrams_folder(max_names)
        sets = TrigramSets.open(plain) if plain.is_dir() else None
        if sets is None:
            bodies = read_batches(self.pool, SKILLS, ["body"], BODY_BLOCK)
            sets = TrigramSets.read(bodies, plain, self.workers)
        if max_names is not None and not wanted.is_dir():
            names = name_numbers(self.skills.column("name").to_pylist())
            sets.without_templates(names, max_names, wanted, self.workers)

    def vectors(self) -> None:
        """Write the vectors of the skills in use."""
        if (self.folder / "vectors.npy").is_file():
            return
        wanted = np.zeros(self.skills.num_rows, dtype=bool)
        wanted[self.in_use] = True
        shape = (len(wanted), self._encoder.model.dim)
        vectors, start = np.lib.format.open_memmap(self.folder / "vectors.npy", "w+", np.float32, shape), 0
        for rows in read_batches(self.pool, SKILLS, SKILLS.schema.names, _SKILL_BLOCK):
            places = start + np.flatnonzero(wanted[start : start + rows.num_rows])
            if len(places):
                vectors[places] = encode_skills(self._encoder, skills_from_table(rows.take(pa.array(places - start))))
            start += rows.num_rows

    def query_vectors(self) -> None:
        """Write the vectors of the ranked queries."""
        if not (self.folder / "query_vectors.npy").is_file():
            np.save(self.folder / "query_vectors.npy", encode_queries(self._encoder, self.query_texts))

    def clusters(self) -> None:
        """Write clusters. Raises SkilltrainError for a skill in use that is in none."""
        assert self.clusters_path is not None  # the settings see to it
        table = read_table(self.clusters_path, CLUSTERS)
        of = dict(zip(table.column("skill_id").to_pylist(), table.column("cluster").to_pylist(), strict=True))
        skill_ids = self.skills.column("skill_id").to_pylist()
        if missing := [skill_ids[place] for place in self.in_use if skill_ids[place] not in of]:
            what = f"{len(missing)} skill(s) of the pool are in no cluster, '{min(missing)}' among them"
            raise SkilltrainError(what, where=self.clusters_path, fix="make the clusters of this pool")
        np.save(self.folder / "clusters.npy", np.array([of.get(skill_id, -1) for skill_id in skill_ids]))

    @cached_property
    def _encoder(self) -> SkillEncoder:
        assert self.encoder is not None  # the settings see to it
        return open_encoder(self.encoder)
