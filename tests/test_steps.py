from dataclasses import replace

import pytest
import torch

from skilltrain.errors import SkilltrainError
from skilltrain.losses import InfoNCE, ListwiseCE, PointwiseBCE
from skilltrain.models.activations import checkpoint_layers
from skilltrain.training import steps
from skilltrain.training.steps import EncoderStep, Pairs, RerankerStep, StepSettings, Texts
from skilltrain.training.training_set import lexical_scores
from training_data import training_set


def naive_encoder_loss(encoder, batch, data, loss):
    """Every query, and every candidate of every query again, padded into two batches."""
    settings = encoder.settings
    skills = [skill_id for one in batch for skill_id in one.skill_ids]
    texts = [settings.template.skill.render(data.skills[skill_id]) for skill_id in skills]
    queries = encoder(encoder.tokenize_queries([one.query for one in batch]))
    candidates = encoder(encoder.tokenize(texts, settings.max_tokens))
    total = 0
    for row, one in enumerate(batch):
        scores, gains, seen = [], [], set()
        for column, skill_id in enumerate(skills):
            own = skill_id in one.skill_ids
            if skill_id in seen or (not own and skill_id in one.positives):
                continue
            seen.add(skill_id)
            scores.append(queries[row] @ candidates[column] / loss.temperature)
            gains.append(one.gains[one.skill_ids.index(skill_id)] if own else 0.0)
        row_scores, row_gains = torch.stack(scores), torch.tensor(gains)
        for position, gain in enumerate(gains):
            if gain > 0:
                against = row_scores[row_gains < gain]
                both = torch.cat([row_scores[position : position + 1], against])
                total = total - gain / sum(gains) * torch.log_softmax(both, 0)[0]
    return total


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("recompute", [False, True])
def test_each_distinct_skill_is_encoded_once_and_the_loss_is_the_naive_one(open_encoder_of, recompute):
    encoder, data = open_encoder_of("bert").double(), training_set(8)
    expected = naive_encoder_loss(encoder, data.lists, data, InfoNCE())
    expected_gradients = gradients(encoder, expected)
    step, seen = EncoderStep(encoder, InfoNCE(), data, StepSettings(120, recompute)).train(), []
    handle = encoder.register_forward_pre_hook(
        lambda _, inputs: seen.extend(tuple(text.tolist()) for text in inputs[0])
    )
    loss = step(data.lists)
    handle.remove()
    distinct = {skill_id for one in data.lists for skill_id in one.skill_ids}
    assert len(seen) == len(distinct) + len(data.lists) < sum(len(one.skill_ids) for one in data.lists)
    assert step.count.tokens == sum(map(len, seen)) <= step.count.slots
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    for got, wanted in zip(gradients(encoder, loss), expected_gradients, strict=True):
        assert torch.allclose(got, wanted, atol=1e-9)


def test_lexical_scores_move_the_loss_alike_whole_and_in_chunks(open_encoder_of):
    encoder, data, loss = open_encoder_of("bert").double(), training_set(8), InfoNCE(lexical_weight=0.5)
    data = replace(data, lexical=lexical_scores((one.query for one in data.lists), list(data.skills.values())))
    whole = EncoderStep(encoder, loss, data, StepSettings(10**6))(data.lists)
    expected = gradients(encoder, whole)
    chunked = EncoderStep(encoder, loss, data, StepSettings(120, recompute=True)).train()(data.lists)
    assert chunked.item() == pytest.approx(whole.item(), abs=1e-9)
    assert whole.item() != pytest.approx(EncoderStep(encoder, InfoNCE(), data, StepSettings(120))(data.lists).item())
    for got, wanted in zip(gradients(encoder, chunked), expected, strict=True):
        assert torch.allclose(got, wanted, atol=1e-9)


def test_without_padding_the_loss_and_its_gradients_are_the_same(open_encoder_of):
    encoder, data = open_encoder_of("qwen3").double(), training_set(8)
    padded = EncoderStep(encoder, InfoNCE(), data, StepSettings(300))(data.lists)
    expected = gradients(encoder, padded)
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(300, recompute=True, varlen=True)).train()
    loss = step(data.lists)
    assert step.count.slots == step.count.tokens == sum(step.slots(data.lists))
    assert loss.item() == pytest.approx(padded.item(), abs=1e-9)
    for got, wanted in zip(gradients(encoder, loss), expected, strict=True):
        assert torch.allclose(got, wanted, atol=1e-6)
    texts = list(step.query_ids.values())
    with torch.no_grad():
        together = encoder(texts)
        assert torch.allclose(together, torch.cat([encoder([text]) for text in texts]), atol=1e-9)


def test_other_models_are_not_attended_by_length(open_encoder_of):
    with pytest.raises(SkilltrainError, match="varlen needs a causal encoder"):
        open_encoder_of("bert").attend_by_length()


def test_a_rank_without_any_text_still_takes_part(open_encoder_of, monkeypatch):
    encoder, data = open_encoder_of("bert"), training_set(1)
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(120))
    monkeypatch.setattr(steps, "rank_and_world", lambda: (6, 8))
    monkeypatch.setattr(steps, "gather_rows", lambda rows, total: torch.cat([rows, rows.new_zeros(total, 32)]))
    loss = step(data.lists)
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients(encoder, loss))
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("name", ["bert_reranker", "qwen3_reranker"])
@pytest.mark.parametrize("loss", [ListwiseCE(), PointwiseBCE()], ids=lambda loss: loss.name)
def test_the_rerankers_loss_is_the_sum_of_each_list_alone(open_reranker_of, name, loss):
    reranker, data = open_reranker_of(name), training_set(5)
    alone = [RerankerStep(reranker, loss, data, StepSettings(10**6))([one]) for one in data.lists]
    together = RerankerStep(reranker, loss, data, StepSettings(400, recompute=True)).train()(data.lists)
    assert together.item() == pytest.approx(sum(one.item() for one in alone), rel=1e-5)
    expected = gradients(reranker, sum(alone))
    for got, wanted in zip(gradients(reranker, together), expected, strict=True):
        assert torch.allclose(got, wanted, atol=1e-4)


def test_a_list_by_hand(open_reranker_of):
    reranker, data = open_reranker_of("bert_reranker"), training_set(1, most_candidates=2)
    (one,) = data.lists
    scores = reranker(reranker.tokenize(one.query, [data.skills[skill_id] for skill_id in one.skill_ids]))
    expected = -torch.log_softmax(scores, 0)[0]
    loss = RerankerStep(reranker, ListwiseCE(), data, StepSettings(10**6))(data.lists)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


def looked_up(network):
    """A list that fills with the number of tokens of every embedding call of `network`."""
    sizes = []
    network.get_input_embeddings().register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].numel()))
    return sizes


def check_dev_lookups(step, network, batch, inputs):
    """In the dev evaluation no lookup exceeds the budget of `step`; in training there is one for everything."""
    sizes = looked_up(network)
    step.eval()
    expected = step(inputs).detach()  # with gradients: all tokens in one lookup
    assert len(sizes) == 1
    sizes.clear()
    with torch.no_grad():
        got = step(inputs)
    assert len(sizes) > 4 and max(sizes) <= step.settings.token_budget < step.count.tokens
    assert torch.allclose(got, expected, rtol=0, atol=1e-6)
    for recompute in (False, True):
        sizes.clear()
        if recompute:
            checkpoint_layers(network)
        step.train()(batch).backward()
        assert len(sizes) == 1 and sizes[0] > step.settings.token_budget


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_the_encoders_dev_evaluation_embeds_one_micro_batch_at_a_time(open_encoder_of, name):
    encoder, data = open_encoder_of(name), training_set(8)
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(256))
    texts = [*(step.query_ids[one.query] for one in data.lists), *(step.skill_ids[skill] for skill in data.skills)]
    texts = [*texts, *texts]
    check_dev_lookups(step, encoder.backbone, data.lists, Texts(texts))


@pytest.mark.parametrize("name", ["bert_reranker", "qwen3_reranker"])
def test_the_rerankers_dev_evaluation_embeds_one_micro_batch_at_a_time(open_reranker_of, name):
    reranker, data = open_reranker_of(name), training_set(8)
    step = RerankerStep(reranker, ListwiseCE(), data, StepSettings(320))
    lists = [step.pairs(one) for one in data.lists]
    check_dev_lookups(step, reranker.network, data.lists, Pairs(lists))
