"""Every text's vector while each distinct text is encoded once: known ones come from a cache, the rest are encoded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Float32, Int64

from skilltrain.retrieval.encode_texts import OrderedTexts, longest_first, text_keys
from skilltrain.retrieval.vector_cache import VectorCache

ItemT = TypeVar("ItemT")
Parts = Iterator[tuple[Int64[np.ndarray, " some"], Float32[np.ndarray, "some dim"]]]
"""Positions among the texts to encode, and their vectors."""


@dataclass(frozen=True)
class Vectors:
    """Where vectors of `dim` numbers come from: the cache first, then `encode`, which keeps there what it yields.

    `encode` takes distinct texts, longest first, and the position of each among all items.
    """

    dim: int
    cache: VectorCache | None
    encode: Callable[[OrderedTexts, Int64[np.ndarray, " text"]], Parts]

    def of(
        self, items: Sequence[ItemT], render: Callable[[ItemT], str], max_tokens: int, description: str
    ) -> Float32[np.ndarray, "item dim"]:
        """The vector of each item's text, cut to `max_tokens`."""
        keys, lengths = text_keys(map(render, items), max_tokens)
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        result = np.empty((len(keys), self.dim), dtype=np.float32)
        missing = np.ones(len(first), dtype=bool)
        if self.cache:
            places = self.cache.places(keys[first])
            known = np.flatnonzero(places[:, 0] >= 0)
            for some, vectors in self.cache.read(places[known]):
                result[first[known[some]]] = vectors
                missing[known[some]] = False
        order = first[missing][longest_first(lengths[first[missing]])]
        work = OrderedTexts(_Rendered(render, items, order), keys[order], max_tokens, description)
        for part, vectors in self.encode(work, order):
            result[order[part]] = vectors
        repeated = np.flatnonzero(first[which] != np.arange(len(keys)))
        result[repeated] = result[first[which[repeated]]]
        return result


@dataclass(frozen=True)
class _Rendered(Generic[ItemT]):
    """The texts of `items` at `positions`, each rendered when it is asked for."""

    render: Callable[[ItemT], str]
    items: Sequence[ItemT]
    positions: Int64[np.ndarray, " position"]

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, place: int) -> str:
        return self.render(self.items[self.positions[place]])
