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
    """A benchmark from query_id → {skill_id: verdict}."""
    write_ours(folder, [(query_id, f"find {query_id}", "dev") for query_id in judged], judged)


@pytest.fixture
def folder(tmp_path):
    """Six skills; q1 wants s0, q2 wants s1 and s2 and finds s3 useful, q3 wants s5."""
    write_benchmark(
        tmp_path / "bench",
        {
            "q1": {"s0": "required", "s4": "irrelevant"},
            "q2": {"s1": "required", "s2": "required", "s3": "useful"},
            "q3": {"s5": "required"},
        },
    )
    write_pool(tmp_path / "pool", SKILLS_OF_POOL)
    return tmp_path


def write_candidates(folder, ranked):
    rankings = {
        q: [(s, -float(rank)) for rank, s in enumerate(skill_ids, 1)]
        for q, skill_ids in ranked.items()
    }
    write_rankings(folder / "candidates", {"bm25": rankings})


def encoder_dev(folder, encoder, **settings):
    return open_dev(DevConfig(benchmark=folder / "bench", **settings), encoder, folder / "pool")


def behind(folder, keep=20):
    """The reranker in training behind saved candidates."""
    return {
        "rankers": [
            {"kind": "saved", "rankings": folder / "candidates"},
            {"kind": "rerank", "source": "self", "keep": keep},
        ]
    }


def reranker_dev(folder, reranker, keep=20, **settings):
    return encoder_dev(folder, reranker, **behind(folder, keep), **settings)


def giving(output):
    """A model whose output for all texts, or for all pairs, is written down beforehand; and what it was asked."""
    asked = []

    def model(inputs):
        asked.append(inputs)
        return output

    model.asked = asked
    return model


def pointing(*queries):
    """A model whose skills lie each on its own axis; a query points to the axes given, more to the first than to the
    next."""
    rows = [*queries, *([axis] for axis in range(6))]
    vectors = torch.zeros(len(rows), 6)
    for row, axes in enumerate(rows):
        vectors[row, list(axes)] = torch.tensor([1 / (place + 1) for place in range(len(axes))])
    return giving(torch.nn.functional.normalize(vectors, dim=1))


def test_an_encoders_figures_by_hand(folder, open_encoder_of):
    dev = encoder_dev(folder, open_encoder_of("bert"), metric="FC@2")
    run = pointing(
        [4, 0], [1, 3, 2], [5]
    )  # q1 finds s4 before s0; q2 finds s1, s3, s2; q3 finds s5 at once
    figures = dev.evaluate(run)
    best = 1 + 1 / math.log2(3) + 0.5 / 2

    expected = {
        "Hit@1": 2 / 3,
        "MRR@10": (0.5 + 1 + 1) / 3,
        "nDCG@10": (1 / math.log2(3) + (1 + 0.5 / math.log2(3) + 1 / 2) / best + 1) / 3,
        "Recall@10": 1.0,
        "Recall@20": 1.0,
        "FC@2": 2 / 3,
    }

    assert {name: figure.mean for name, figure in figures.items()} == pytest.approx(expected)
    assert all(
        figure.n == 3 and figure.low <= figure.mean <= figure.high for figure in figures.values()
    )
    assert (figures["MRR@10"].low, figures["MRR@10"].high) == (0.5, 1.0)
    assert dev.line(figures) == (
        "FC@2 .667 [.00, 1.00]  Hit@1 .667  MRR@10 .833  nDCG@10 .865  Recall@10 1.000  Recall@20 1.000"
    )


def test_a_rerankers_figures_by_hand(folder, open_reranker_of, capsys):
    write_candidates(folder, {"q1": ["s4", "s3", "s0"], "q2": ["s2", "s5", "s4"], "other": ["s1"]})
    dev = reranker_dev(folder, open_reranker_of("bert_reranker"), keep=2)

    said = "2 of 4 gold skills (2 queries) are not among the candidates of the rankers before the model and count as"

    assert said in capsys.readouterr().err

    # q1: s0 stays behind the two; q2: s2 falls behind s5, and s1 is no candidate; q3 has none.
    model = giving(torch.tensor([3.0, 3, 0, 2]))
    figures = dev.evaluate(model)

    assert [len(pairs) for pairs in model.asked[0].lists] == [2, 2]
    assert figures["MRR@10"].mean == pytest.approx((1 / 3 + 1 / 2 + 0) / 3)
    assert figures["Recall@10"].mean == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert figures["Hit@1"].mean == 0
    assert dev.evaluate(giving(torch.tensor([3.0, 4, 3, 2])))["Hit@1"].mean == pytest.approx(1 / 3)


def test_rankers_before_the_model_rank_once(folder, open_reranker_of):
    rankers = [
        {"kind": "lexical", "keep": 3},
        {"kind": "rerank", "source": "self", "keep": 2, "first_weight": 1e6},
    ]
    dev = encoder_dev(folder, open_reranker_of("bert_reranker"), rankers=rankers)

    write_benchmark(folder / "bench", {"q": {"s0": "required"}})

    assert dev.evaluate(giving(torch.arange(6.0))) == dev.evaluate(giving(torch.arange(6.0)))


def test_the_encoder_can_be_one_of_several_rankers(folder, open_encoder_of):
    legs = [{"kind": "lexical"}, {"kind": "dense", "source": "self"}]
    dev = encoder_dev(
        folder, open_encoder_of("bert"), rankers=[{"kind": "fuse", "of": legs, "weights": [0, 1]}]
    )

    assert dev.evaluate(pointing([0], [1, 2], [5]))["Hit@1"].mean == 1.0
    assert dev.evaluate(pointing([3], [4], [3]))["Hit@1"].mean == 0.0


def skills_of(dev):
    return [skill.skill_id for skill in dev.cascade.pool.skills]


def test_a_sample_of_the_pool_holds_what_is_judged(folder, open_encoder_of):
    encoder = open_encoder_of("bert")
    write_benchmark(folder / "bench", {"q1": {"s0": "required", "s3": "useful", "lost": "useful"}})

    assert skills_of(encoder_dev(folder, encoder, max_skills=3)) == ["s0", "s3", "s5"]
    assert skills_of(encoder_dev(folder, encoder, max_skills=1)) == [
        "s0",
        "s3",
    ]  # what is judged always stays


def test_skillrouters_own_gold_skills_join_the_pool(folder, open_encoder_of):
    entry = {"gt_skill_ids": ["g"], "relevance": {"g": 3}, "task_type": "single"}
    gold = [{"skill_id": i, "name": i, "description": "d", "body": "b"} for i in ("g", "s0")]
    bench = write(folder / "skillrouter", skillrouter([("t", "find it")], {"t": entry}, gold))

    dev = open_dev(DevConfig(benchmark=bench), open_encoder_of("bert"), folder / "pool")

    assert skills_of(dev) == [*(f"s{i}" for i in range(6)), "g"]
    assert dev.evaluate(giving(torch.eye(8)[[7, *range(1, 8)]]))["Hit@1"].mean == 1.0


def test_output_that_is_no_number_is_an_error(folder, open_encoder_of):
    with raises("not-a-number"):
        encoder_dev(folder, open_encoder_of("bert")).evaluate(giving(torch.full((9, 2), math.nan)))


def test_a_pool_or_candidates_of_something_else_are_refused(
    folder, open_encoder_of, open_reranker_of
):
    write_benchmark(folder / "bench", {"q1": {"gone": "required"}})

    with raises("missing-gold-skill"):
        encoder_dev(folder, open_encoder_of("bert"))

    reranker = open_reranker_of("bert_reranker")
    write_benchmark(folder / "bench", {"q1": {"s0": "required"}})
    write_candidates(folder, {"other": ["s0"]})

    with raises("missing-gold-skill"):
        reranker_dev(folder, reranker)

    write_candidates(folder, {"q1": ["s0", "unknown"]})

    with raises("unknown-skill"):
        reranker_dev(folder, reranker)


RERANK = [{"kind": "lexical"}, {"kind": "rerank", "source": "self"}]
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
            {"rankers": RERANK[:1]},
            r"none of them is the model in training \(source: self\)",
        ),
        (
            TrainReranker,
            {"rankers": RERANK[1:]},
            r"the first one finds skills, for instance {kind: saved, ra",
        ),
        (
            TrainEncoder,
            {"rankers": RERANK},
            r"an encoder in training is {kind: dense, source: self}",
        ),
        (
            TrainReranker,
            {},
            r"a reranker in training orders the candidates of others: \[{kind: saved",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(stage, changes, message):
    name = "train_encoder" if stage is TrainEncoder else "train_reranker"

    with pytest.raises(SkilltrainError, match=message):
        validate(
            stage, {"stage": name, **COMMON, "dev": {"benchmark": "b", **changes}}, "recipe.yaml"
        )

    well = {"benchmark": "b", "metric": "nDCG@20", "rankers": RERANK}
    validate(TrainReranker, {"stage": "train_reranker", **COMMON, "dev": well}, "recipe.yaml")


# Equal skills -------------------------------------------------------------------------------------

TWINS = {f"t{i}": Skill(f"t{i}", "same", "same text", "same body") for i in range(3)}
QUERY = Query("q", "find text", "single", "test", "dev")


def test_an_encoder_in_training_encodes_equal_skills_once(open_encoder_of):
    vectors = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    open_own = encoder_opener(open_encoder_of("bert"), [QUERY], TWINS)
    own = open_own(lambda batch: vectors[: len(batch.texts)])

    (ranking,) = own.rank([QUERY], None, 3).values()

    assert [skill_id for skill_id, _ in ranking] == ["t0", "t1", "t2"]


def test_an_encoder_in_training_encodes_equal_queries_once(open_encoder_of):
    queries = [QUERY, replace(QUERY, query_id="r")]
    sizes = []

    def model(batch):
        sizes.append(len(batch.texts))
        return torch.eye(len(batch.texts))

    encoder_opener(open_encoder_of("bert"), queries, TWINS)(model)

    assert sizes == [2], "one query text and one skill text"


def test_a_reranker_in_training_scores_equal_skills_once(open_reranker_of):
    open_own = reranker_opener(open_reranker_of("bert_reranker"), TWINS)
    own = open_own(lambda batch: torch.arange(sum(map(len, batch.lists)), dtype=torch.float32))

    (ranking,) = own.rank([QUERY], {"q": [("t2", 0.0), ("t0", 0.0), ("t1", 0.0)]}, 3).values()

    assert ranking == [("t2", 0.0), ("t0", 0.0), ("t1", 0.0)]
