"""Lexical search: BM25 over whole skills, for text that mixes Latin and CJK scripts."""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Float32, Float64, Int64
from pydantic import Field

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_json
from skilltrain.records import Ranking, Skill
from skilltrain.retrieval.nearest import PoolRanker, Positions, SearchResult
from skilltrain.retrieval.rankers import Keep, RankerConfig
from skilltrain.retrieval.vectors import positions_in, text_keys
from skilltrain.templates import FIELDS_SEEN, SEEN, SkillFields
from skilltrain.terminal import track
from skilltrain.texts import CJK

_TOKEN = re.compile(rf"[{CJK}]+|[^\W_{CJK}]+")
_CJK_RUN = re.compile(f"[{CJK}]+")
_NUM_CACHED_STEMS = 2**20
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

# Bodies have from ten words to thousands and queries are whole paragraphs, so length is fully
# normalised and a term saturates late. Hit@1 / MRR@10 of 287 training queries over 22,500 skills:
# .530/.636 with the usual 1.5 and .75, .596/.705 without stop words, and then .683/.778 with these.
K1 = 2.5
B = 1.0


def bm25_text(skill: Skill, fields: SkillFields = "full") -> str:
    """Return the text of a skill that BM25 sees: some of name, description and body, in a row.

    The default `full` means all three, with the whole body (SkillRouter, section 4.2).
    """
    return " ".join(getattr(skill, field) for field in FIELDS_SEEN[fields])


def words_and_bigrams(text: str) -> list[str]:
    """Return the words and numbers of `text`, and the character bigrams of its CJK runs.

    `read_pdf-file` gives "read", "pdf" and "file". The Chinese text 查天气 gives 查天 and 天气.
    CJK scripts write words without spaces, so bigrams replace the words there.
    """
    runs = _TOKEN.findall(text)
    if not _CJK_RUN.search(text):  # most texts, which need no further work
        return runs
    terms = []
    for run in runs:
        if not _CJK_RUN.match(run):
            terms.append(run)
            continue
        # A run of a single character is a term. A longer run gives each pair of neighbours.
        terms += [run[start : start + 2] for start in range(max(1, len(run) - 1))]
    return terms


class Vocabulary:
    """Numbers of terms. A term is a word in lower case, stemmed by Snowball's English rules.

    Stop words have no term.
    """

    def __init__(self, stems: Iterable[str] = ()) -> None:
        import Stemmer

        self.numbers = {stem: number for number, stem in enumerate(stems)}
        self._stem = lru_cache(_NUM_CACHED_STEMS)(Stemmer.Stemmer("english").stemWord)

    def words_and_stems(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (word, its stem) of a text, without stop words."""
        for word in words_and_bigrams(text.lower()):
            if word not in _STOP_WORDS:
                yield word, self._stem(word)

    def numbered_words(self, text: str) -> Iterator[tuple[str, int]]:
        """Yield (word, number of its term) of a text, for words whose term has a number."""
        for word, stem in self.words_and_stems(text):
            if stem in self.numbers:
                yield word, self.numbers[stem]

    def add(self, text: str) -> list[int]:
        """Return the numbers of the terms of `text`. New terms get the next numbers."""
        numbers = self.numbers
        return [numbers.setdefault(stem, len(numbers)) for _, stem in self.words_and_stems(text)]


class BM25Index:
    """Index of texts by term, scored by Lucene's BM25 formula.

    A posting is a pair of a term and a text that contains it. Postings are sorted by term, then by
    text. Those of term t are at `starts[t]:starts[t + 1]`.

    Attributes:
        keys: Digest of each text, to recognise texts that have not changed.
        counts: Number of times that the term occurs in the text, by posting (int32).
        weights: What the term adds to the score of the text, by posting (float32).
        texts: Position of the text, by posting (int32).
        starts: First posting of each term, and the number of postings (int64).
        vocabulary: Numbers of the terms.
    """

    _ARRAYS = ("keys", "counts", "weights", "texts", "starts")

    def __init__(
        self,
        texts: Sequence[str],
        previous: "BM25Index | None" = None,
        k1: float = K1,
        b: float = B,
    ) -> None:
        """Index `texts` for BM25 search.

        Args:
            texts: Texts to search.
            previous: An earlier index, which saves time: texts that it holds are not counted again.
                Its k1 and b do not matter.
            k1: BM25's k1. With a low value, repetitions of a term soon add no more.
            b: BM25's b: 0 ignores the length of a text, 1 normalises by it fully.

        Raises:
            SkilltrainError: The texts have no term.
        """
        self.keys = text_keys(texts, max_tokens=0)  # digests of the texts; 0: texts are not cut
        self.vocabulary = Vocabulary()
        if previous is not None:
            # `Vocabulary` numbers stems in the order given, so the stems keep their numbers.
            previous_stems = previous.vocabulary.numbers.keys()
            self.vocabulary = Vocabulary(previous_stems)
        counts = self._count_terms(texts, previous)  # [text, term]
        if not counts.nnz:
            problem = f"none of the {len(texts)} texts holds a word to index for lexical search"
            raise SkilltrainError("empty-text", problem)

        lengths = np.asarray(counts.sum(axis=1), dtype=np.float64).ravel()  # [text], in terms
        by_term = counts.T.tocsr()  # [term, text]
        text_positions = by_term.indices.astype(np.int32)  # [posting]
        self.counts = by_term.data
        self.texts = text_positions  # positions in `texts`
        self.starts = by_term.indptr.astype(np.int64)

        # The parts of the BM25 formula.
        saturation = k1 * (1 - b + b * lengths / lengths.mean())  # [text]
        frequencies = self.counts / (self.counts + saturation[text_positions])  # [posting]
        num_texts_with_term = np.diff(self.starts)  # [term]
        idf = _idf(len(texts), num_texts_with_term)  # [term]
        posting_idf = np.repeat(idf, num_texts_with_term)  # [posting]
        self.weights = (posting_idf * frequencies).astype(np.float32)

    def _count_terms(self, texts: Sequence[str], previous: "BM25Index | None") -> Any:
        """Return the sparse matrix of counts [text, term]. New terms get numbers.

        Counts of texts in the `previous` index are copied.
        """
        from scipy.sparse import csr_array, vstack

        if previous is None:
            return self._count_texts(texts)

        # Count the terms of texts that the previous index lacks.
        previous_positions = positions_in(previous.keys, self.keys)  # [text]; -1 for a new text
        new_positions = np.flatnonzero(previous_positions < 0)
        new_texts = [texts[position] for position in new_positions.tolist()]
        # This also adds their new terms to the vocabulary, after the terms of the previous index.
        new_counts = self._count_texts(new_texts)  # [new text, term]

        # Make the matrix of the previous index: its values, their columns (texts), and the start of
        # each row (term). `starts` has one number more than there are terms: the end of the last.
        num_previous = len(previous.keys)
        num_terms = len(previous.starts) - 1
        by_term = csr_array(  # [term, previous text]
            (previous.counts, previous.texts, previous.starts), shape=(num_terms, num_previous)
        )
        previous_counts = by_term.T.tocsr()  # [previous text, term]
        # Terms keep their numbers, so new terms are added as columns at the end.
        previous_counts.resize((num_previous, new_counts.shape[1]))

        # Stack both, and take the row of each text. The rows of new texts follow the previous ones.
        stacked_counts = vstack([previous_counts, new_counts]).tocsr()
        rows = previous_positions.copy()  # [text]
        rows[new_positions] = num_previous + np.arange(len(new_positions))
        return stacked_counts[rows]

    def _count_texts(self, texts: Sequence[str]) -> Any:
        """Count the terms of each text. Terms that the vocabulary lacks are added to it.

        Returns:
            Sparse matrix [text, term].
        """
        from scipy.sparse import csr_array

        terms = array("i")  # 4 bytes per term
        starts = [0]
        for text in track(texts, "reading terms", len(texts)):
            # `add` returns the numbers of all terms of the text, whether new or known.
            terms.extend(self.vocabulary.add(text))
            starts.append(len(terms))
        columns = np.array(terms, dtype=np.int32)
        shape = (len(texts), len(self.vocabulary.numbers))
        # Each occurrence of a term is an entry of 1. Then the entries of the same term are added.
        counts: Any = csr_array((np.ones(len(terms), np.int32), columns, starts), shape=shape)
        counts.sum_duplicates()
        return counts

    @property
    def num_skills(self) -> int:
        return len(self.keys)

    def save(self, folder: Path) -> None:
        for name in self._ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        write_json(folder / "stems.json", [*self.vocabulary.numbers])

    @classmethod
    def load(cls, folder: Path) -> "BM25Index":
        """Read the index that `save` wrote into `folder`."""
        index = cls.__new__(cls)  # without `__init__`, which would count the terms of texts
        for name in cls._ARRAYS:
            setattr(index, name, np.load(folder / f"{name}.npy"))
        index.vocabulary = Vocabulary(read_json(folder / "stems.json"))
        return index

    def scores(self, query: str) -> Float32[np.ndarray, " text"]:
        """Return the BM25 score of every text, which is 0 for a text without terms of the query.

        A term that the query repeats counts each time.
        """
        scores = np.zeros(len(self.keys), np.float32)
        for _, number in self.vocabulary.numbered_words(query):
            # The postings of a term: all texts that contain the term, each once.
            postings = slice(self.starts[number], self.starts[number + 1])
            scores[self.texts[postings]] += self.weights[postings]
        return scores

    def highest_possible_score(self, query: str) -> float:
        """Return the limit of the score of a text as it repeats all terms of the query.

        The weight of a term grows with its repetitions, up to its inverse document frequency. Terms
        that no text contains count too, so a query of unknown words has a high limit.
        """
        numbers = self.vocabulary.numbers
        texts_by_term = np.diff(self.starts)  # [term], number of texts with the term
        stems = [stem for _, stem in self.vocabulary.words_and_stems(query)]
        num_texts = [texts_by_term[numbers[stem]] if stem in numbers else 0 for stem in stems]
        return float(_idf(len(self.keys), np.array(num_texts, np.int64)).sum())

    def matching_words(self, query: str, position: int) -> list[str]:
        """Return the words of a query that a text contains, without repetitions.

        The text may contain a word in another form: `files` matches `file`. Words that add most to
        the score come first.

        Args:
            query: The query.
            position: Position of the text.
        """
        word_by_term: dict[int, str] = {}
        score_by_term: dict[int, float] = {}
        for word, term in self.vocabulary.numbered_words(query):
            # Find the posting of the term and the text.
            start = int(self.starts[term])
            end = int(self.starts[term + 1])
            text_positions = self.texts[start:end]  # of texts with the term, ascending
            posting = start + int(np.searchsorted(text_positions, position))
            # `searchsorted` also gives a posting if the text does not contain the term.
            if posting < end and self.texts[posting] == position:
                word_by_term.setdefault(term, word)
                weight = float(self.weights[posting])
                score_by_term[term] = score_by_term.get(term, 0.0) + weight
        terms = sorted(score_by_term, key=lambda term: -score_by_term[term])
        return [word_by_term[term] for term in terms]

    def search(self, queries: Sequence[str], k: int) -> SearchResult:
        """Return the `k` best texts of each query. Ties go to the lower position.

        Returns:
            Positions of the texts, and their scores, best first: [query, k] each.
        """
        k = min(k, len(self.keys))
        positions = np.empty((len(queries), k), np.int64)
        best_scores = np.empty((len(queries), k), np.float32)
        for row, query in enumerate(track(queries, "lexical search", len(queries))):
            scores = self.scores(query)
            positions[row] = top_k(scores, k)
            best_scores[row] = scores[positions[row]]
        return positions, best_scores

    def candidate_scores(
        self, queries: Sequence[str], positions: Sequence[Positions]
    ) -> Iterable[np.ndarray]:
        """Yield the scores of each query's candidates."""
        for query, candidates in zip(queries, positions, strict=True):
            yield self.scores(query)[candidates]


class LexicalConfig(RankerConfig):
    """BM25 over skills, or over some of their fields."""

    kind: Literal["lexical"] = "lexical"
    fields: SkillFields = Field(default="full", description=f"what BM25 sees; {SEEN}")
    k1: float = Field(
        default=K1, ge=0, description="BM25's k1: how much repetitions of a word add to the score"
    )
    b: float = Field(
        default=B, ge=0, le=1, description="BM25's b: 0 ignores the skill's length, 1 divides by it"
    )
    keep: Keep = None
    stored_part = BM25Index

    @property
    def label(self) -> str:
        return self.kind if self.fields == "full" else f"{self.kind} {self.fields}"

    def matches(self, ranking: Ranking) -> Ranking:
        """Return the skills that have a term in common with the query. All others score 0."""
        return [pair for pair in ranking if pair[1] != 0]

    def open(self, opened: dict[str, Any]) -> Self:
        return self

    def save_part(
        self, folder: Path, skills: Sequence[Skill], stored: Any, positions: Sequence[int]
    ) -> None:
        """Write the index over `skills`. Counts of texts that are in `stored` are copied."""
        self.index(skills, stored).save(folder)

    def over(self, skills: Mapping[str, Skill], stored: BM25Index | None = None) -> PoolRanker:
        """Return the ranker of a pool. `stored` is the pool's index if it is known."""
        return PoolRanker([*skills], stored or self.index([*skills.values()]))

    def index(self, skills: Sequence[Skill], previous: BM25Index | None = None) -> BM25Index:
        """Return the index over `skills`. Counts of texts in the `previous` index are copied."""
        texts = [bm25_text(skill, self.fields) for skill in skills]
        return BM25Index(texts, previous, self.k1, self.b)


def _idf(
    num_texts: int, num_containing: Int64[np.ndarray, " term"]
) -> Float64[np.ndarray, " term"]:
    """Return the inverse document frequency of terms.

    Args:
        num_texts: Number of all texts.
        num_containing: Number of texts that contain each term.
    """
    return np.log(1 + (num_texts - num_containing + 0.5) / (num_containing + 0.5))


def top_k(scores: Float32[np.ndarray, " text"], k: int) -> Int64[np.ndarray, " k"]:
    """Return the positions of the `k` highest scores, best first. Ties go to the lower position.

    `k` is at most the number of scores.
    """
    if k <= 0:
        return np.empty(0, dtype=np.int64)

    # In ascending order, the k-th highest score is the k-th from the end.
    kth_position = len(scores) - k
    kth_score = np.partition(scores, kth_position)[kth_position]

    # Positions with a higher score, best first, and then positions with the k-th score. There may
    # be more ties than needed.
    higher = np.flatnonzero(scores > kth_score)
    higher = higher[np.argsort(-scores[higher], kind="stable")]
    ties = np.flatnonzero(scores == kth_score)
    return np.concatenate([higher, ties])[:k]
