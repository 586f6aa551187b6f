"""A step's loss and gradients: every saving of work against the plain way, each text of each list anew in one batch."""

import pytest
import torch

from faults import raises
from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.models.activations import checkpoint_layers
from skilltrain.training import steps
from skilltrain.training.steps import (
    EncoderStep,
    PairsToScore,
    RerankerStep,
    StepSettings,
    TextsToEncode,
)
from training_data import training_set

# Token budgets: one text a micro-batch, a few, all together.
ALONE, FEW, ALL = StepSettings(8), StepSettings(150, recompute=True), StepSettings(10**6)
# Qwen3's norms compute in float32 whatever the model's number format: float64 gradients agree to 1e-7.
CASES = [
    *(("bert", torch.float64, 1e-12, 1e-9, settings) for settings in (ALONE, FEW, ALL)),
    ("qwen3", torch.float64, 1e-12, 1e-7, FEW),
    ("bert", torch.float32, 1e-5, 1e-5, FEW),
]
LIST_CASES = [
    ("bert_reranker", torch.float64, 1e-12, 1e-9, FEW),
    *(("qwen3_reranker", torch.float64, 1e-12, 1e-7, settings) for settings in (ALONE, FEW, ALL)),
    ("qwen3_reranker", torch.float32, 1e-5, 1e-5, FEW),
]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {
        name: value.grad.clone()
        for name, value in model.named_parameters()
        if value.grad is not None
    }


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
    texts = [
        template.skill.render(data.skills[skill_id]) for one in batch for skill_id in one.skill_ids
    ]
    ids = encoder.tokenize_queries([one.query for one in batch]) + encoder.tokenize(
        texts, encoder.settings.max_tokens
    )
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


@pytest.mark.parametrize(
    ("name", "dtype", "loss_tolerance", "gradient_tolerance", "settings"), CASES
)
def test_the_encoders_step(
    open_encoder_of, name, dtype, loss_tolerance, gradient_tolerance, settings
):
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
        segments = (
            torch.tensor([[int(i >= pair.second_start) for i in range(longest)] for pair in pairs])
            * mask
        )
        return reranker.network(input_ids=ids, attention_mask=mask, token_type_ids=segments).logits[
            :, 0
        ]
    reranker.network.set_attn_implementation("sdpa")
    logits = reranker.network(input_ids=ids, attention_mask=mask).logits
    reranker.network.set_attn_implementation("skilltrain_shared_prompt")
    last = logits[torch.arange(len(pairs)), mask.sum(1) - 1]
    yes, no = reranker.yes_no_ids
    return last[:, yes] - last[:, no]


@pytest.mark.parametrize(
    ("name", "dtype", "loss_tolerance", "gradient_tolerance", "settings"), LIST_CASES
)
def test_the_rerankers_step(
    open_reranker_of, name, dtype, loss_tolerance, gradient_tolerance, settings
):
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
    assert sum(step.slots(data.lists)) == step.count["slots"]


def test_each_distinct_skill_is_encoded_once(open_encoder_of):
    encoder, data, seen = open_encoder_of("bert"), training_set(8), []
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(120))
    encoder.register_forward_pre_hook(
        lambda _, inputs: seen.extend(tuple(text.tolist()) for text in inputs[0])
    )
    step(data.lists)
    distinct = {skill_id for one in data.lists for skill_id in one.skill_ids}
    assert (
        len(seen) == len(distinct) + len(data.lists) < sum(len(one.skill_ids) for one in data.lists)
    )
    assert (
        step.count["tokens"]
        == sum(map(len, seen))
        <= step.count["slots"]
        == sum(step.slots(data.lists))
    )


def test_without_padding_the_loss_and_its_gradients_are_the_same(open_encoder_of):
    encoder, data = open_encoder_of("qwen3").double(), training_set(8)
    padded = EncoderStep(encoder, InfoNCE(), data, StepSettings(300))(data.lists)
    expected = padded.item(), gradients(encoder, padded)
    step = EncoderStep(
        encoder, InfoNCE(), data, StepSettings(300, recompute=True, varlen=True)
    ).train()
    loss = step(data.lists)
    assert step.count["slots"] == step.count["tokens"] == sum(step.slots(data.lists))
    assert loss.item() == pytest.approx(expected[0], abs=1e-9)
    for name, got in gradients(encoder, loss).items():
        assert torch.allclose(got, expected[1][name], atol=1e-6)
    with raises("unsupported-model"):
        open_encoder_of("bert").pack_texts()


def test_a_rank_without_any_text_still_takes_part(open_encoder_of, monkeypatch):
    encoder, data = open_encoder_of("bert"), training_set(1)
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(120))
    monkeypatch.setattr(steps, "rank_and_world", lambda: (6, 8))
    monkeypatch.setattr(
        steps, "gather_rows", lambda rows, total: torch.cat([rows, rows.new_zeros(total, 32)])
    )
    loss = step(data.lists)
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients(encoder, loss).values())
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("name", ["bert", "qwen3", "bert_reranker", "qwen3_reranker"])
def test_a_dev_evaluation_embeds_one_micro_batch_at_a_time(open_encoder_of, open_reranker_of, name):
    """No lookup of embeddings exceeds the budget there; in training there is one for everything."""
    data, sizes = training_set(6), list[int]()
    if name.endswith("reranker"):
        step = RerankerStep(open_reranker_of(name), ListwiseCE(), data, StepSettings(320))
        inputs = PairsToScore([step.make_pairs(one) for one in data.lists])
        items = [pair for pairs in inputs.lists for pair in pairs]
    else:
        step = EncoderStep(open_encoder_of(name), InfoNCE(), data, StepSettings(256))
        inputs = TextsToEncode(items := 2 * [*step.query_ids.values(), *step.skill_ids.values()])
    with torch.no_grad():
        expected = torch.cat([step.model([item]) for item in items])
    table = step.model.network.get_input_embeddings()
    table.register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].numel()))
    with torch.no_grad():
        assert torch.allclose(step.eval()(inputs), expected, rtol=0, atol=1e-5)
    assert len(sizes) > 3 and max(sizes) <= step.settings.token_budget < step.count["tokens"]
    for recompute in (False, True):
        sizes.clear()
        if recompute:
            checkpoint_layers(step.model.network)
        step.train()(data.lists).backward()
        assert len(sizes) == 1 and sizes[0] > step.settings.token_budget
