"""Lexical search: BM25 over whole skills, for text that mixes Latin and CJK scripts."""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float32, Int32, Int64
from pydantic import Field

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.nearest import ranking_of
from skilltrain.templates import SkillFields
from skilltrain.terminal import track
from skilltrain.texts import CJK

ItemT = TypeVar("ItemT")

_CJK_RUN = re.compile(f"[{CJK}]+")
_TOKEN = re.compile(rf"[{CJK}]+|[^\W_{CJK}]+")

# Bodies run from ten words to thousands and requests are whole paragraphs, so length is normalised fully and a term
# saturates late. Chosen on 287 train requests over 22,500 skills, Hit@1 / MRR@10: the customary 1.5 and .75 without
# stop words .530/.636, with them removed .596/.705, these two values on top .683/.778.
K1, B = 2.5, 1.0
TEXT_BLOCK = 1024  # texts whose terms are read at once


class LexicalConfig(Config):
    """BM25 over name, description and body (`full`), or without the body (`nd`)."""

    kind: Literal["lexical"] = "lexical"
    fields: SkillFields = Field(default="full", description="what BM25 sees of a skill; nd: no body")
    keep: int | None = Field(default=None, ge=1, description="skills a query that are kept; null: as many as needed")

    def check(self) -> None:
        """There is nothing to check before the pool is read."""

    def open(self, skills: Sequence[Skill]) -> "Lexical":
        """The index over the pool."""
        text_of = bm25_text if self.fields == "full" else _text_without_body
        return Lexical([skill.skill_id for skill in skills], BM25Index.build(skills, text_of))


@dataclass(frozen=True)
class Lexical:
    """A pool that BM25 ranks."""

    skill_ids: Sequence[str]
    index: "BM25Index"

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The `keep` best skills of each query, of its candidates alone where there are some."""
        places = {skill_id: place for place, skill_id in enumerate(self.skill_ids)} if candidates else {}
        found: Rankings = {}
        for query in track(queries, "lexical search", len(queries)):
            scores = self.index.scores(query.text)
            if candidates is None:
                best = top_k(scores, min(keep, len(scores)))
            else:
                best = np.array([places[skill_id] for skill_id, _ in candidates[query.query_id]], dtype=np.int64)
            found[query.query_id] = ranking_of(self.skill_ids, best, scores[best])[:keep]
        return found


def bm25_text(skill: Skill) -> str:
    """What BM25 sees of a skill: name, description and the whole body (SkillRouter, section 4.2)."""
    return f"{skill.name} {skill.description} {skill.body}"


def _text_without_body(skill: Skill) -> str:
    return f"{skill.name} {skill.description}"


def tokenize(text: str, stem: Callable[[str], str]) -> Iterator[str]:
    """Yield the terms of `text`: stemmed words and numbers, and the character bigrams of CJK runs.

    `stem` gives "" for a word to leave out. A word ends at anything that is neither letter nor digit, so
    `read_pdf-file` gives three terms. A CJK run of one character is a term by itself: overlapping bigrams stand in
    for the words that such a script does not mark.
    """
    for run in _TOKEN.findall(text.lower()):
        yield from _terms(run, stem)


def _terms(run: str, stem: Callable[[str], str]) -> Sequence[str]:
    if not _CJK_RUN.match(run):
        return (term,) if (term := stem(run)) else ()
    return [run[i : i + 2] for i in range(len(run) - 1)] or (run,)


@dataclass(frozen=True)
class TextTerms:
    """The terms of some texts: the distinct ones, and text after text each occurrence as a position among these."""

    terms: list[str]
    occurrences: Int32[np.ndarray, " occurrence"]
    lengths: Int64[np.ndarray, " text"]


class _Numbers(dict[str, int]):
    """A number for every word ever asked for, in the order of asking."""

    def __missing__(self, word: str) -> int:
        return self.setdefault(word, len(self))


def read_terms(texts: Iterable[str]) -> TextTerms:
    """What an index takes from `texts`. What a run of letters stands for is found out once, not at every occurrence."""
    runs, terms, stem = _Numbers(), _Numbers(), english_stemmer()
    found = [np.array([runs[run] for run in _TOKEN.findall(text.lower())], dtype=np.int64) for text in texts]
    terms_of = [[terms[term] for term in _terms(run, stem)] for run in runs]
    flat = np.array([number for numbers in terms_of for number in numbers], dtype=np.int32)
    sizes = np.array([len(numbers) for numbers in terms_of], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    occurring = np.concatenate([np.empty(0, np.int64), *found])
    counts = sizes[occurring]
    ends = np.cumsum(counts)
    places = np.arange(counts.sum()) + np.repeat(starts[occurring] - (ends - counts), counts)
    ends_of_texts = np.cumsum([len(part) for part in found], dtype=np.int64)
    lengths = np.diff(np.concatenate([[0], ends])[ends_of_texts], prepend=0)
    return TextTerms(list(terms), flat[places], lengths)


class BM25Index:
    """An index of texts by term; made by `BM25Index.build`. Lucene's BM25 formula, computed by bm25s."""

    def __init__(self, scorer: Any, vocabulary: dict[str, int], num_texts: int) -> None:
        self._scorer, self._vocabulary, self._num_texts = scorer, vocabulary, num_texts
        self._stem = english_stemmer()

    @classmethod
    def build(cls, items: Sequence[ItemT], text_of: Callable[[ItemT], str] = str) -> "BM25Index":
        """The index of the texts of `items`, of which few are held at once; a result's index is a position in `items`.

        Raises SkilltrainError where there is nothing to index.
        """
        starts = range(0, len(items), TEXT_BLOCK)
        blocks = (read_terms(map(text_of, items[start : start + TEXT_BLOCK])) for start in starts)
        return cls.from_terms(track(blocks, "reading terms", len(starts)), range(len(items)))

    @classmethod
    def from_terms(cls, blocks: Iterable[TextTerms], order: Sequence[int]) -> "BM25Index":
        """The index of the texts that `blocks` were read from; text `order[i]` of them stands at position i.

        Raises SkilltrainError where there is nothing to index.
        """
        import bm25s

        vocabulary, ids = {"": 0}, list["array[int]"]()
        for block in blocks:
            numbers = np.array([0, *(vocabulary.setdefault(t, len(vocabulary)) for t in block.terms)], dtype=np.int32)
            occurrences, start = numbers[block.occurrences + 1], 0
            for length in block.lengths.tolist():
                ids.append(array("i", occurrences[start : start + length].tobytes()))
                start += length
        if not ids:
            raise SkilltrainError("no text to index for lexical search")
        if len(vocabulary) == 1:
            raise SkilltrainError(f"none of the {len(ids)} texts holds a word to index for lexical search")
        scorer = bm25s.BM25(method="lucene", k1=K1, b=B)
        scorer.index(([ids[place] for place in order], dict(vocabulary)), show_progress=False)
        return cls(scorer, vocabulary, len(ids))

    def term_ids(self, query: str) -> Int32[np.ndarray, " term"]:
        """The terms of `query` that occur in some text, in its order and as often as there."""
        known = (self._vocabulary.get(term) for term in tokenize(query, self._stem))
        return np.array([number for number in known if number is not None], dtype=np.int32)

    def scores(self, query: str) -> Float32[np.ndarray, " text"]:
        """The BM25 score of every indexed text; 0 where none of the query's terms occurs."""
        return self._scorer.get_scores_from_ids(self.term_ids(query))

    def search(
        self, queries: Sequence[str], k: int
    ) -> tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]:
        """Positions and scores of each query's `k` best texts (all of them where there are fewer), best first.

        Equal scores stand in the order of the texts. A score of 0 means that the text shares no term with the query.
        """
        term_ids = [self.term_ids(query) for query in queries]
        return _search(self._scorer, track(term_ids, "lexical search", len(queries)), min(k, self._num_texts))

    def save(self, folder: Path) -> None:
        """Write to `folder` what a `SavedBM25` needs."""
        self._scorer.save(folder, show_progress=False)


@dataclass(frozen=True)
class SavedBM25:
    """An index that stays on disk, memory-mapped, so that processes share it; it knows terms by number only."""

    scorer: Any
    num_texts: int

    @classmethod
    def open(cls, folder: Path) -> "SavedBM25":
        """The index that `BM25Index.save` wrote to `folder`."""
        import bm25s

        scorer = bm25s.BM25.load(folder, mmap=True, load_vocab=False, show_progress=False)
        for name in ("data", "indices", "indptr"):
            scorer.scores[name] = np.asarray(scorer.scores[name])  # numpy's memmap class makes each slice slow
        return cls(scorer, scorer.scores["num_docs"])

    def search(
        self, term_ids: Sequence[Int32[np.ndarray, " term"]], k: int
    ) -> tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]:
        """As `BM25Index.search`, for queries as their `term_ids`."""
        return _search(self.scorer, term_ids, min(k, self.num_texts))


def _search(
    scorer: Any, queries: Iterable[Int32[np.ndarray, " term"]], k: int
) -> tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]:
    indices, best = [np.empty((0, k), np.int64)], [np.empty((0, k), np.float32)]
    for term_ids in queries:
        scores = scorer.get_scores_from_ids(term_ids)
        indices.append(top_k(scores, k)[None])
        best.append(scores[indices[-1]])
    return np.concatenate(indices), np.concatenate(best)


def top_k(scores: Float32[np.ndarray, " text"], k: int) -> Int64[np.ndarray, " k"]:
    """Positions of the `k` highest scores, best first, equal ones by position (a plain partition leaves that open)."""
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    bar = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > bar)
    level = np.flatnonzero(scores == bar)[: k - len(above)]
    chosen = np.concatenate([above, level])
    return chosen[np.lexsort((chosen, -scores[chosen]))].astype(np.int64, copy=False)


def english_stemmer() -> Callable[[str], str]:
    """A function from a lower-case word to its English Snowball stem, and to "" for a stop word."""
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN_PLUS

    stem_word = Stemmer.Stemmer("english").stemWord
    seen = dict.fromkeys((part for word in STOPWORDS_EN_PLUS for part in word.lower().split("'")), "")

    def stem(word: str) -> str:
        if word not in seen:
            seen[word] = stem_word(word)
        return seen[word]

    return stem
