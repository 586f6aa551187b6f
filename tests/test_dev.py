"""Dev evaluation in training: measures by hand, the model among rankers, refused settings."""

import math
from dataclasses import replace

import pytest
import torch

from benchmark_folders import skillrouter, write, write_ours, write_pool, write_rankings
from faults import raises
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill
from skilltrain.training.dev import encoder_opener, open_dev, reranker_opener
from skilltrain.training.settings import DevConfig
from skilltrain.training.train import TrainEncoder, TrainReranker

WORDS = [
    "deploy pods",
    "chart table",
    "extract pdf",
    "translate text",
    "review commit",
    "audio clip",
]
SKILLS_OF_POOL = [
    Skill(f"s{i}", f"name {word}", f"about {word}", f"the body {word}")
    for i, word in enumerate(WORDS)
]


def write_benchmark(folder, judged):
    """Write a benchmark from {query_id: {skill_id: verdict}}."""
    queries = [(query_id, f"find the body of {query_id}", "dev") for query_id in judged]
    write_ours(folder, queries, judged)


@pytest.fixture
def folder(tmp_path):
    """Six skills; q1 has the gold skill s0, q2 has s1, s2 and the useful s3, q3 has s5."""
    verdicts = {
        "q1": {"s0": "required", "s4": "irrelevant"},
        "q2": {"s1": "required", "s2": "required", "s3": "useful"},
        "q3": {"s5": "required"},
    }
    write_benchmark(tmp_path / "bench", verdicts)
    write_pool(tmp_path / "pool", SKILLS_OF_POOL)
    return tmp_path


def write_candidates(folder, ranked):
    """Write rankings from {query_id: [skill_id, best first]}."""
    rankings = {}
    for query_id, skill_ids in ranked.items():
        rankings[query_id] = [(skill_id, -float(rank)) for rank, skill_id in enumerate(skill_ids)]
    write_rankings(folder / "candidates", {"bm25": rankings})


def encoder_dev(folder, encoder, **settings):
    return open_dev(DevConfig(benchmark=folder / "bench", **settings), encoder, folder / "pool")


def reranker_dev(folder, reranker, keep=20):
    """Open a dev evaluation of the reranker in training behind saved candidates."""
    rankers = [
        {"kind": "saved", "rankings": folder / "candidates"},
        {"kind": "rerank", "source": "self", "keep": keep},
    ]
    return encoder_dev(folder, reranker, rankers=rankers)


def giving(output):
    """Return a model that gives this output for any texts or pairs and records its `inputs`."""

    def model(inputs):
        model.inputs.append(inputs)
        return output

    model.inputs = []
    return model


def pointing(*queries):
    """Return a model in which each of six skills is an axis.

    A query is a list of axes; its vector points to the first more than to the next.
    """
    rows = [*queries, *([axis] for axis in range(6))]
    vectors = torch.zeros(len(rows), 6)
    for row, axes in enumerate(rows):
        vectors[row, list(axes)] = torch.tensor([1 / rank for rank in range(1, len(axes) + 1)])
    return giving(torch.nn.functional.normalize(vectors, dim=1))


@pytest.fixture
def encoder_figures(folder, open_encoder_of):
    """The dev evaluation of an encoder and its measures.

    q1 finds s4 before s0; q2 finds s1, s3 and s2; q3 finds s5 at once.
    """
    dev = encoder_dev(folder, open_encoder_of("bert"), metric="FC@2")
    return dev, dev.evaluate(pointing([4, 0], [1, 3, 2], [5]))


def test_measures_of_encoder_by_hand(encoder_figures):
    _, figures = encoder_figures

    best_dcg = 1 + 1 / math.log2(3) + 0.5 / 2
    expected = {
        "Hit@1": 2 / 3,
        "MRR@10": (0.5 + 1 + 1) / 3,
        "nDCG@10": (1 / math.log2(3) + (1 + 0.5 / math.log2(3) + 1 / 2) / best_dcg + 1) / 3,
        "Recall@10": 1.0,
        "Recall@20": 1.0,
        "FC@2": 2 / 3,
    }
    assert {name: figure.mean for name, figure in figures.items()} == pytest.approx(expected)


def test_measures_have_intervals(encoder_figures):
    _, figures = encoder_figures

    for figure in figures.values():
        assert figure.n == 3
        assert figure.low <= figure.mean <= figure.high
    assert (figures["MRR@10"].low, figures["MRR@10"].high) == (0.5, 1.0)


def test_line_starts_with_metric(encoder_figures):
    dev, figures = encoder_figures

    metrics = "Hit@1 .667  MRR@10 .833  nDCG@10 .865  Recall@10 1.000  Recall@20 1.000"
    assert dev.line(figures) == f"FC@2 .667 [.00, 1.00]  {metrics}"


@pytest.fixture
def two_candidates(folder, open_reranker_of):
    """The dev evaluation of a reranker that scores two candidates of each query."""
    write_candidates(folder, {"q1": ["s4", "s3", "s0"], "q2": ["s2", "s5", "s4"], "other": ["s1"]})
    return reranker_dev(folder, open_reranker_of("bert_reranker"), keep=2)


def test_missing_candidates_are_a_warning(capsys, two_candidates):
    message = "2 of 4 gold skills (2 queries) are not among the candidates of the rankers before"

    assert f"{message} the model and count as" in capsys.readouterr().err


def test_measures_of_reranker_by_hand(two_candidates):
    # q1: s0 stays behind the two; q2: s2 falls behind s5, and s1 is no candidate; q3 has none.
    model = giving(torch.tensor([3.0, 3, 0, 2]))

    figures = two_candidates.evaluate(model)

    assert [len(pairs) for pairs in model.inputs[0].lists] == [2, 2]
    assert figures["MRR@10"].mean == pytest.approx((1 / 3 + 1 / 2 + 0) / 3)
    assert figures["Recall@10"].mean == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert figures["Hit@1"].mean == 0


def test_other_scores_change_measures(two_candidates):
    figures = two_candidates.evaluate(giving(torch.tensor([3.0, 4, 3, 2])))

    assert figures["Hit@1"].mean == pytest.approx(1 / 3)


def test_rankers_before_model_rank_once(folder, open_reranker_of):
    rankers = [
        {"kind": "lexical", "keep": 3},
        {"kind": "rerank", "source": "self", "keep": 2, "first_weight": 1e6},
    ]
    dev = encoder_dev(folder, open_reranker_of("bert_reranker"), rankers=rankers)

    write_benchmark(folder / "bench", {"q": {"s0": "required"}})

    assert dev.evaluate(giving(torch.arange(6.0))) == dev.evaluate(giving(torch.arange(6.0)))


def test_encoder_can_be_a_leg(folder, open_encoder_of):
    legs = [{"kind": "lexical"}, {"kind": "dense", "source": "self"}]
    fuse = {"kind": "fuse", "of": legs, "weights": [0, 1]}
    dev = encoder_dev(folder, open_encoder_of("bert"), rankers=[fuse])

    right = dev.evaluate(pointing([0], [1, 2], [5]))
    wrong = dev.evaluate(pointing([3], [4], [3]))

    assert right["Hit@1"].mean == 1.0
    assert wrong["Hit@1"].mean == 0.0


def skills_of(dev):
    return [skill.skill_id for skill in dev.cascade.pool.skills]


@pytest.mark.parametrize(
    ("max_skills", "skill_ids"),
    [(3, ["s0", "s3", "s5"]), (1, ["s0", "s3"])],  # judged skills always stay
)
def test_sample_of_pool_keeps_judged_skills(folder, open_encoder_of, max_skills, skill_ids):
    write_benchmark(folder / "bench", {"q1": {"s0": "required", "s3": "useful", "lost": "useful"}})

    dev = encoder_dev(folder, open_encoder_of("bert"), max_skills=max_skills)

    assert skills_of(dev) == skill_ids


def test_gold_skills_of_benchmark_join_pool(folder, open_encoder_of):
    entry = {"gt_skill_ids": ["g"], "relevance": {"g": 3}, "task_type": "single"}
    gold = [{"skill_id": i, "name": i, "description": "d", "body": "b"} for i in ("g", "s0")]
    bench = write(folder / "skillrouter", skillrouter([("t", "find it")], {"t": entry}, gold))

    dev = open_dev(DevConfig(benchmark=bench), open_encoder_of("bert"), folder / "pool")

    assert skills_of(dev) == ["s0", "s1", "s2", "s3", "s4", "s5", "g"]
    # The query has the vector of the last skill.
    vectors = torch.eye(8)
    vectors[0] = vectors[7]
    assert dev.evaluate(giving(vectors))["Hit@1"].mean == 1.0


def test_output_without_numbers_is_refused(folder, open_encoder_of):
    with raises("not-a-number"):
        encoder_dev(folder, open_encoder_of("bert")).evaluate(giving(torch.full((9, 2), math.nan)))


def test_pool_without_gold_is_refused(folder, open_encoder_of):
    write_benchmark(folder / "bench", {"q1": {"gone": "required"}})

    with raises("missing-gold-skill"):
        encoder_dev(folder, open_encoder_of("bert"))


@pytest.mark.parametrize(
    ("candidates", "code"),
    [({"other": ["s0"]}, "missing-gold-skill"), ({"q1": ["s0", "unknown"]}, "unknown-skill")],
)
def test_foreign_candidates_are_refused(folder, open_reranker_of, candidates, code):
    write_benchmark(folder / "bench", {"q1": {"s0": "required"}})
    write_candidates(folder, candidates)

    with raises(code):
        reranker_dev(folder, open_reranker_of("bert_reranker"))


RERANK = [{"kind": "lexical"}, {"kind": "rerank", "source": "self"}]
EXPANDED_RERANK = {"kind": "expand", "llm": {"kind": "openai"}, "of": RERANK[1]}
COMMON = {"model": {"source": "m"}, "data": {"pool": "p", "lists": "l"}, "out": "o"}


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (
            TrainEncoder,
            {"metric": "MMR@10"},
            r"dev.metric: unknown measure 'MMR@10', did you mean 'MRR@10'\?",
        ),
        (
            TrainEncoder,
            {"metric": "Set-Compat"},
            "dev.metric: no step can be chosen by Set-Compat",
        ),
        (
            TrainReranker,
            {"metric": "Recall@20", "rankers": RERANK},
            "is the same for every order of 20 candid",
        ),
        (
            TrainReranker,
            {"metric": "Recall@20", "rankers": [RERANK[0], EXPANDED_RERANK]},
            "is the same for every order of 20 candid",
        ),
        (
            TrainReranker,
            {"rankers": RERANK[:1]},
            r"none of them is the model in training \(source: self\)",
        ),
        (
            TrainReranker,
            {"rankers": RERANK[1:]},
            r"the first one must find skills, for instance {kind: saved, ra",
        ),
        (
            TrainEncoder,
            {"rankers": RERANK},
            r"an encoder in training must be {kind: dense, source: self}",
        ),
        (
            TrainReranker,
            {},
            r"a reranker in training orders the candidates of others: \[{kind: saved",
        ),
    ],
)
def test_invalid_dev_settings_are_refused(stage, changes, message):
    name = "train_encoder" if stage is TrainEncoder else "train_reranker"
    values = {"stage": name, **COMMON, "dev": {"benchmark": "b", **changes}}

    with pytest.raises(SkilltrainError, match=message):
        validate(stage, values, "recipe.yaml")


def test_dev_settings_of_reranker_are_valid():
    dev = {"benchmark": "b", "metric": "nDCG@20", "rankers": RERANK}

    recipe = {"stage": "train_reranker", **COMMON, "dev": dev}
    config = validate(TrainReranker, recipe, "recipe.yaml")

    assert config.dev is not None
    assert config.dev.metric == "nDCG@20"
    assert [ranker.kind for ranker in config.dev.rankers] == ["lexical", "rerank"]


# Equal skills -------------------------------------------------------------------------------------

TWINS = {f"t{i}": Skill(f"t{i}", "same", "same text", "same body") for i in range(3)}
QUERY = Query("q", "find text", "single", "test", "dev")


def test_encoder_encodes_equal_skills_once(open_encoder_of):
    vectors = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    over_model = encoder_opener(open_encoder_of("bert"), [QUERY], TWINS)

    ranker = over_model(lambda batch: vectors[: len(batch.texts)])

    (ranking,) = ranker.rank([QUERY], None, 3).values()
    assert [skill_id for skill_id, _ in ranking] == ["t0", "t1", "t2"]


def test_encoder_encodes_equal_queries_once(open_encoder_of):
    queries = [QUERY, replace(QUERY, query_id="r")]
    sizes = []

    def model(batch):
        sizes.append(len(batch.texts))
        return torch.eye(len(batch.texts))

    encoder_opener(open_encoder_of("bert"), queries, TWINS)(model)

    assert sizes == [2], "one query text and one skill text"


def test_reranker_scores_equal_skills_once(open_reranker_of):
    over_model = reranker_opener(open_reranker_of("bert_reranker"), TWINS)
    candidates = [("t2", 0.0), ("t0", 0.0), ("t1", 0.0)]

    ranker = over_model(lambda batch: torch.arange(sum(map(len, batch.lists)), dtype=torch.float32))

    assert ranker.rank([QUERY], {"q": candidates}, 3) == {"q": candidates}
