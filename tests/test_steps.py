"""Loss and gradients of a training step equal those of plain code that encodes every text."""

import itertools

import pytest
import torch

from faults import raises
from skilltrain.losses import InfoNCE, LateInteraction, ListwiseCE, Matryoshka
from skilltrain.models import micro_batches
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

# Token budgets of a micro-batch: one text, a few texts, all texts.
SINGLE = StepSettings(8)
FEW = StepSettings(150, recompute=True)
ALL = StepSettings(10**6)
# Norms of Qwen3 compute in float32, so float64 gradients agree only to 1e-7.
ENCODER_CASES = [
    *(("bert", torch.float64, 1e-12, 1e-9, settings) for settings in (SINGLE, FEW, ALL)),
    ("qwen3", torch.float64, 1e-12, 1e-7, FEW),
    ("bert", torch.float32, 1e-5, 1e-5, FEW),
]
RERANKER_CASES = [
    ("bert_reranker", torch.float64, 1e-12, 1e-9, FEW),
    *(("qwen3_reranker", torch.float64, 1e-12, 1e-7, settings) for settings in (SINGLE, FEW, ALL)),
    ("qwen3_reranker", torch.float32, 1e-5, 1e-5, FEW),
]


def gradients(model, loss):
    """Return the gradient of each parameter that has one."""
    model.zero_grad()
    loss.backward()
    parameters = dict(model.named_parameters())
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def assert_same(model, loss, expected, loss_tolerance, gradient_tolerance):
    """Check that two losses of a model agree, and so do their gradients."""
    assert loss.dtype == expected.dtype
    assert loss.item() == pytest.approx(expected.item(), rel=loss_tolerance, abs=loss_tolerance)

    expected_gradients = gradients(model, expected)
    loss_gradients = gradients(model, loss)
    assert loss_gradients.keys() == expected_gradients.keys()
    largest = 1.0
    largest_difference = 0.0
    for name, gradient in expected_gradients.items():
        largest = max(largest, gradient.abs().max().item())
        difference = (loss_gradients[name] - gradient).abs().max().item()
        largest_difference = max(largest_difference, difference)
    assert largest_difference < gradient_tolerance * largest


def softmax_cross_entropy(scores, gains):
    """Return the loss of one query: each positive against the skills of lower gain.

    Args:
        scores: Scores of the skills, shape (num_skills,).
        gains: Gains of the skills, shape (num_skills,).
    """
    total = scores.new_zeros(())
    for positive in gains.nonzero().flatten().tolist():
        is_lower = gains < gains[positive]
        logits = torch.cat([scores[positive : positive + 1], scores[is_lower]])
        total = total - gains[positive] / gains.sum() * torch.log_softmax(logits, 0)[0]
    return total


def plain_encoder_loss(encoder, batch, data, temperature):
    """Return the loss over all skills of the batch but known positives of other lists.

    A skill of several lists counts once. All texts are encoded in one padded batch.
    """
    template = encoder.settings.template
    skill_ids = []
    for training_list in batch:
        skill_ids += training_list.skill_ids
    texts = [template.skill.render(data.skills[skill_id]) for skill_id in skill_ids]
    query_tokens = encoder.tokenize_queries([training_list.query for training_list in batch])
    skill_tokens = encoder.tokenize(texts, encoder.settings.max_tokens)
    vectors = encoder(query_tokens + skill_tokens)
    query_vectors = vectors[: len(batch)]
    skill_vectors = vectors[len(batch) :]

    total = vectors.new_zeros(())
    for query_vector, training_list in zip(query_vectors, batch, strict=True):
        gains = dict(zip(training_list.skill_ids, training_list.gains, strict=True))
        known_positives = set(training_list.positives) - gains.keys()
        columns = [
            skill_ids.index(skill_id)
            for skill_id in dict.fromkeys(skill_ids)
            if skill_id not in known_positives
        ]
        scores = skill_vectors[columns] @ query_vector / temperature
        gain = vectors.new_tensor([gains.get(skill_ids[column], 0.0) for column in columns])
        total = total + softmax_cross_entropy(scores, gain)
    return total


@pytest.mark.parametrize(
    ("name", "dtype", "loss_tolerance", "gradient_tolerance", "settings"), ENCODER_CASES
)
def test_encoder_step_equals_plain_loss(
    open_encoder_of, name, dtype, loss_tolerance, gradient_tolerance, settings
):
    encoder = open_encoder_of(name).to(dtype)
    data = training_set(8)
    step = EncoderStep(encoder, InfoNCE(), data, settings).train()

    loss = step(data.lists)

    expected = plain_encoder_loss(encoder, data.lists, data, InfoNCE().temperature)
    assert_same(encoder, loss, expected, loss_tolerance, gradient_tolerance)


def plain_reranker_scores(reranker, pairs):
    """Score padded pairs with plain transformers code.

    For Qwen3, the score is the difference of two of the vocabulary's logits.
    """
    longest = max(map(len, pairs))
    pad_id = reranker.tokenizer.pad_token_id
    padding = [[pad_id] * (longest - len(pair)) for pair in pairs]
    # Both have the shape (num_pairs, longest).
    ids = torch.tensor([pair.ids + pad for pair, pad in zip(pairs, padding, strict=True)])
    mask = torch.tensor([[1] * len(pair) + [0] * (longest - len(pair)) for pair in pairs])

    if reranker.yes_no_ids is None:
        starts = torch.tensor([[pair.second_start] for pair in pairs])
        segments = (torch.arange(longest) >= starts).long() * mask
        output = reranker.network(input_ids=ids, attention_mask=mask, token_type_ids=segments)
        return output.logits[:, 0]

    reranker.network.set_attn_implementation("sdpa")
    logits = reranker.network(input_ids=ids, attention_mask=mask).logits
    reranker.network.set_attn_implementation("skilltrain_shared_prompt")
    last = logits[torch.arange(len(pairs)), mask.sum(1) - 1]  # (num_pairs, vocabulary)
    yes, no = reranker.yes_no_ids
    return last[:, yes] - last[:, no]


@pytest.mark.parametrize(
    ("name", "dtype", "loss_tolerance", "gradient_tolerance", "settings"), RERANKER_CASES
)
def test_reranker_step_equals_plain_loss(
    open_reranker_of, name, dtype, loss_tolerance, gradient_tolerance, settings
):
    reranker = open_reranker_of(name).to(dtype)
    data = training_set(5)
    expected = torch.zeros((), dtype=dtype)
    for training_list in data.lists:
        skills = [data.skills[skill_id] for skill_id in training_list.skill_ids]
        pairs = reranker.tokenize(training_list.query, skills)
        scores = plain_reranker_scores(reranker, pairs)
        gains = scores.new_tensor(training_list.gains)
        expected = expected + softmax_cross_entropy(scores, gains)
    step = RerankerStep(reranker, ListwiseCE(), data, settings).train()

    loss = step(data.lists)

    assert_same(reranker, loss, expected, loss_tolerance, gradient_tolerance)
    assert sum(step.padded_tokens(data.lists)) == step.count["padded_tokens"]


def test_each_distinct_skill_is_encoded_once(open_encoder_of):
    encoder = open_encoder_of("bert")
    data = training_set(8)
    lengths = []
    encoder.register_forward_pre_hook(lambda _, inputs: lengths.extend(map(len, inputs[0])))
    step = EncoderStep(encoder, InfoNCE(), data, StepSettings(120))

    step(data.lists)

    skill_ids = []
    for training_list in data.lists:
        skill_ids += training_list.skill_ids
    assert len(lengths) == len(set(skill_ids)) + len(data.lists) < len(skill_ids)
    assert step.count["tokens"] == sum(lengths) <= step.count["padded_tokens"]
    assert step.count["padded_tokens"] == sum(step.padded_tokens(data.lists))


def test_varlen_changes_no_gradient(open_encoder_of):
    encoder = open_encoder_of("qwen3").double()
    data = training_set(8)
    padded_loss = EncoderStep(encoder, InfoNCE(), data, StepSettings(300))(data.lists)
    expected = gradients(encoder, padded_loss)
    settings = StepSettings(300, recompute=True, varlen=True)
    step = EncoderStep(encoder, InfoNCE(), data, settings).train()

    loss = step(data.lists)

    assert (
        step.count["padded_tokens"] == step.count["tokens"] == sum(step.padded_tokens(data.lists))
    )
    assert loss.item() == pytest.approx(padded_loss.item(), abs=1e-9)
    for name, gradient in gradients(encoder, loss).items():
        assert torch.allclose(gradient, expected[name], atol=1e-6)


TWO_PASS_CASES = [
    # The model has dropout.
    ("bert_dropout", {"late_interaction": LateInteraction()}, 1e-12),
    ("bert_dropout", {"in_batch_mask": "none", "recompute": True}, 1e-12),
    # Norms of Qwen3 compute in float32.
    ("qwen3", {"varlen": True}, 1e-7),
]


@pytest.mark.parametrize(("name", "options", "tolerance"), TWO_PASS_CASES)
def test_two_passes_equal_one(open_encoder_of, name, options, tolerance):
    data = training_set(8)
    results = []
    for two_pass in (False, True):
        encoder = open_encoder_of(name).double()
        settings = StepSettings(60, two_pass=two_pass, **options)
        step = EncoderStep(encoder, Matryoshka(dims=(8, 32)), data, settings).train()
        torch.manual_seed(3)
        loss = step(data.lists)
        results.append((loss.item(), gradients(encoder, loss)))

    (expected_loss, expected), (loss, two_pass_gradients) = results
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert two_pass_gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.allclose(two_pass_gradients[key], gradient, rtol=0, atol=tolerance)


def saved_bytes(step, lists):
    """Return the bytes of the tensors that a forward pass keeps for the backward pass."""
    sizes = {}

    def record(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = step(lists)
    loss.backward()
    return sum(sizes.values())


def test_two_passes_keep_no_activations(open_encoder_of):
    data = training_set(16, num_skills=80)
    encoder = open_encoder_of("bert")
    one_pass = EncoderStep(encoder, InfoNCE(), data, StepSettings(200)).train()
    two_passes = EncoderStep(encoder, InfoNCE(), data, StepSettings(200, two_pass=True)).train()

    ratio = saved_bytes(two_passes, data.lists) / saved_bytes(one_pass, data.lists)

    # The vectors and their cosines are left.
    assert ratio < 0.02


def test_two_passes_return_memory_between_micro_batches(open_encoder_of, monkeypatch):
    data = training_set(16, num_skills=80)
    settings = StepSettings(200, two_pass=True)
    step = EncoderStep(open_encoder_of("bert"), InfoNCE(), data, settings).train()
    devices = []
    monkeypatch.setattr(micro_batches, "return_free_memory", devices.append)

    step(data.lists).backward()

    # Each micro-batch runs in both passes.
    num_runs = 2 * len(step.padded_tokens(data.lists))
    assert num_runs > 4
    assert devices == [step.model.device] * num_runs


def test_varlen_needs_a_causal_model(open_encoder_of):
    with raises("unsupported-model"):
        open_encoder_of("bert").enable_packing()


def test_rank_without_text_has_zero_gradients(open_encoder_of, monkeypatch):
    encoder = open_encoder_of("bert")
    data = training_set(1)
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
def test_evaluation_embeds_one_micro_batch_at_a_time(open_encoder_of, open_reranker_of, name):
    """Evaluation looks up embeddings within the token budget, training in one call."""
    data = training_set(6)
    if name.endswith("reranker"):
        step = RerankerStep(open_reranker_of(name), ListwiseCE(), data, StepSettings(320))
        inputs = PairsToScore([step.make_pairs(training_list) for training_list in data.lists])
        items = list(itertools.chain.from_iterable(inputs.lists))
    else:
        step = EncoderStep(open_encoder_of(name), InfoNCE(), data, StepSettings(256))
        items = 2 * [*step.query_token_ids.values(), *step.skill_token_ids.values()]
        inputs = TextsToEncode(items)
    with torch.no_grad():
        expected = torch.cat([step.model([item]) for item in items])
    num_embedded = []
    table = step.model.network.get_input_embeddings()
    table.register_forward_hook(lambda _, inputs, output: num_embedded.append(inputs[0].numel()))

    with torch.no_grad():
        outputs = step.eval()(inputs)

    assert torch.allclose(outputs, expected, rtol=0, atol=1e-5)
    assert len(num_embedded) > 3
    assert max(num_embedded) <= step.settings.token_budget < step.count["tokens"]
    for recompute in (False, True):
        num_embedded.clear()
        if recompute:
            checkpoint_layers(step.model.network)
        step.train()(data.lists).backward()
        (num_tokens,) = num_embedded
        assert num_tokens > step.settings.token_budget
