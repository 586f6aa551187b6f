"""The plan: counts worked by hand, and a memory estimate that the tensors which autograd keeps bear out."""

import json

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.models.encoder import EncoderConfig
from skilltrain.models.reranker import RerankerConfig
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate
from skilltrain.training.loop import TrainingConfig
from skilltrain.training.memory import Load, activation_bytes, by_way, memory_of, weights_of
from skilltrain.training.plan import plan_lines, plan_of, say_cut_positives
from skilltrain.training.settings import TrainEncoderConfig, TrainRerankerConfig
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from skilltrain.training.training_set import ListsSource, TrainingList, TrainingSet
from training_data import training_set

SOURCE = ListsSource(pool="pool", lists="lists")  # never opened here
NAME_ONLY = SkillTemplate(description_chars=0, body_chars=0)


def skill(skill_id, num_words):
    """A skill whose text is so many words that are one token each."""
    return Skill(skill_id, " ".join(["chart"] * num_words), "", "")


def lists_by_hand():
    """Two queries of 2 and 4 words; skills of 1, 3, 10 and 10 words, of which a stands in both lists."""
    skills = {"a": skill("a", 1), "b": skill("b", 3), "c": skill("c", 10), "d": skill("d", 10)}
    lists = (
        TrainingList("q1", "pods text", ("a", "b", "c"), (1.0, 0.0, 0.0), frozenset("a")),
        TrainingList("q2", "pods text pods data", ("c", "a", "d"), (1.0, 0.0, 0.5), frozenset("cd")),
    )
    return TrainingSet(lists, skills)


def encoder_plan(encoder, data, **training):
    """The plan of training `encoder`."""
    settings = TrainingConfig(**training)
    config = TrainEncoderConfig(
        stage="train_encoder", model=EncoderConfig(source="x"), data=SOURCE, training=settings, out="out"
    )
    return plan_of(EncoderStep(encoder, InfoNCE(), data, StepSettings(settings.token_budget)), data, config)


def reranker_plan(reranker, data, **training):
    """The plan of training `reranker`."""
    settings = TrainingConfig(**training)
    config = TrainRerankerConfig(
        stage="train_reranker", model=RerankerConfig(source="x"), data=SOURCE, training=settings, out="out"
    )
    return plan_of(RerankerStep(reranker, ListwiseCE(), data, StepSettings(settings.token_budget)), data, config)


def test_encoder_by_hand(open_encoder_of):
    encoder = open_encoder_of("bert", max_tokens=12, template=EncoderTemplate(skill=NAME_ONLY))
    plan = encoder_plan(encoder, lists_by_hand(), batch_size=2, accumulation=1, token_budget=64, epochs=3)
    counts = [plan[f"num_{name}"] for name in ("lists", "queries", "skills", "pairs", "positives", "steps")]
    assert counts == [2, 2, 4, 6, 3, 3]
    # Every text is two tokens longer than its words; c and d reach the limit of 12.
    lengths = plan["text_tokens"]
    assert (lengths["query"]["max"], lengths["query"]["p50"], lengths["query"]["cut_share"]) == (6, 5, 0)
    assert (lengths["skill"]["max"], lengths["skill"]["cut_share"]) == (12, 0.5)
    assert lengths["positives_cut_share"] == pytest.approx(2 / 3, abs=1e-4)
    # Queries 4 + 6, skills 3 + 5 + 12 + 12 once, or 3 + 5 + 12 + 12 + 3 + 12 with every list's own.
    assert plan["epoch_tokens"] == {"num_tokens": 42, "num_plain_tokens": 57, "saved_share": round(15 / 57, 4)}
    # Ours: all six texts, 12 12 6 5 4 and 3 long, are 5 in one micro-batch of 64 (60 with padding) and one of 3.
    # Padded to the longest: queries 2 x 6, skills 6 x 12.
    assert plan["padding"] == {
        "num_batches": 1,
        "num_slots": 63,
        "share": round(21 / 63, 4),
        "num_plain_slots": 84,
        "plain_share": round(27 / 84, 4),
    }


def test_positives_that_are_cut_are_told_of_before_training(open_encoder_of, capsys):
    template, data = EncoderTemplate(skill=NAME_ONLY), lists_by_hand()
    for max_tokens in (12, 64):
        encoder = open_encoder_of("bert", max_tokens=max_tokens, template=template)
        say_cut_positives(EncoderStep(encoder, InfoNCE(), data, StepSettings(64)), data)
    told = "warning: 66.7% of the positives are longer than model.max_tokens=12, and cut there\n"
    assert capsys.readouterr().err == told


def test_reranker_pair_by_hand(open_reranker_of):
    template = RerankerTemplate(form="pair", skill=NAME_ONLY)
    reranker = open_reranker_of("bert_reranker", max_tokens=32, query_max_tokens=8, template=template)
    data = lists_by_hand()
    long = TrainingSet(data.lists, {**data.skills, "d": skill("d", 40)})
    plan = reranker_plan(reranker, long, batch_size=1, accumulation=2, token_budget=64)
    assert plan["num_steps"] == 1
    # [CLS] query [SEP] skill [SEP]: 3 + 2 + (1, 3, 10), 3 + 4 + (10, 1, 40), the last cut from 47 to 32.
    pair = plan["text_tokens"]["pair"]
    assert (pair["max"], pair["p50"], pair["cut_share"]) == (32, 12, round(1 / 6, 4))
    assert plan["text_tokens"]["positives_cut_share"] == round(1 / 3, 4)
    total = 6 + 8 + 15 + 17 + 8 + 32
    assert plan["epoch_tokens"] == {"num_tokens": total, "num_plain_tokens": total, "saved_share": 0}
    assert plan["padding"]["num_plain_slots"] == 3 * 15 + 3 * 32
    # The first list fits in 64 tokens; of the second, 32 and 17 do (64 with padding), and 8 is alone.
    assert plan["padding"]["num_slots"] == 3 * 15 + 2 * 32 + 8


def test_packed_reranker_computes_a_prompt_once_a_list(open_reranker_of):
    reranker = open_reranker_of("qwen3_reranker", template=RerankerTemplate(form="yes_no"))
    data = training_set(4)
    plan = reranker_plan(reranker, data, batch_size=2, accumulation=1, token_budget=100_000)
    step = RerankerStep(reranker, ListwiseCE(), data, StepSettings(100_000))
    plain = sum(len(pair) for one in data.lists for pair in step.pairs(one))
    packed = sum(reranker.num_slots(step.pairs(one)) for one in data.lists)
    assert plan["epoch_tokens"]["num_plain_tokens"] == plain
    assert packed <= plan["epoch_tokens"]["num_tokens"] < plain  # skills may begin alike, too
    assert plan["epoch_tokens"]["num_tokens"] - packed < 0.1 * plain
    assert plan["padding"]["num_slots"] == packed
    assert plan["padding"]["share"] == 0


def test_the_plan_agrees_with_what_a_step_counts(open_encoder_of):
    encoder, data = open_encoder_of("qwen3"), training_set(8)
    plan = encoder_plan(encoder, data, batch_size=8, accumulation=1, token_budget=256)
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(256))
    with torch.no_grad():
        step(data.lists)
    assert plan["epoch_tokens"]["num_tokens"] == step.count.tokens
    assert plan["padding"]["num_slots"] == step.count.slots


@pytest.mark.parametrize("training", [{}, {"batch_size": 1, "precision": "bfloat16"}])
def test_it_is_json_and_reads_well(open_encoder_of, training):
    encoder, data = open_encoder_of("bert"), training_set(5)
    add_adapter(encoder.backbone, AdapterConfig(rank=2))
    plan = encoder_plan(encoder, data, **training)
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan
    assert 0 < plan["num_trained_parameters"] < plan["num_parameters"]
    lines = plan_lines(plan)
    assert lines[0].startswith("data: 5 lists of 5 distinct queries and 12 skills;")
    assert sum(line.startswith("tokens of a ") for line in lines) == 2
    assert [line.split(":")[0].strip() for line in lines[-3:]] == [
        "on 8 ranks with DDP",
        "on 8 ranks with ZeRO-2",
        "on 8 ranks with ZeRO-3 or FSDP2",
    ]
    assert all(len(line) < 200 and "\n" not in line for line in lines)


def bert(hidden, num_layers):
    """A BERT with random weights."""
    return BertModel(
        BertConfig(
            vocab_size=1000, hidden_size=hidden, num_hidden_layers=num_layers, num_attention_heads=4,
            intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    )  # fmt: skip


def qwen3(hidden, num_layers):
    """A Qwen3 in the proportions of Qwen3-Embedding-0.6B: queries twice as wide as the hidden states."""
    return Qwen3Model(
        Qwen3Config(
            vocab_size=1000, hidden_size=hidden, num_hidden_layers=num_layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=hidden // 2, intermediate_size=3 * hidden,
        )
    )  # fmt: skip


def kept_bytes(model, function):
    """Bytes that autograd keeps of `function()` beside the model's own weights, each storage once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor, lest its place be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = function()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("new_model", [bert, qwen3])
@pytest.mark.parametrize(("hidden", "num_layers"), [(32, 2), (128, 3)])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_the_activation_estimate_is_near_what_autograd_keeps(new_model, hidden, num_layers, mixed, adapted):
    torch.manual_seed(0)
    model = new_model(hidden, num_layers).train()
    if adapted:
        add_adapter(model, AdapterConfig(rank=4))
    weights = weights_of(model, mixed)
    for num_texts, longest in ((8, 64), (2, 300)):
        ids = torch.randint(5, 900, (num_texts, longest))
        mask = torch.ones_like(ids)
        mask[0, longest - 9 :] = 0

        def run(ids=ids, mask=mask):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                return model(input_ids=ids, attention_mask=mask).last_hidden_state

        load = Load(num_texts * longest, longest, 1)
        estimate = memory_of(weights, model.config, load, load, mixed)["activations_recompute"]
        assert 0.6 < estimate / kept_bytes(model, run) < 1.4


def test_memory_by_hand():
    model = bert(32, 2)
    count = sum(parameter.numel() for parameter in model.parameters())
    weights = weights_of(model, mixed=False)
    config, one, two = model.config, Load(100, 10, 1), Load(200, 10, 2)
    # (8 x 32 + 2 x 128) numbers in each of 2 layers, 2 x 32 beside them, 10 of the mask, for 100 tokens of 4 bytes.
    assert activation_bytes(config, one, half=False) == 100 * 4 * (2 * 512 + 64 + 10)
    # With bfloat16 the norms' 2 x 32 keep 4 bytes, all else 2.
    assert activation_bytes(config, one, half=True) == 100 * (2 * (64 * 4 + 448 * 2) + 64 * 4 + 10 * 2)
    whole = memory_of(weights, config, two, one, half=False)
    fixed = {"weights": 4 * count, "gradients": 4 * count, "optimizer": 8 * count}
    assert {name: whole[name] for name in fixed} == fixed
    assert whole["activations"] == 2 * whole["activations_recompute"]
    ways, mib = by_way(whole, weights, 4), 2**20
    layer = sum(parameter.numel() for parameter in model.encoder.layer[0].parameters())
    assert ways["ddp"]["gradients"] == round(8 * count / mib, 1)
    assert ways["zero2"]["weights"] == round(4 * count / mib, 1)
    assert ways["zero2"]["optimizer"] == round(12 * count / 4 / mib, 1)
    assert ways["zero3_fsdp2"]["weights"] == round((count + 4 * (count - 2 * layer) + 2 * 4 * layer) / mib, 1)


def test_only_what_trains_has_gradients_and_optimiser_states():
    model = qwen3(32, 1).to(torch.bfloat16)
    add_adapter(model, AdapterConfig(rank=2, targets=("q_proj",)))
    weights = weights_of(model, mixed=True)
    assert weights.num_trained == 2 * (32 + 64)
    assert weights.trained == 4 * weights.num_trained  # float32 beside a bfloat16 base
    assert weights.trained_casts == 2 * weights.num_trained
    assert weights.frozen_casts == 0


def test_share_of_a_batch_on_several_ranks(open_encoder_of):
    plan = encoder_plan(open_encoder_of("bert"), training_set(16), batch_size=8, token_budget=64)
    memory = plan["memory_mib"]
    assert memory["num_ranks"] == 8
    assert np.isclose(memory["ddp"]["activations"], memory["one_process"]["activations"] / 8, atol=0.2)
