import json
import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from skilltrain.config import Config, input_paths, validate
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import Relevance
from skilltrain.records import Query, Skill
from skilltrain.tables import JUDGEMENTS, QUERIES, RANKINGS, SKILLS, rows_of, write_table
from skilltrain.training.checkpoint import Best
from skilltrain.training.dev import Dev, DevFigure, EncoderDevConfig, RerankerDevConfig
from skilltrain.training.dev_sets import (
    nearest_skills,
    open_encoder_dev,
    open_reranker_dev,
    ordered_candidates,
)

WORDS = ["deploy pods", "chart table", "extract pdf", "translate text", "review commit", "audio clip"]
SKILLS_OF_POOL = [Skill(f"s{i}", f"name {word}", f"about {word}", f"the body {word}") for i, word in enumerate(WORDS)]


def write_benchmark(folder, judged, split="dev"):
    """A benchmark from query_id → {skill_id: verdict}."""
    folder.mkdir(exist_ok=True)
    queries = [Query(query_id, f"find {query_id}", "single", "test", split) for query_id in judged]
    rows = [{"query_id": q, "skill_id": s, "verdict": v, "judge": "test"} for q, row in judged.items()
            for s, v in row.items()]  # fmt: skip
    write_table(rows_of(queries), QUERIES, folder)
    write_table(rows, JUDGEMENTS, folder)


@pytest.fixture
def folder(tmp_path):
    """Six skills; q1 wants s0, q2 wants s1 and s2 and finds s3 useful, q3 wants s5."""
    write_benchmark(tmp_path / "bench", {
        "q1": {"s0": "required", "s4": "irrelevant"},
        "q2": {"s1": "required", "s2": "required", "s3": "useful"},
        "q3": {"s5": "required"},
    })  # fmt: skip
    (tmp_path / "pool").mkdir()
    write_table(rows_of(SKILLS_OF_POOL), SKILLS, tmp_path / "pool")
    return tmp_path


def write_candidates(folder, ranked, stage="bm25", name="candidates"):
    (folder / name).mkdir(exist_ok=True)
    rows = [
        {"query_id": q, "skill_id": s, "rank": rank, "score": -float(rank), "stage": stage}
        for q, skill_ids in ranked.items()
        for rank, s in enumerate(skill_ids, 1)
    ]
    write_table(reversed(rows), RANKINGS, folder / name)


def encoder_dev(folder, encoder, **settings):
    config = EncoderDevConfig(benchmark=folder / "bench", **settings)
    return open_encoder_dev(config, encoder, folder / "pool")


def reranker_dev(folder, reranker, **settings):
    config = RerankerDevConfig(benchmark=folder / "bench", candidates=folder / "candidates", **settings)
    return open_reranker_dev(config, reranker, folder / "pool")


def means(figures):
    return {name: figure.mean for name, figure in figures.items()}


def unit_vectors(rows):
    """Vectors of as many texts as `rows`: each text points to the axes given, more to the first than to the next."""
    vectors = torch.zeros(len(rows), 6)
    for row, axes in enumerate(rows):
        for place, axis in enumerate(axes):
            vectors[row, axis] = 1 / (place + 1)
    return torch.nn.functional.normalize(vectors, dim=1)


def test_an_encoders_figures_by_hand(folder, open_encoder_of):
    dev = encoder_dev(folder, open_encoder_of("bert"), metric="FC@2")
    assert len(dev.inputs) == 3 + 6

    def run(texts):
        # q1 finds s4 before s0; q2 finds s1, s3, s2; q3 finds s5 at once. A skill lies on its own axis.
        return unit_vectors([[4, 0], [1, 3, 2], [5], *([axis] for axis in range(6))])[: len(texts)]

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
    assert means(figures) == pytest.approx(expected)
    assert all(figure.n == 3 and figure.low <= figure.mean <= figure.high for figure in figures.values())
    assert (figures["MRR@10"].low, figures["MRR@10"].high) == (0.5, 1.0)
    assert dev.evaluate(run) == figures
    assert dev.line(figures) == (
        "FC@2 .667 [.00, 1.00]  Hit@1 .667  MRR@10 .833  nDCG@10 .865  Recall@10 1.000  Recall@20 1.000"
    )


def test_the_model_itself_runs_on_the_texts(folder, open_encoder_of):
    encoder = open_encoder_of("bert")
    dev = encoder_dev(folder, encoder)
    figures = dev.evaluate(lambda texts: encoder(list(texts)).detach())
    queries, skills = encoder.tokenize_queries(["find q1", "find q2", "find q3"]), SKILLS_OF_POOL
    rendered = [encoder.settings.template.skill.render(skill) for skill in skills]
    direct = encoder([*queries, *encoder.tokenize(rendered, encoder.settings.max_tokens)])
    ranks = (direct[:3] @ direct[3:].T).argsort(dim=1, descending=True).tolist()
    first = [min(ranks[0].index(0), 9), min(ranks[1].index(1), ranks[1].index(2)), ranks[2].index(5)]
    assert figures["MRR@10"].mean == pytest.approx(sum(1 / (place + 1) for place in first) / 3)


def test_equal_cosines_keep_the_order_of_the_pool():
    vectors = torch.nn.functional.normalize(torch.tensor([[1.0, 0], [1, 1], [0, 1], [1, 0], [1, 1], [1, 0]]), dim=1)
    assert nearest_skills(["a", "b"], ["w", "x", "y", "z"], 3, vectors) == {"a": ["x", "z", "y"], "b": ["y", "w", "x"]}
    many = torch.ones(200 + 5, 1)
    assert set(map(tuple, nearest_skills([str(i) for i in range(200)], list("vwxyz"), 2, many).values())) == {
        ("v", "w")
    }


def test_a_rerankers_figures_by_hand(folder, open_reranker_of):
    write_candidates(folder, {"q1": ["s4", "s0", "s3"], "q2": ["s2", "s5"], "other": ["s1"]})
    dev = reranker_dev(folder, open_reranker_of("bert_reranker"))
    assert [len(pairs) for pairs in dev.inputs] == [3, 2]
    # q1: s0 and s3 tie after s4; q2: s2 falls behind s5, and s1 is no candidate; q3 has none at all.
    figures = dev.evaluate(lambda lists: torch.tensor([3.0, 1, 1, 0, 2])[: sum(map(len, lists))])
    assert figures["MRR@10"].mean == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    assert figures["Recall@10"].mean == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert figures["Hit@1"].mean == 0


def test_equal_scores_keep_the_order_of_the_candidates():
    candidates = {"a": ["x", "y", "z"], "b": ["y", "x"]}
    assert ordered_candidates(candidates, torch.tensor([1.0, 2, 1, 0, 0])) == {"a": ["y", "x", "z"], "b": ["y", "x"]}


def test_the_rerankers_own_pairs_are_scored(folder, open_reranker_of):
    write_candidates(folder, {"q1": ["s0", "s4"], "q2": ["s1"], "q3": ["s5", "s3"]})
    reranker = open_reranker_of("bert_reranker")
    dev = reranker_dev(folder, reranker)
    assert dev.inputs[2] == reranker.tokenize("find q3", [SKILLS_OF_POOL[5], SKILLS_OF_POOL[3]])
    dev.evaluate(lambda lists: reranker([pair for pairs in lists for pair in pairs]).detach())


def test_only_the_first_candidates_count(folder, open_reranker_of, capsys):
    write_candidates(folder, {"q1": ["s4", "s3", "s0"], "q2": ["s1", "s2", "s3"], "q3": ["s5", "s0"]})
    dev = reranker_dev(folder, open_reranker_of("bert_reranker"), num_candidates=2)
    assert [len(pairs) for pairs in dev.inputs] == [2, 2, 2]
    assert (
        "1 of 4 gold skills (1 queries) are not among their candidates and count as missed" in capsys.readouterr().err
    )
    assert dev.evaluate(lambda lists: torch.arange(6).neg().float())["Recall@10"].mean == pytest.approx(2 / 3)


def test_gold_outside_the_pool_is_counted_and_missed(folder, open_encoder_of, capsys):
    write_benchmark(folder / "bench", {"q1": {"s0": "required", "gone": "required", "lost": "useful"}})
    dev = encoder_dev(folder, open_encoder_of("bert"))
    assert "1 of 2 gold skills (1 queries) are not among the pool and count as missed" in capsys.readouterr().err
    figures = dev.evaluate(lambda texts: unit_vectors([[0], *([axis] for axis in range(6))]))
    assert figures["Recall@10"].mean == 0.5
    assert figures["nDCG@10"].mean == pytest.approx(1 / (1 + 1 / math.log2(3)))  # the lost useful skill is left out


def test_samples_hold_what_is_judged_and_depend_on_the_seed(folder, open_encoder_of):
    encoder = open_encoder_of("bert")
    dev = encoder_dev(folder, encoder, max_queries=2)
    assert len(dev.relevances) == 2 and list(dev.relevances) == sorted(dev.relevances)
    chosen = {tuple(encoder_dev(folder, encoder, max_queries=1, seed=seed).relevances) for seed in range(10)}
    assert len(chosen) > 1
    write_benchmark(folder / "bench", {"q1": {"s0": "required", "s3": "useful"}})
    pools = set()
    for seed in range(20):
        dev = encoder_dev(folder, encoder, max_skills=3, seed=seed)
        assert len(dev.inputs) == 1 + 3
        ranked = dev.rank(torch.ones(4, 2))["q1"]
        assert ranked == sorted(ranked) and {"s0", "s3"} < set(ranked)
        pools.add(tuple(ranked))
    assert pools == {tuple(sorted(["s0", "s3", other])) for other in ("s1", "s2", "s4", "s5")}
    assert len(encoder_dev(folder, encoder, max_skills=1).inputs) == 1 + 2  # what is judged always stays
    assert len(encoder_dev(folder, encoder, max_skills=99).inputs) == 1 + 6


def test_texts_lie_in_memory_as_small_numbers(folder, open_encoder_of):
    assert all(text.dtype == "int32" for text in encoder_dev(folder, open_encoder_of("qwen3")).inputs)


def test_skillrouters_own_gold_skills_join_the_pool(folder, open_encoder_of):
    bench = folder / "skillrouter"
    bench.mkdir()
    (bench / "tasks.jsonl").write_text(json.dumps({"task_id": "t", "instruction_text": "find it"}) + "\n")
    entry = {"gt_skill_ids": ["g"], "relevance": {"g": 3}, "task_type": "single"}
    (bench / "relevance.json").write_text(json.dumps({"t": entry}))
    gold = [{"skill_id": i, "name": i, "description": "d", "body": "b"} for i in ("g", "s0")]
    (bench / "gold_skills.jsonl").write_text("".join(json.dumps(one) + "\n" for one in gold))
    dev = open_encoder_dev(EncoderDevConfig(benchmark=bench), open_encoder_of("bert"), folder / "pool")
    assert len(dev.inputs) == 1 + 7
    assert dev.rank(torch.eye(8)[[7, *range(1, 8)]])["t"][0] == "g"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_output_that_is_no_number_is_an_error(folder, open_encoder_of, bad):
    dev = encoder_dev(folder, open_encoder_of("bert"))
    with pytest.raises(SkilltrainError, match=r"bench: the model's output on the dev benchmark is no number"):
        dev.evaluate(lambda texts: torch.full((9, 2), bad))


def test_a_benchmark_without_queries_names_its_folder(folder, open_encoder_of):
    write_benchmark(folder / "bench", {})
    with pytest.raises(SkilltrainError, match=r"bench: holds no query to score"):
        encoder_dev(folder, open_encoder_of("bert"))
    write_benchmark(folder / "bench", {"q1": {"s0": "required"}}, split="test")
    with pytest.raises(SkilltrainError, match=r"bench: holds no query of split 'dev' \(its splits are test \(1\)\)"):
        encoder_dev(folder, open_encoder_of("bert"), split="dev")


def test_a_pool_or_candidates_of_something_else_are_refused(folder, open_encoder_of, open_reranker_of):
    write_benchmark(folder / "bench", {"q1": {"gone": "required"}})
    with pytest.raises(SkilltrainError, match=r"pool: no gold skill of the 1 dev queries is among the pool \(check"):
        encoder_dev(folder, open_encoder_of("bert"))
    reranker = open_reranker_of("bert_reranker")
    write_benchmark(folder / "bench", {"q1": {"s0": "required"}})
    write_candidates(folder, {"other": ["s0"]})
    with pytest.raises(SkilltrainError, match="candidates: no gold skill of the 1 dev queries is among their cand"):
        reranker_dev(folder, reranker)
    write_candidates(folder, {"q1": ["s0", "unknown"]})
    with pytest.raises(SkilltrainError, match=r"candidates: 1 candidates are not in the pool .*pool: unknown"):
        reranker_dev(folder, reranker)


def test_candidates_of_several_stages_are_refused(folder, open_reranker_of):
    (folder / "candidates").mkdir()
    rows = [{"query_id": "q1", "skill_id": "s0", "rank": 1, "score": 1.0, "stage": stage} for stage in ("a", "b")]
    write_table(rows, RANKINGS, folder / "candidates")
    with pytest.raises(SkilltrainError, match=r"holds rankings of 2 stages \(a, b\), not of one"):
        reranker_dev(folder, open_reranker_of("bert_reranker"))


class _Section(Config):
    dev: RerankerDevConfig | EncoderDevConfig | None = None


def test_a_metric_with_a_typo_is_refused_with_the_list(tmp_path):
    values = {"benchmark": "b", "metric": "MMR@10"}
    with pytest.raises(SkilltrainError) as error:
        validate(EncoderDevConfig, values, "recipe.yaml")
    assert str(error.value).startswith("recipe.yaml: metric: unknown measure 'MMR@10', did you mean 'MRR@10'?")
    assert "Hit@k, MRR@k" in str(error.value)


def test_a_metric_that_no_order_can_change_is_refused():
    values = {"benchmark": "b", "candidates": "c", "metric": "Recall@20"}
    with pytest.raises(SkilltrainError, match="metric: Recall@20 is the same for every order of 20 candidates"):
        validate(RerankerDevConfig, values, "recipe.yaml")
    assert validate(RerankerDevConfig, {**values, "num_candidates": 21}, "x").metric == "Recall@20"
    assert validate(RerankerDevConfig, {**values, "metric": "nDCG@20"}, "x").metric == "nDCG@20"


def test_every_field_says_what_it_is_and_inputs_are_known(tmp_path):
    for config in (EncoderDevConfig, RerankerDevConfig):
        assert all(field.description for field in config.model_fields.values())
    dev = RerankerDevConfig(benchmark=tmp_path / "b", candidates=tmp_path / "c", pool=tmp_path / "p")
    assert set(input_paths(_Section(dev=dev))) == {"dev.benchmark", "dev.candidates", "dev.pool"}


def empty_dev(tmp_path, **settings):
    return Dev(EncoderDevConfig(benchmark=tmp_path, **settings), {}, [], lambda output: {})


def figure(value):
    return {"MRR@10": DevFigure(value, value, value, 3)}


def test_training_stops_after_evaluations_without_a_new_best(tmp_path):
    best = Best(empty_dev(tmp_path, patience=2))
    assert [best.update(step, figure(value)) for step, value in ((10, 0.0), (20, 0.5), (30, 0.5))] == [
        True,
        True,
        False,
    ]
    assert (best.step, best.value, best.num_bad, best.should_stop) == (20, 0.5, 1, False)
    assert not best.update(40, figure(0.4)) and best.should_stop
    assert best.figures == figure(0.5)


def test_a_new_best_gives_new_patience(tmp_path):
    best = Best(empty_dev(tmp_path, patience=2))
    for step, value in enumerate((0.5, 0.4, 0.6, 0.5)):
        best.update(step, figure(value))
    assert not best.should_stop and best.step == 2


def test_without_patience_or_a_benchmark_training_never_stops(tmp_path):
    best = Best(empty_dev(tmp_path))
    for step in range(20):
        assert best.update(step, figure(0.5)) == (step == 0) and not best.should_stop
    assert not Best(None).should_stop


def test_the_state_survives_json(tmp_path):
    dev = empty_dev(tmp_path, patience=2)
    best, resumed = Best(dev), Best(dev)
    best.update(10, figure(0.5))
    best.update(20, figure(0.25))
    resumed.load_state_dict(json.loads(json.dumps(best.state_dict(), allow_nan=False)))
    assert vars(resumed) == vars(best)
    resumed.update(30, figure(0.5))
    assert resumed.should_stop and resumed.step == 10
    fresh = Best(dev)
    fresh.load_state_dict(json.loads(json.dumps(Best(dev).state_dict(), allow_nan=False)))
    assert fresh.update(1, figure(0.0))


def _figure_on_rank(rank, root):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{root / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=40)
    )
    relevances = {"q1": Relevance(frozenset({"s0"}), {"s0": 1.0})}
    # A last bit orders the skills differently on the second rank.
    dev = Dev(EncoderDevConfig(benchmark=root), relevances, ["q", "s0", "s1"],
              lambda output: {"q1": ["s0", "s1"] if rank == 0 else ["s1", "s0"]})  # fmt: skip
    figures = dev.evaluate(lambda texts: torch.ones(3, 2))
    (root / f"rank{rank}.json").write_text(json.dumps(figures["MRR@10"].mean))
    dist.destroy_process_group()


def test_all_ranks_agree_on_the_figures(tmp_path):
    multiprocessing.spawn(_figure_on_rank, args=(tmp_path,), nprocs=2)
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)] == [1.0, 1.0]
