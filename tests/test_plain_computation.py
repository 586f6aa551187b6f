"""Every saving of work against the plain way: each text of each list anew, padded into one batch, no recomputation."""

import pytest
import torch

from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from training_data import training_set

# Token budgets: one text a micro-batch, a few, all together.
SETTINGS = [StepSettings(8), StepSettings(150, recompute=True), StepSettings(150), StepSettings(10**6, recompute=True)]
# Qwen3's norms compute in float32 whatever the model's number format: float64 gradients agree to 1e-7.
CASES = [
    ("bert", torch.float64, 1e-12, 1e-9),
    ("qwen3", torch.float64, 1e-12, 1e-7),
    ("bert", torch.float32, 1e-5, 1e-5),
]
LIST_CASES = [
    ("bert_reranker", torch.float64, 1e-12, 1e-9),
    ("qwen3_reranker", torch.float64, 1e-12, 1e-7),
    ("qwen3_reranker", torch.float32, 1e-5, 1e-5),
]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_same(model, ours, plain, loss_tolerance, gradient_tolerance):
    assert ours.dtype == plain.dtype
    assert ours.item() == pytest.approx(plain.item(), rel=loss_tolerance, abs=loss_tolerance)
    wanted = gradients(model, plain)
    got = gradients(model, ours)
    assert got.keys() == wanted.keys()
    largest = max(value.abs().max().item() for value in wanted.values())
    furthest = max((got[name] - wanted[name]).abs().max().item() for name in wanted)
    assert furthest < gradient_tolerance * max(1.0, largest)


def plain_encoder_loss(encoder, batch, data, temperature):
    """Softmax cross-entropy over all other lists' skills that are not known positives, repeated ones counted once."""
    template = encoder.settings.template
    texts = [template.skill.render(data.skills[skill_id]) for one in batch for skill_id in one.skill_ids]
    ids = encoder.tokenize_queries([one.query for one in batch]) + encoder.tokenize(texts, encoder.settings.max_tokens)
    vectors = encoder(ids)  # one padded batch
    skill_ids = [skill_id for one in batch for skill_id in one.skill_ids]
    total = vectors.new_zeros(())
    for row, one in enumerate(batch):
        gains = dict(zip(one.skill_ids, one.gains, strict=True))
        first = {skill_id: position for position, skill_id in reversed([*enumerate(skill_ids)])}
        columns = [first[s] for s in first if s in gains or s not in one.positives]
        scores = vectors[len(batch) + torch.tensor(columns)] @ vectors[row] / temperature
        gain = vectors.new_tensor([gains.get(skill_ids[column], 0.0) for column in columns])
        for place in (gain > 0).nonzero().flatten().tolist():
            against = torch.cat([scores[place : place + 1], scores[gain < gain[place]]])
            total = total - gain[place] / gain.sum() * torch.log_softmax(against, 0)[0]
    return total


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("name", "dtype", "loss_tolerance", "gradient_tolerance"), CASES)
def test_the_encoders_step(open_encoder_of, name, dtype, loss_tolerance, gradient_tolerance, settings):
    encoder, data = open_encoder_of(name).to(dtype), training_set(8)
    plain = plain_encoder_loss(encoder, data.lists, data, InfoNCE().temperature)
    step = EncoderStep(encoder, InfoNCE(), data, settings).train()
    assert_same(encoder, step(data.lists), plain, loss_tolerance, gradient_tolerance)


def plain_reranker_scores(reranker, pairs):
    """Plain transformers code: padded, with attention mask, and for Qwen3 the logits of the whole vocabulary."""
    longest, pad_id = max(map(len, pairs)), reranker.tokenizer.pad_token_id
    ids = torch.tensor([pair.ids + [pad_id] * (longest - len(pair)) for pair in pairs])
    mask = torch.tensor([[1] * len(pair) + [0] * (longest - len(pair)) for pair in pairs])
    if reranker.yes_no_ids is None:
        segments = torch.tensor([[int(i >= pair.second_start) for i in range(longest)] for pair in pairs]) * mask
        return reranker.network(input_ids=ids, attention_mask=mask, token_type_ids=segments).logits[:, 0]
    reranker.network.set_attn_implementation("sdpa")
    logits = reranker.network(input_ids=ids, attention_mask=mask).logits
    reranker.network.set_attn_implementation("skilltrain_shared_prompt")
    last = logits[torch.arange(len(pairs)), mask.sum(1) - 1]
    yes, no = reranker.yes_no_ids
    return last[:, yes] - last[:, no]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("name", "dtype", "loss_tolerance", "gradient_tolerance"), LIST_CASES)
def test_the_rerankers_step(open_reranker_of, name, dtype, loss_tolerance, gradient_tolerance, settings):
    reranker, data = open_reranker_of(name).to(dtype), training_set(5)
    plain = torch.zeros((), dtype=dtype)
    for one in data.lists:
        pairs = reranker.tokenize(one.query, [data.skills[skill_id] for skill_id in one.skill_ids])
        scores = plain_reranker_scores(reranker, pairs)
        gains = scores.new_tensor(one.gains)
        for place in (gains > 0).nonzero().flatten().tolist():
            against = torch.cat([scores[place : place + 1], scores[gains < gains[place]]])
            plain = plain - gains[place] / gains.sum() * torch.log_softmax(against, 0)[0]
    step = RerankerStep(reranker, ListwiseCE(), data, settings).train()
    assert_same(reranker, step(data.lists), plain, loss_tolerance, gradient_tolerance)
