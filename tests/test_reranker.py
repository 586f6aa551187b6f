import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from skilltrain.errors import SkilltrainError
from skilltrain.models.micro_batches import map_micro_batches
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.records import Skill
from skilltrain.retrieval.rerank import RerankerSource, open_reranker, rerank
from skilltrain.templates import QWEN3_RERANKER_PREFIX, QWEN3_RERANKER_SUFFIX, RerankerTemplate
from tiny_models import save_bert

CPU = torch.device("cpu")
QUERY = "deploy the pods and review the chart"
SKILLS = [
    Skill("a", "pods", "deploy pods", "to find the task"),
    Skill("b", "chart", "", "table " * 60),
    Skill("c", "clip", "audio", "video text 运行 " * 30),
    Skill("d", "", "", ""),
]


@pytest.mark.parametrize("max_tokens", [32, 48, 512])
def test_pair_ids_equal_the_tokenizers_own_pair_with_the_skill_cut(open_reranker_of, max_tokens):
    reranker = open_reranker_of("bert_reranker", max_tokens=max_tokens, query_max_tokens=16)
    for skill, pair in zip(SKILLS, reranker.tokenize(QUERY, SKILLS), strict=True):
        text = reranker.settings.template.render_skill(skill)
        own = reranker.tokenizer([QUERY], [text], truncation="only_second", max_length=max_tokens)
        assert pair.ids == own["input_ids"][0]
        segments = [int(position >= pair.second_start) for position in range(len(pair))]
        assert segments == own["token_type_ids"][0]


def test_a_long_query_is_capped_and_the_skill_still_gets_room(open_reranker_of):
    reranker = open_reranker_of("bert_reranker", max_tokens=40, query_max_tokens=10)
    pair = reranker.tokenize("pods " * 100, SKILLS[1:2])[0]
    assert len(pair) == 40 and pair.second_start == 12  # [CLS] + 10 + [SEP]


def test_yes_no_ids_are_prefix_body_suffix_and_only_the_skill_is_cut(open_reranker_of):
    whole = open_reranker_of("qwen3_reranker", max_tokens=2000).tokenize(QUERY, SKILLS)
    limit = len(whole[2]) - 10
    reranker = open_reranker_of("qwen3_reranker", max_tokens=limit)
    encode, template = reranker.tokenizer.encode, reranker.settings.template
    prefix, suffix = encode(QWEN3_RERANKER_PREFIX), encode(QWEN3_RERANKER_SUFFIX)
    pairs = reranker.tokenize(QUERY, SKILLS)
    for skill, pair in zip(SKILLS, pairs, strict=True):
        body = encode(template.render_query(QUERY) + template.render_skill(skill))
        assert pair.ids == prefix + body[: limit - len(prefix) - len(suffix)] + suffix
    assert [len(pair) < len(one) for pair, one in zip(pairs, whole, strict=True)] == [False, False, True, False]


def test_the_border_of_query_and_skill_is_tokenised_as_one_text(open_reranker_of):
    reranker = open_reranker_of("qwen3_reranker")
    (pair,) = reranker.tokenize(QUERY, SKILLS[:1])
    # " pods" is one token, though the space stands in the query's part and the word in the skill's.
    assert reranker.tokenizer.decode(pair.ids[pair.second_start]) == " pods"
    (empty,) = reranker.tokenize(QUERY, SKILLS[3:])
    assert reranker.tokenizer.decode(empty.ids).endswith(f"<Document>: {QWEN3_RERANKER_SUFFIX}")


def test_a_query_longer_than_the_limit_is_never_cut(open_reranker_of):
    reranker = open_reranker_of("qwen3_reranker", max_tokens=32)
    (pair,) = reranker.tokenize(QUERY, SKILLS[:1])
    text = reranker.settings.template.render_query(QUERY).rstrip()
    assert reranker.tokenizer.decode(pair.ids) == QWEN3_RERANKER_PREFIX + text + QWEN3_RERANKER_SUFFIX


def test_bert_scores_equal_plain_transformers_code(open_reranker_of, model_folders):
    reranker = open_reranker_of("bert_reranker", max_tokens=64, query_max_tokens=16)
    model = AutoModelForSequenceClassification.from_pretrained(model_folders["bert_reranker"]).eval()
    texts = [reranker.settings.template.render_skill(skill) for skill in SKILLS]
    inputs = reranker.tokenizer(
        [QUERY] * 4, texts, truncation="only_second", max_length=64, padding=True, return_tensors="pt"
    )
    with torch.inference_mode():
        assert torch.allclose(reranker(reranker.tokenize(QUERY, SKILLS)), model(**inputs).logits[:, 0], atol=1e-5)


def test_yes_no_scores_equal_the_difference_of_full_logits(open_reranker_of, model_folders):
    reranker = open_reranker_of("qwen3_reranker")
    model = AutoModelForCausalLM.from_pretrained(model_folders["qwen3_reranker"]).eval()
    yes, no = reranker.tokenizer.convert_tokens_to_ids(["yes", "no"])
    pairs = reranker.tokenize(QUERY, SKILLS)
    with torch.inference_mode():
        logits = [model(torch.tensor([pair.ids])).logits[0, -1] for pair in pairs]
        expected = torch.stack([one[yes] - one[no] for one in logits])
        assert torch.allclose(reranker(pairs), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["bert_reranker", "qwen3_reranker"])
def test_scores_do_not_depend_on_batch_mates(open_reranker_of, name):
    reranker = open_reranker_of(name)
    pairs = reranker.tokenize(QUERY, SKILLS)
    with torch.inference_mode():
        alone = torch.cat([reranker([pair]) for pair in pairs])
        assert torch.allclose(reranker(pairs), alone, atol=1e-5)
        assert torch.allclose(reranker(pairs[::-1]).flip(0), alone, atol=1e-5)
        assert torch.allclose(map_micro_batches(reranker, pairs, 100, recompute=False), alone, atol=1e-5)


def test_the_form_follows_the_model(open_reranker_of):
    assert open_reranker_of("bert_reranker").settings.template.form == "pair"
    assert open_reranker_of("qwen3_reranker").settings.template.form == "yes_no"


def test_bfloat16_autocast_does_not_round_the_score(open_reranker_of):
    reranker = open_reranker_of("qwen3_reranker")
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores = reranker(reranker.tokenize(QUERY, SKILLS))
    assert scores.dtype == torch.float32
    assert (scores != scores.bfloat16().float()).any()


def test_the_wrong_form_and_the_wrong_folder_are_refused(tmp_path, model_folders):
    yes_no = RerankerTemplate(form="yes_no")
    with pytest.raises(SkilltrainError, match=r"template\.form=yes_no needs a causal language model"):
        load_reranker(RerankerConfig(source=str(model_folders["bert_reranker"]), template=yes_no), CPU)
    with pytest.raises(SkilltrainError, match="max_tokens exceeds the model's 512 positions"):
        load_reranker(RerankerConfig(source=str(model_folders["bert_reranker"]), max_tokens=600), CPU)
    with pytest.raises(
        SkilltrainError, match=r"query_max_tokens \(256\) leaves no room for a skill in max_tokens \(128\)"
    ):
        load_reranker(RerankerConfig(source=str(model_folders["bert_reranker"]), max_tokens=128), CPU)
    folder = save_bert(tmp_path / "trained", reranker=False)
    (folder / "skilltrain.json").write_text(json.dumps({"kind": "encoder", "settings": {}}))
    with pytest.raises(SkilltrainError, match="its model is of kind encoder, but reranker is needed here"):
        load_reranker(RerankerConfig(source=str(folder)), CPU)


def test_candidates_come_back_best_first_with_ties_in_their_order(model_folders):
    reranker = open_reranker(RerankerSource(source=str(model_folders["bert_reranker"]), precision="float32"))
    skills = {skill.skill_id: skill for skill in [*SKILLS, Skill("a2", "pods", "deploy pods", "to find the task")]}
    candidates = {"q1": ["d", "a", "b", "a2", "c"], "q2": [], "q3": ["b"]}
    queries = {"q1": QUERY, "q2": "x", "q3": "clip"}
    result = rerank(reranker, queries, candidates, skills, token_budget=64)
    scores = [score for _, score in result["q1"]]
    ranked = [skill_id for skill_id, _ in result["q1"]]
    assert scores == sorted(scores, reverse=True) and sorted(ranked) == sorted(candidates["q1"])
    assert ranked.index("a") < ranked.index("a2") and dict(result["q1"])["a"] == pytest.approx(dict(result["q1"])["a2"])
    assert result["q2"] == [] and [skill_id for skill_id, _ in result["q3"]] == ["b"]


def test_cosine_pair_is_the_cosine_of_the_two_segments_mean_vectors(open_reranker_of, model_folders):
    template = RerankerTemplate(form="cosine_pair")
    reranker = open_reranker_of("bert", template=template, max_tokens=64, query_max_tokens=16)
    pairs = reranker.tokenize(QUERY, SKILLS)
    assert [pair.ids for pair in pairs] == [
        pair.ids
        for pair in open_reranker_of("bert_reranker", max_tokens=64, query_max_tokens=16).tokenize(QUERY, SKILLS)
    ]
    model = AutoModel.from_pretrained(model_folders["bert"]).eval()
    expected = []
    with torch.inference_mode():
        for pair in pairs:
            hidden = model(torch.tensor([pair.ids])).last_hidden_state[0]
            parts = hidden[: pair.second_start].mean(0), hidden[pair.second_start :].mean(0)
            expected.append(torch.nn.functional.cosine_similarity(*parts, dim=0))
        assert torch.allclose(reranker(pairs), torch.stack(expected), atol=1e-5)


def test_a_classification_head_scores_in_float32_even_where_the_weights_are_bfloat16(open_reranker_of):
    reranker = open_reranker_of("bert_reranker", precision="bfloat16")
    skills = [Skill(str(n), f"skill {n}", "find the text " * n, "deploy pods " * n) for n in range(1, 6)]
    with torch.no_grad():
        scores = reranker(reranker.tokenize("translate a document", skills))
    assert scores.dtype == torch.float32
    assert (scores != scores.bfloat16().float()).any()  # else every score would be one of bfloat16's few
