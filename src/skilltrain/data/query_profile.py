"""How long and how varied a set of queries is."""

from collections.abc import Sequence

import numpy as np

from skilltrain.data.draws import stable_number
from skilltrain.texts import num_words, words_of

_SAMPLE = 1000  # queries over which words are counted: shares of distinct words fall with a set's size


def query_profile(texts: Sequence[str]) -> dict[str, float]:
    """Words of a query (median, 90th percentile) and shares of what is distinct; nothing for no query.

    Of whole queries and of their first three words over all; of words and runs of three (distinct-1 and distinct-3 of
    Li et al., arXiv 1510.03055) over the same 1,000 queries at most, so that sets of different size compare.
    """
    if not texts:
        return {}
    lengths = [num_words(text) for text in texts]
    words = [words_of(text) for text in sorted(texts, key=stable_number)[:_SAMPLE]]
    openings = [tuple(words_of(text)[:3]) for text in texts]
    single = [word for of_query in words for word in of_query]
    triples = [triple for of_query in words for triple in zip(of_query, of_query[1:], of_query[2:], strict=False)]
    distinct = {"texts": texts, "openings": openings, "words": single, "trigrams": triples}
    median, ninth = np.quantile(lengths, (0.5, 0.9)).tolist()
    shares = {f"distinct_{name}": round(len({*found}) / max(1, len(found)), 4) for name, found in distinct.items()}
    return {"median_words": median, "p90_words": ninth, **shares}
