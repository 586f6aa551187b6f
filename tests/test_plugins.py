"""Plug-ins are loaded by name. skilltrain.testing accepts ours and rejects broken ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmark_folders import write_ours, write_pool
from faults import raises
from skilltrain.data.filter_layers import (
    PAIR,
    FilterLayer,
    FilterPool,
    JaccardLayer,
    NameLayer,
    RankWindowLayer,
)
from skilltrain.data.sources import Mining, NegativeSource
from skilltrain.losses import KL, InfoNCE, ListNet, ListwiseCE, MarginMSE, PointwiseBCE, RankNet
from skilltrain.metrics.benchmarks.load import TABLES
from skilltrain.metrics.measures import has_cutoff
from skilltrain.plugins import BUILT_IN, OneOf, load_plugin, plugin_paths
from skilltrain.records import Query, Skill
from skilltrain.retrieval.lexical import BM25Index, bm25_text
from skilltrain.retrieval.nearest import ChunkVectors, PoolRanker
from skilltrain.testing import (
    check_benchmark,
    check_filter,
    check_loss,
    check_measure,
    check_ranker,
    check_source,
    check_stage,
)
from skilltrain.workers import WorkersConfig

LOSSES = [InfoNCE(), KL(), ListNet(), ListwiseCE(), MarginMSE(), PointwiseBCE(), RankNet()]
MEASURES = [f"{name}@3" if has_cutoff(name) else name for name in BUILT_IN["measure"]]
LAYERS = [NameLayer(), JaccardLayer(above=0.3), RankWindowLayer(ranks={"semantic": (1, 2)})]
SKILLS = [
    Skill(f"s{n}", f"skill {n % 5}", "", f"read the pdf page {n} of a file", category=f"c{n % 3}")
    for n in range(8)
]
QUERIES = [Query("q1", "read a pdf page", "", "t", "train"), Query("q2", "file", "", "t", "train")]


class BrokenRanker:
    """Returns a given ranking that the check must reject."""

    def __init__(self, *ranking: tuple[str, float]) -> None:
        self.ranking = list(ranking)

    def rank(self, queries, candidates, keep):
        return {query.query_id: self.ranking for query in queries}


@pytest.fixture
def mining() -> Mining:
    """Random vectors of two queries and eight skills."""
    vectors = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    chunks = ChunkVectors.one_each(vectors[2:])
    positives = [np.array([0, 1]), np.array([2])]
    return Mining(SKILLS, QUERIES, positives, vectors[:2], chunks, 4, "pool", seed=0)


@pytest.fixture
def pool() -> FilterPool:
    """One query with six candidates."""
    pairs = np.zeros(6, dtype=PAIR)
    pairs["row"] = pairs["skill"] = np.arange(6)
    pairs["rank"] = np.arange(1, 7)
    pairs["gold"] = 7
    return FilterPool(SKILLS, pairs, ["semantic"] * 6, ["q"], None, None, WorkersConfig(num=1))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, entries: str) -> None:
    """Put a package with these entry points on the path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[skilltrain.plugins]\n{entries}\n")
    monkeypatch.syspath_prepend(folder)
    plugin_paths.cache_clear()


@pytest.fixture(autouse=True)
def _forget_plugins():
    yield
    plugin_paths.cache_clear()


@pytest.mark.parametrize("kind", BUILT_IN)
def test_built_in_plugins_can_be_imported(kind: str):
    for name in BUILT_IN[kind]:
        assert load_plugin(kind, name) is not None


def test_entry_point_adds_a_name(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "acme", "measure.Acme = skilltrain.metrics.measures:hit")

    assert load_plugin("measure", "Acme") is load_plugin("measure", "Hit")


def test_plugin_of_another_class_is_not_allowed(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "acme", "ranker.text = string:Formatter")

    classes = OneOf("ranker", only="can_be_leg").classes()

    assert [plugin.__name__ for plugin in classes if plugin.__module__ == "string"] == []
    assert len(classes) > 3


def test_name_of_two_packages_is_refused(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "acme", "measure.Hit = acme:hit")

    with raises("repeated-name"):
        plugin_paths("measure")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_our_losses_pass_check(loss):
    check_loss(loss)


@pytest.mark.parametrize("name", MEASURES)
def test_our_measures_pass_check(name: str):
    check_measure(name)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_our_layers_pass_check(layer: FilterLayer, pool: FilterPool):
    check_filter(layer, pool)

    assert np.isfinite(layer.check(pool, pool.pairs)).any()


@pytest.mark.parametrize("name", BUILT_IN["source"])
def test_our_sources_pass_check(name: str, mining: Mining):
    source = load_plugin("source", name)()

    check_source(source, mining, limit=4)

    assert len(source.find(mining, 0, 4)[0]) > 0


def test_our_ranker_passes_check():
    index = BM25Index([bm25_text(skill) for skill in SKILLS])
    ranker = PoolRanker([skill.skill_id for skill in SKILLS], index)

    check_ranker(ranker, QUERIES, SKILLS)

    assert {len(ranking) for ranking in ranker.rank(QUERIES, None, 3).values()} == {3}


def test_our_tables_pass_check(tmp_path):
    queries = [("q1", "one", "train"), ("q2", "two", "dev")]
    write_ours(tmp_path, queries, {"q1": {"s1": "required"}, "q2": {"s2": "required"}})

    check_benchmark(TABLES, tmp_path)


def test_stage_with_same_files_passes_check(tmp_path):
    check_stage(lambda out: write_pool(out, SKILLS), tmp_path)


class LeakyLoss:
    def __call__(self, batch):
        return batch.scores.sum()


class FirstLoss:
    def __call__(self, batch):
        return (batch.filled(0.0)[:, 0] ** 2).sum()


class MeanLoss:
    def __call__(self, batch):
        return batch.filled(0.0).mean()


class EagerSource(NegativeSource):
    def find(self, mining, row, limit):
        return np.arange(limit), np.zeros(limit)


class MovingLayer(NameLayer):
    def check(self, pool, pairs):
        return np.arange(len(pairs), dtype=float)


def always_one(ranking, relevance, k):
    """1."""
    return 1.0


BROKEN: list[tuple[Callable[[], None], str]] = [
    (lambda: check_loss(LeakyLoss()), "an invalid candidate has a gradient"),
    (lambda: check_loss(FirstLoss()), "depends on the order of the candidates"),
    (lambda: check_loss(MeanLoss()), "not the sum of its queries' losses"),
    (lambda: check_ranker(BrokenRanker(("x", 1)), QUERIES, SKILLS), "not in the pool"),
    (lambda: check_ranker(BrokenRanker(("s0", 1), ("s0", 0)), QUERIES, SKILLS), "ranked twice"),
    (lambda: check_ranker(BrokenRanker(("s0", 0), ("s1", 1)), QUERIES, SKILLS), "must descend"),
    (lambda: check_ranker(BrokenRanker(("s1", 1), ("s0", 1)), QUERIES, SKILLS), "keep the order"),
    (lambda: check_measure("test_plugins:always_one@3"), "not 0 for an empty ranking"),
]


@pytest.mark.parametrize(("check", "message"), BROKEN)
def test_broken_plugin_fails_check(check: Callable[[], None], message: str):
    with pytest.raises(AssertionError, match=message):
        check()


def test_layer_that_reads_other_pairs_fails(pool: FilterPool):
    with pytest.raises(AssertionError, match="depends on other pairs"):
        check_filter(MovingLayer(), pool)


def test_source_that_finds_positives_fails(mining: Mining):
    with pytest.raises(AssertionError, match="a candidate is a positive"):
        check_source(EagerSource(), mining, limit=4)


def test_reader_that_mixes_splits_fails(tmp_path):
    queries = [("q1", "one", "train"), ("q2", "two", "dev")]
    write_ours(tmp_path, queries, {"q1": {"s1": "required"}, "q2": {"s2": "required"}})
    mixing = TABLES._replace(read=lambda folder, split: TABLES.read(folder, None))

    with pytest.raises(AssertionError, match="has other tasks"):
        check_benchmark(mixing, tmp_path)


def test_stage_with_changing_files_fails(tmp_path):
    with pytest.raises(AssertionError, match="writes other files"):
        check_stage(lambda out: (out / "x").write_text(out.name), tmp_path)
