"""Lexical search: BM25 over whole skills, for text that mixes Latin and CJK scripts."""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64
from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json
from skilltrain.records import Skill
from skilltrain.retrieval.nearest import Found, PoolRanker, Positions
from skilltrain.retrieval.rankers import Keep, RankerConfig
from skilltrain.retrieval.vectors import places_in, text_keys
from skilltrain.templates import FIELDS_SEEN, SEEN, SkillFields
from skilltrain.terminal import track
from skilltrain.texts import CJK

_TOKEN = re.compile(rf"[{CJK}]+|[^\W_{CJK}]+")
_CJK_RUN = re.compile(f"[{CJK}]+")
_WORDS = 2**20  # words whose stems are remembered
# English function words (NLTK's list), split at apostrophes as the tokenizer splits them.
_STOP_WORDS = frozenset(
    """
    a about above after again against ain all am an and any are aren as at be because been before
    being below between both but by can couldn d did didn do does doesn doing don down during each
    few for from further had hadn has hasn have haven having he her here hers herself him himself
    his how i if in into is isn it its itself just ll m ma me mightn more most mustn my myself needn
    no nor not now o of off on once only or other our ours ourselves out over own re s same shan she
    should shouldn so some such t than that the their theirs them themselves then there these they
    this those through to too under until up ve very was wasn we were weren what when where which
    while who whom why will with won wouldn y you your yours yourself yourselves
    """.split()
)

# Bodies run from ten words to thousands and requests are whole paragraphs, so length is normalised fully and a term
# saturates late. Chosen on 287 train requests over 22,500 skills, Hit@1 / MRR@10: the customary 1.5 and .75 without
# stop words .530/.636, with them removed .596/.705, these two values on top .683/.778.
K1, B = 2.5, 1.0


def bm25_text(skill: Skill, fields: SkillFields = "full") -> str:
    """What BM25 sees of a skill: name, description and the whole body (SkillRouter, section 4.2), or some of these."""
    return " ".join(getattr(skill, field) for field in FIELDS_SEEN[fields])


def words_and_bigrams(text: str) -> list[str]:
    """Return the words and numbers of `text`, and the character bigrams of its CJK runs.

    `read_pdf-file` has three words.
    """
    runs: list[str] = _TOKEN.findall(text)
    if not _CJK_RUN.search(text):
        return runs
    terms: list[str] = []
    for run in runs:
        if _CJK_RUN.match(run):
            terms += [run[i : i + 2] for i in range(max(1, len(run) - 1))]
        else:
            terms.append(run)
    return terms


class Vocabulary:
    """Terms and their numbers: words in lower case, stemmed by Snowball's English rules, without stop words."""

    def __init__(self, stems: Iterable[str] = ()) -> None:
        import Stemmer

        self.numbers = {stem: number for number, stem in enumerate(stems)}
        stem_of = Stemmer.Stemmer("english").stemWord
        self._stem = lru_cache(_WORDS)(lambda word: "" if word in _STOP_WORDS else stem_of(word))

    def stems(self, text: str) -> Iterator[tuple[str, str]]:
        for word in words_and_bigrams(text.lower()):
            if stem := self._stem(word):
                yield word, stem

    def find(self, text: str) -> list[tuple[str, int]]:
        """(word, its term's number) of `text`; terms without a number are left out."""
        return [
            (word, self.numbers[stem]) for word, stem in self.stems(text) if stem in self.numbers
        ]

    def add(self, text: str) -> list[int]:
        """Return the numbers of the terms of `text`. New terms get the next numbers."""
        numbers = self.numbers
        stems = map(self._stem, words_and_bigrams(text.lower()))
        return [numbers.setdefault(stem, len(numbers)) for stem in stems if stem]


class BM25Index:
    """Texts by term, scored by Lucene's BM25 formula.

    `keys` tell the texts apart by content. `counts` and `weights` are how often a term occurs in a text and what that
    scores; those of term t stand from starts[t] to starts[t + 1], and `texts` has their texts' positions, which rise.
    """

    _ARRAYS = ("keys", "counts", "weights", "texts", "starts")
    keys: np.ndarray
    counts: Int32[np.ndarray, " posting"]
    weights: Float32[np.ndarray, " posting"]
    texts: Int32[np.ndarray, " posting"]
    starts: Int64[np.ndarray, " term_and_end"]
    vocabulary: Vocabulary

    def __init__(self, texts: Sequence[str], before: "BM25Index | None" = None) -> None:
        """Index `texts`; those that `before` holds are not read again. SkilltrainError: there is no term."""
        self.keys = text_keys(texts, 0)
        self.vocabulary = Vocabulary(before.vocabulary.numbers if before else ())
        counts = self._counted(texts, before)
        if not counts.nnz:
            raise SkilltrainError(
                "empty-text",
                f"none of the {len(texts)} texts holds a word to index for lexical search",
            )
        lengths = np.asarray(counts.sum(axis=1), dtype=np.float64).ravel()
        by_term = counts.T.tocsr()
        self.counts = by_term.data
        self.texts = by_term.indices.astype(np.int32)
        self.starts = by_term.indptr.astype(np.int64)
        num_with = np.diff(self.starts)
        saturation = K1 * (1 - B + B * lengths / lengths.mean())
        shares = self.counts / (self.counts + saturation[self.texts])
        self.weights = (np.repeat(_idf(len(texts), num_with), num_with) * shares).astype(np.float32)

    def _counted(self, texts: Sequence[str], before: "BM25Index | None") -> Any:
        from scipy.sparse import csr_array, vstack

        rows = places_in(before.keys, self.keys) if before else np.full(len(texts), -1)
        new = np.flatnonzero(rows < 0)
        terms = array("i")  # 4 bytes per term
        starts = [0]
        for position in track(new, "reading terms", len(new)):
            terms.extend(self.vocabulary.add(texts[int(position)]))
            starts.append(len(terms))
        width = len(self.vocabulary.numbers)
        ones = np.ones(len(terms), np.int32)
        columns = np.array(terms, dtype=np.int32)
        counts: Any = csr_array((ones, columns, starts), shape=(len(new), width))
        counts.sum_duplicates()
        if before is None:
            return counts
        shape = len(before.starts) - 1, len(before.keys)
        known = csr_array((before.counts, before.texts, before.starts), shape=shape).T.tocsr()
        known.resize((len(before.keys), width))
        rows[new] = len(before.keys) + np.arange(len(new))
        return vstack([known, counts]).tocsr()[rows]

    @property
    def num_skills(self) -> int:
        return len(self.keys)

    def save(self, folder: Path) -> None:
        for name in self._ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        write_json(folder / "stems.json", [*self.vocabulary.numbers])

    @classmethod
    def load(cls, folder: Path) -> "BM25Index":
        """The index that `save` wrote into `folder`."""
        index = cls.__new__(cls)
        for name in cls._ARRAYS:
            setattr(index, name, np.load(folder / f"{name}.npy"))
        index.vocabulary = Vocabulary(read_json(folder / "stems.json"))
        return index

    def scores(self, query: str) -> Float32[np.ndarray, " text"]:
        """The BM25 score of every indexed text; 0 where none of the query's terms occurs."""
        scores = np.zeros(len(self.keys), np.float32)
        for _, number in self.vocabulary.find(query):
            postings = slice(self.starts[number], self.starts[number + 1])
            scores[self.texts[postings]] += self.weights[postings]
        return scores

    def most(self, query: str) -> float:
        """What a text would score that holds all of the query's terms without end, those of no text included."""
        numbers = [self.vocabulary.numbers.get(stem) for _, stem in self.vocabulary.stems(query)]
        num_with = [0 if n is None else int(self.starts[n + 1] - self.starts[n]) for n in numbers]
        return float(_idf(len(self.keys), np.array(num_with, np.int64)).sum())

    def matched(self, query: str, position: int) -> list[str]:
        """The words of `query` that a text holds in some form, those that count most first."""
        words: dict[int, str] = {}
        worth: dict[int, float] = {}
        for word, number in self.vocabulary.find(query):
            start, end = self.starts[number : number + 2].tolist()
            place = start + int(np.searchsorted(self.texts[start:end], position))
            if place < end and self.texts[place] == position:
                words.setdefault(number, word)
                worth[number] = worth.get(number, 0.0) + float(self.weights[place])
        return [words[number] for number in sorted(worth, key=lambda number: -worth[number])]

    def search(self, texts: Sequence[str], k: int) -> Found:
        """Return the `k` best texts of each query. Ties go to the lower position."""
        k = min(k, len(self.keys))
        positions = np.empty((len(texts), k), np.int64)
        best = np.empty((len(texts), k), np.float32)
        for row, query in enumerate(track(texts, "lexical search", len(texts))):
            scores = self.scores(query)
            positions[row] = top_k(scores, k)
            best[row] = scores[positions[row]]
        return positions, best

    def among(self, texts: Sequence[str], positions: Sequence[Positions]) -> Iterable[np.ndarray]:
        for text, candidates in zip(texts, positions, strict=True):
            yield self.scores(text)[candidates]


class LexicalConfig(RankerConfig):
    """BM25 over skills, or over some of their fields."""

    kind: Literal["lexical"] = "lexical"
    fields: SkillFields = Field(default="full", description=f"what BM25 sees; {SEEN}")
    keep: Keep = None
    stored_part = BM25Index

    @property
    def label(self) -> str:
        return self.kind if self.fields == "full" else f"{self.kind} {self.fields}"

    def open(self, opened: dict[str, Any]) -> Self:
        return self

    def save_part(
        self, folder: Path, skills: Sequence[Skill], stored: Any, positions: Sequence[int]
    ) -> None:
        """Write the index over `skills`; texts that the index `stored` holds are not read again."""
        self.index(skills, stored).save(folder)

    def over(self, skills: Mapping[str, Skill], kept: BM25Index | None = None) -> PoolRanker:
        """The ranker of a pool, of which `kept` is the index."""
        return PoolRanker([*skills], kept or self.index([*skills.values()]))

    def index(self, skills: Sequence[Skill], before: BM25Index | None = None) -> BM25Index:
        """The index over the pool; texts that the index `before` holds are not read again."""
        return BM25Index([bm25_text(skill, self.fields) for skill in skills], before)


def _idf(num_texts: int, num_with: Int64[np.ndarray, " term"]) -> Float64[np.ndarray, " term"]:
    return np.log(1 + (num_texts - num_with + 0.5) / (num_with + 0.5))


def top_k(scores: Float32[np.ndarray, " text"], k: int) -> Int64[np.ndarray, " k"]:
    """Return the positions of the `k` highest scores, best first. Ties go to the lower position."""
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    lowest = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > lowest)
    above = above[np.argsort(-scores[above], kind="stable")]
    ties = np.flatnonzero(scores == lowest)
    return np.concatenate([above, ties])[:k].astype(np.int64, copy=False)
