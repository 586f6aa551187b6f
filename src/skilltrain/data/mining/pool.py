"""What mining takes from a pool: ids, names and categories stay in memory, texts pass through, vectors lie on disk."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Float32

from skilltrain.data.mining.draws import PoolGroups, Positions
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.lexical import TEXT_BLOCK, BM25Index, TextTerms, bm25_text, read_terms
from skilltrain.tables import SKILLS, read_batches, read_columns, skills_from_table
from skilltrain.texts import name_key
from skilltrain.workers import WorkersConfig, map_blocks

SKILL_BLOCK = 8192  # skills whose texts are in memory at once while they are encoded
_TEXTS = ("name", "description", "body")


@dataclass(frozen=True)
class MiningPool:
    """A pool in order of skill_id; positions are places in this order, `rows` says where in the table each stands."""

    path: Path
    skill_ids: pa.Array
    position: dict[str, int]
    rows: Positions
    groups: PoolGroups

    @classmethod
    def read(cls, path: Path) -> "MiningPool":
        """The pool of a SKILLS table, without its texts; an empty category is none.

        Raises SkilltrainError where the pool is empty or an id stands twice.
        """
        table = read_columns(path, SKILLS, ("skill_id", "name", "category"))
        if not table.num_rows:
            raise SkilltrainError("the pool holds no skill to mine", where=path)
        ids, names, categories = (column.to_pylist() for column in table.columns)
        rows = sorted(range(len(ids)), key=ids.__getitem__)
        return cls(
            path,
            pa.array([ids[row] for row in rows]),
            {ids[row]: place for place, row in enumerate(rows)},
            np.array(rows),
            PoolGroups.build(
                _numbered([(categories[row] or "").strip() for row in rows], unnumbered=""),
                _numbered([name_key(names[row]) for row in rows], unnumbered=None),
            ),
        )

    def write_vectors(self, encode: Callable[[list[Skill]], Float32[np.ndarray, "skill dim"]], file: Path) -> None:
        """Write the vector of every skill, by position, as a numpy file; the texts of few are in memory at once."""
        place_of_row, done = np.argsort(self.rows), 0
        vectors: np.ndarray | None = None
        for table in read_batches(self.path, SKILLS, SKILLS.schema.names, SKILL_BLOCK):
            block = encode(skills_from_table(table))
            if vectors is None:
                vectors = _new_array(file, (len(self.rows), block.shape[1]))
            vectors[place_of_row[done : done + len(block)]] = block
            done += len(block)

    def lexical_index(self, scratch: Path, workers: WorkersConfig) -> BM25Index:
        """BM25 over all skills, by position; `workers` read the terms from a file of texts left in `scratch`."""
        file = scratch / "texts.arrow"
        num_blocks = self._write_texts(file)
        terms = map_blocks(partial(read_text_block, file), range(num_blocks), workers, "reading terms")
        return BM25Index.from_terms(terms, self.rows.tolist())

    def _write_texts(self, file: Path) -> int:
        """Write the texts in blocks that can be read one by one, which those of a parquet file cannot; their number."""
        num_blocks, schema = 0, pa.schema([SKILLS.schema.field(name) for name in _TEXTS])
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for table in read_batches(self.path, SKILLS, _TEXTS, TEXT_BLOCK):
                writer.write_table(table.combine_chunks())
                num_blocks += 1
        return num_blocks


def read_text_block(file: Path, block: int) -> TextTerms:
    """The terms of one block of a file of texts."""
    with pa.memory_map(str(file)) as source:
        rows = pa.ipc.open_file(source).get_batch(block).to_pylist()
    return read_terms(bm25_text(Skill("", **row)) for row in rows)


def _numbered(values: Sequence[str], unnumbered: str | None) -> Positions:
    """A number for each value, equal ones alike; -1 for `unnumbered`."""
    numbers: dict[str, int] = {}
    return np.array([-1 if value == unnumbered else numbers.setdefault(value, len(numbers)) for value in values])


def _new_array(file: Path, shape: tuple[int, int]) -> np.ndarray:
    """A memory-mapped float32 array; its space is claimed at once, for a full disk would end the process later."""
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
    if "posix_fallocate" in dir(os):  # not on every Unix
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return array
