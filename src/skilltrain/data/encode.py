"""Stage `encode`: puts the vectors of a pool, and of queries, into a cache, on as many processes as there are.

`accelerate launch -m skilltrain encode …` spreads it over the GPUs of one machine or several that share the cache's
folder. Whatever encodes the same texts by the same model afterwards (mine, filter, candidates, evaluate, route) finds
them there.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Bool
from pydantic import Field, model_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.ranks import Ranks
from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, SkillEncoder, encode_and_keep, open_encoder
from skilltrain.retrieval.encode_texts import EncodingCount, OrderedTexts, longest_first, text_keys
from skilltrain.retrieval.vectors import VectorCache
from skilltrain.tables import QUERIES, SKILLS, read_table, skills_from_table
from skilltrain.terminal import say

_SHOWN_WITHIN = 90  # seconds until a file that another machine wrote is seen; NFS keeps a folder's listing for 60


class EncodeConfig(Config):
    """Encode a pool, and queries, into a cache of vectors, on any number of processes."""

    stage: Literal["encode"]
    pool: InputPath = Field(description="folder of the pool")
    queries: InputPath | None = Field(default=None, description="folder of queries, to encode them too")
    encoder: EncoderSource = Field(description="encoder, and the cache that its vectors go to (encoder.cache)")
    out: Path = Field(description="folder for the summary; the vectors are in the cache")

    @model_validator(mode="after")
    def _keeps_vectors(self) -> Self:
        if self.encoder.cache is None:
            raise ValueError("encoder.cache is missing: the folder that the vectors go to")
        return self


@dataclass(frozen=True)
class _Source:
    """Texts of one kind, read anew by each call of `read`."""

    kind: str
    read: Callable[[], Iterator[str]]
    max_tokens: int


def run_encode(config: EncodeConfig, out: Path) -> dict[str, Any]:
    """Counts of texts, of those that were encoded now, and of tokens; writes vectors into the cache, and nothing else.

    All ranks call it. They take every n-th of the missing texts in order of length, so that all have equal work,
    whatever an earlier run on more or fewer ranks has left. Equal texts are encoded once.
    """
    ranks = Ranks()
    encoder = open_encoder(config.encoder)
    started, count = monotonic(), EncodingCount()
    found: dict[str, Any] = {}
    for source in _sources(config, encoder):
        found |= _encode_source(encoder, source, ranks, count)
    texts, tokens, slots = ranks.sums(count.texts, count.tokens, count.slots)
    ranks.leave()
    if texts:
        seconds = monotonic() - started
        say(f"encoded {texts:,} texts, {tokens:,} tokens in {seconds:,.0f} s ({tokens / seconds:,.0f} tokens/s)")
    return found | {
        "num_tokens": tokens,
        "padding": round(1 - tokens / slots, 4) if slots else 0.0,
        "num_ranks": ranks.total,
        "dim": encoder.model.dim,
        "vectors": str(_cache(encoder).folder),
    }


def _sources(config: EncodeConfig, encoder: SkillEncoder) -> Iterator[_Source]:
    settings = encoder.model.settings
    yield _Source("skills", lambda: _skill_texts(config.pool, settings.template.skill.render), settings.max_tokens)
    if (queries := config.queries) is not None:
        render = settings.template.render_query
        yield _Source("queries", lambda: map(render, _query_texts(queries)), settings.query_max_tokens)


def _skill_texts(pool: Path, render: Callable[[Skill], str]) -> Iterator[str]:
    return map(render, skills_from_table(read_table(pool, SKILLS)))


def _query_texts(queries: Path) -> Iterator[str]:
    return iter(read_table(queries, QUERIES).column("text").to_pylist())


def _encode_source(encoder: SkillEncoder, source: _Source, ranks: Ranks, count: EncodingCount) -> dict[str, int]:
    """Encode this rank's share of the texts that the cache lacks; the counts are over all ranks."""
    cache = _cache(encoder)
    texts = list(source.read())
    keys, lengths = text_keys(texts, source.max_tokens)
    if not ranks.same(hashlib.sha256(encoder.identity.encode() + keys.tobytes()).digest()):
        what = f"rank {ranks.number} has other weights, another number format or other {source.kind} than the first"
        raise SkilltrainError(what, where=encoder.source, fix="give all machines the same files and set precision")
    _, first = np.unique(keys, return_index=True)
    missing = first[_missing(cache, keys[first], ranks)]
    missing = missing[longest_first(lengths[missing])]
    share = missing[ranks.number :: ranks.total]
    before, part_of = count.texts, f" (rank 0 of {ranks.total})" if ranks.total > 1 else ""
    mine = [texts[int(place)] for place in share]
    work = OrderedTexts(mine, keys[share], share, source.max_tokens, f"encoding {source.kind}{part_of}")
    for _ in encode_and_keep(encoder, work, count):
        pass  # the cache has them
    [encoded] = ranks.sums(count.texts - before)
    if ranks.is_first:
        _wait_for(cache, keys[missing])
    return {
        f"num_{source.kind}": len(keys),
        f"num_{source.kind}_distinct": len(first),
        f"num_{source.kind}_encoded": encoded,
    }


def _missing(cache: VectorCache, keys: np.ndarray, ranks: Ranks) -> Bool[np.ndarray, " key"]:
    """Which keys the first rank does not find in the cache, whole; the others' view of the folder may be older."""
    missing = np.ones(len(keys), dtype=bool)
    if ranks.is_first:
        missing = ~cache.read(keys)[0]
    return ranks.from_first(missing.view(np.uint8)).astype(bool)


def _wait_for(cache: VectorCache, keys: np.ndarray) -> None:
    """Return when all `keys` are to be seen here. Raises SkilltrainError if they do not appear."""
    deadline = monotonic() + _SHOWN_WITHIN
    while (lost := int((~cache.holds(keys)).sum())) and monotonic() < deadline:
        sleep(0.2 if monotonic() < deadline - _SHOWN_WITHIN + 2 else 2)
    if lost:
        what = f"{lost} vectors that other ranks have written are not here"
        raise SkilltrainError(what, where=cache.folder, fix="encoder.cache must be a folder that all machines share")


def _cache(encoder: SkillEncoder) -> VectorCache:
    assert encoder.cache is not None  # the settings see to it
    return encoder.cache
