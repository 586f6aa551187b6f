"""Lexical search: BM25 over whole skills, for text that mixes Latin and CJK scripts."""

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.terminal import track

# Han, kana and hangul are written without spaces between words (hangul: between word and particle).
CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_CJK_RUN = re.compile(f"[{CJK}]+")
_TOKEN = re.compile(rf"[{CJK}]+|[^\W_{CJK}]+")

# Bodies run from ten words to thousands and requests are whole paragraphs, so length is normalised fully and a term
# saturates late. Chosen on 287 train requests over 22,500 skills, Hit@1 / MRR@10: the customary 1.5 and .75 without
# stop words .530/.636, with them removed .596/.705, these two values on top .683/.778.
K1, B = 2.5, 1.0


def bm25_text(skill: Skill) -> str:
    """What BM25 sees of a skill: name, description and the whole body (SkillRouter, section 4.2)."""
    return f"{skill.name} {skill.description} {skill.body}"


def tokenize(text: str, stem: Callable[[str], str]) -> Iterator[str]:
    """Yield the terms of `text`: stemmed words and numbers, and the character bigrams of CJK runs.

    `stem` gives "" for a word to leave out. A word ends at anything that is neither letter nor digit, so
    `read_pdf-file` gives three terms. A CJK run of one character is a term by itself: overlapping bigrams stand in
    for the words that such a script does not mark.
    """
    for match in _TOKEN.finditer(text.lower()):
        run = match.group()
        if not _CJK_RUN.match(run):
            if term := stem(run):
                yield term
        elif len(run) == 1:
            yield run
        else:
            yield from (run[i : i + 2] for i in range(len(run) - 1))


class BM25Index:
    """An index of texts by term; made by `BM25Index.build`. Lucene's BM25 formula, computed by bm25s."""

    def __init__(self, scorer: Any, vocabulary: dict[str, int], num_texts: int) -> None:
        self._scorer, self._vocabulary, self._num_texts = scorer, vocabulary, num_texts
        self._stem = english_stemmer()

    @classmethod
    def build(cls, texts: Sequence[str]) -> "BM25Index":
        """The index of `texts`; a result's index is a position in `texts`.

        Raises SkilltrainError where there is nothing to index.
        """
        import bm25s

        if not len(texts):
            raise SkilltrainError("no text to index for lexical search")
        stem, vocabulary, ids = english_stemmer(), {"": 0}, []
        for text in track(texts, "reading terms", len(texts)):
            terms = (vocabulary.setdefault(term, len(vocabulary)) for term in tokenize(text, stem))
            ids.append(array("i", terms))
        if len(vocabulary) == 1:
            raise SkilltrainError(f"none of the {len(texts)} texts holds a word to index for lexical search")
        scorer = bm25s.BM25(method="lucene", k1=K1, b=B)
        scorer.index((ids, dict(vocabulary)), show_progress=False)
        return cls(scorer, vocabulary, len(texts))

    def scores(self, query: str) -> Float32[np.ndarray, " text"]:
        """The BM25 score of every indexed text; 0 where none of the query's terms occurs."""
        terms = tokenize(query, self._stem)
        ids = [self._vocabulary[term] for term in terms if term in self._vocabulary]
        return self._scorer.get_scores_from_ids(ids)

    def search(
        self, queries: Sequence[str], k: int
    ) -> tuple[Int64[np.ndarray, "query k"], Float32[np.ndarray, "query k"]]:
        """Positions and scores of each query's `k` best texts (all of them where there are fewer), best first.

        Equal scores stand in the order of the texts. A score of 0 means that the text shares no term with the query.
        """
        width = min(k, self._num_texts)
        indices = np.empty((len(queries), width), dtype=np.int64)
        best = np.empty((len(queries), width), dtype=np.float32)
        for row, query in enumerate(track(queries, "lexical search", len(queries))):
            scores = self.scores(query)
            indices[row] = top_k(scores, width)
            best[row] = scores[indices[row]]
        return indices, best


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
