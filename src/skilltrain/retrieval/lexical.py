"""Lexical search: BM25 over whole skills, for text that mixes Latin and CJK scripts."""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int64
from pydantic import Field

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.nearest import ranking_of
from skilltrain.templates import FIELDS_SEEN, SEEN, SkillFields
from skilltrain.terminal import track
from skilltrain.texts import CJK

_CJK_RUN = re.compile(f"[{CJK}]+")
_TOKEN = re.compile(rf"[{CJK}]+|[^\W_{CJK}]+")

# Bodies run from ten words to thousands and requests are whole paragraphs, so length is normalised fully and a term
# saturates late. Chosen on 287 train requests over 22,500 skills, Hit@1 / MRR@10: the customary 1.5 and .75 without
# stop words .530/.636, with them removed .596/.705, these two values on top .683/.778.
K1, B = 2.5, 1.0


class LexicalConfig(Config):
    """BM25 over skills, or over some of their fields."""

    kind: Literal["lexical"] = "lexical"
    fields: SkillFields = Field(default="full", description=f"what BM25 sees; {SEEN}")
    keep: int | None = Field(default=None, ge=1, description="skills kept per query; null: as many as needed")

    def check(self) -> None:
        """There is nothing to check before the pool is read."""

    def open(self, skills: Sequence[Skill]) -> "Lexical":
        """The index over the pool."""
        texts = [bm25_text(skill, self.fields) for skill in skills]
        return Lexical([skill.skill_id for skill in skills], BM25Index(texts))


@dataclass(frozen=True)
class Lexical:
    """A pool that BM25 ranks."""

    skill_ids: Sequence[str]
    index: "BM25Index"

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The `keep` best skills of each query, of its candidates alone where there are some."""
        if candidates is None:
            found = zip(queries, *self.index.search([query.text for query in queries], keep), strict=True)
            return {query.query_id: ranking_of(self.skill_ids, *row) for query, *row in found}
        places = {skill_id: place for place, skill_id in enumerate(self.skill_ids)}
        rankings: Rankings = {}
        for query in queries:
            positions = np.array([places[skill_id] for skill_id, _ in candidates[query.query_id]], dtype=np.int64)
            scores = self.index.scores(query.text)[positions]
            rankings[query.query_id] = ranking_of(self.skill_ids, positions, scores)[:keep]
        return rankings


def bm25_text(skill: Skill, fields: SkillFields = "full") -> str:
    """What BM25 sees of a skill: name, description and the whole body (SkillRouter, section 4.2), or some of these."""
    return " ".join(getattr(skill, field) for field in FIELDS_SEEN[fields])


def words_and_bigrams(text: str) -> list[str]:
    """The words and numbers of `text`, and the character bigrams of its CJK runs.

    A word ends at anything that is neither letter nor digit, so `read_pdf-file` gives three. A CJK run of one
    character is a term by itself: overlapping bigrams stand in for the words that such a script does not mark.
    """
    runs: list[str] = _TOKEN.findall(text)
    if not _CJK_RUN.search(text):
        return runs
    return [term for run in runs for term in (_bigrams(run) if _CJK_RUN.match(run) else [run])]


def _bigrams(run: str) -> list[str]:
    return [run[i : i + 2] for i in range(len(run) - 1)] or [run]


def english_tokenizer() -> Any:
    """A bm25s tokenizer that lower-cases, leaves stop words out, and stems words by Snowball's English rules."""
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN_PLUS
    from bm25s.tokenization import Tokenizer

    stop_words = sorted({part for word in STOPWORDS_EN_PLUS for part in word.lower().split("'")})
    stem = Stemmer.Stemmer("english").stemWord
    return Tokenizer(splitter=words_and_bigrams, stopwords=stop_words, stemmer=stem)


class BM25Index:
    """An index of texts by term: Lucene's BM25 formula, computed by bm25s."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Index `texts`; a result's index is a position in them. Raises SkilltrainError where there is no term."""
        import bm25s

        if not texts:
            raise SkilltrainError("no text to index for lexical search")
        self._tokenizer = english_tokenizer()
        found = self._tokenizer.streaming_tokenize(track(texts, "reading terms", len(texts)), allow_empty=False)
        ids = [array("i", term_ids) for term_ids in found]
        vocabulary = self._tokenizer.get_vocab_dict()
        if not vocabulary:
            raise SkilltrainError(f"none of the {len(texts)} texts holds a word to index for lexical search")
        self._scorer = bm25s.BM25(method="lucene", k1=K1, b=B)
        self._scorer.index((ids, vocabulary), show_progress=False)
        self._num_texts = len(texts)

    def scores(self, query: str) -> Float32[np.ndarray, " text"]:
        """The BM25 score of every indexed text; 0 where none of the query's terms occurs."""
        (ids,) = self._tokenizer.streaming_tokenize([query], update_vocab=False, allow_empty=False)
        return self._scorer.get_scores_from_ids(ids)

    def search(
        self, queries: Sequence[str], k: int
    ) -> tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]:
        """Positions and scores of each query's `k` best texts (all of them where there are fewer), best first.

        Equal scores stand in the order of the texts. A score of 0 means that the text shares no term with the query.
        """
        k = min(k, self._num_texts)
        positions, best = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        for row, query in enumerate(track(queries, "lexical search", len(queries))):
            scores = self.scores(query)
            positions[row] = top_k(scores, k)
            best[row] = scores[positions[row]]
        return positions, best


def top_k(scores: Float32[np.ndarray, " text"], k: int) -> Int64[np.ndarray, " k"]:
    """Positions of the `k` highest scores, best first, equal ones by position (a plain partition leaves that open)."""
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    bar = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > bar)
    level = np.flatnonzero(scores == bar)[: k - len(above)]
    chosen = np.concatenate([above, level])
    return chosen[np.lexsort((chosen, -scores[chosen]))].astype(np.int64, copy=False)
