import copy

import pytest
import torch
from torch import nn

from skilltrain.losses import ListwiseCE
from skilltrain.models import cpu_linear
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.models.cpu_linear import OneDnnLinear, pack_linear_layers, train_with_onednn
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from test_steps import gradients
from training_data import training_set

SHAPES = [
    ((0, 5), 3, True),
    ((1, 5), 3, False),
    ((2, 9, 16), 33, True),
    ((2, 0, 16), 4, True),
    ((130, 257), 65, False),
    ((3, 2, 4, 8), 8, True),
    ((12,), 5, True),
]


@pytest.fixture(autouse=True)
def any_processor(monkeypatch):
    """oneDNN computes on every processor; which one chooses it by itself is another question."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    monkeypatch.setattr(cpu_linear, "onednn_is_faster", lambda: True)


def both(inner, outer, bias=True):
    """(a plain layer, one of the same weights that oneDNN computes)."""
    torch.manual_seed(inner * 1000 + outer)
    plain = nn.Linear(inner, outer, bias)
    network = nn.Sequential(copy.deepcopy(plain))
    train_with_onednn(network)
    fast = network[0]
    assert type(fast) is OneDnnLinear
    return plain, fast


def outcome(layer, values, call=None):
    """Outputs and the gradients of inputs, weight and bias, for a weighted sum of the outputs."""
    values = values.detach().requires_grad_(True)
    layer.zero_grad()
    output = (call or layer)(values)
    (
        output * torch.linspace(-1, 2, max(1, output.numel()))[: output.numel()].view(output.shape)
    ).sum().backward()
    return [output.detach(), values.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_close(got, wanted, tolerance=1e-5):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape and one.dtype == other.dtype
            furthest = (one - other).abs().max().item() if one.numel() else 0.0
            assert furthest <= tolerance * max(
                1.0, other.abs().max().item() if other.numel() else 0.0
            )


@pytest.mark.parametrize(("shape", "outer", "bias"), SHAPES)
def test_values_and_all_gradients_are_those_of_a_plain_layer(shape, outer, bias):
    plain, fast = both(shape[-1], outer, bias)
    values = torch.randn(shape)
    assert_close(outcome(fast, values), outcome(plain, values))


VIEWS = {
    "transposed": lambda layer: lambda values: layer(values.transpose(0, 1)),
    "every other row": lambda layer: lambda values: layer(values[::2, 1:]),
    "transposed gradient": lambda layer: lambda values: layer(values).transpose(0, 2).contiguous(),
    "expanded gradient": lambda layer: lambda values: layer(values).sum(0, keepdim=True),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_values_and_gradients_that_are_not_contiguous(view):
    plain, fast = both(24, 40)
    values = torch.randn(9, 24, 24)
    assert_close(outcome(fast, values, view(fast)), outcome(plain, values, view(plain)))


def test_subclasses_stay_and_inference_leaves_what_is_laid_out_for_training():
    class Own(nn.Linear):
        pass

    network = nn.ModuleDict({"head": nn.Linear(4, 9), "own": Own(4, 4)})
    train_with_onednn(network)
    pack_linear_layers(network, 8)
    assert [type(module) for module in network.values()] == [OneDnnLinear, Own]


def test_a_replaced_layer_keeps_weights_and_hooks():
    network = nn.ModuleDict({"table": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
    network["head"].weight = network["table"].weight
    network["head"].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    values = torch.randn(3, 4)
    expected = network["head"](values)

    train_with_onednn(network)

    assert type(network["head"]) is OneDnnLinear
    assert network["head"].weight is network["table"].weight
    assert torch.allclose(network["head"](values), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_formats_are_computed_as_ever(dtype):
    plain, fast = (layer.to(dtype) for layer in both(12, 20))
    values = torch.randn(5, 12, dtype=dtype)
    for got, wanted in zip(outcome(fast, values), outcome(plain, values), strict=True):
        assert torch.equal(got, wanted)


def test_equal_inputs_give_equal_bits():
    _, fast = both(96, 384)
    values = torch.randn(1031, 96)
    first = outcome(fast, values)
    moved = (
        torch.empty(values.numel() + 1)[1:].view(values.shape).copy_(values)
    )  # elsewhere, and not aligned
    for again in (outcome(fast, values), outcome(fast, values.clone()), outcome(fast, moved)):
        assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))


@pytest.mark.parametrize("name", ["bert", "qwen3_reranker", "qwen3 with an adapter"])
def test_a_training_step_is_the_plain_one_and_no_name_changes(
    open_encoder_of, open_reranker_of, name
):
    is_reranker, data = name.endswith("reranker"), training_set(6)
    model = (open_reranker_of if is_reranker else open_encoder_of)(name.split()[0])
    if name.endswith("adapter"):
        add_adapter(model.network, AdapterConfig(rank=4, alpha=8))
    settings, names, results = StepSettings(400, recompute=True), list(model.state_dict()), []
    for speed_up in (lambda _: None, train_with_onednn):
        speed_up(model)
        step = (RerankerStep if is_reranker else EncoderStep)(
            model, ListwiseCE(), data, settings
        ).train()
        loss = step(data.lists)
        results.append((loss.item(), gradients(model, loss)))
    (plain_loss, plain), (loss, got) = results
    assert (
        any(type(module) is OneDnnLinear for module in model.modules())
        and list(model.state_dict()) == names
    )
    assert loss == pytest.approx(plain_loss, rel=1e-5) and got.keys() == plain.keys()
    largest = max(value.abs().max().item() for value in plain.values())
    assert max((got[name] - plain[name]).abs().max().item() for name in plain) <= 1e-5 * largest


def test_the_processor_decides(monkeypatch):
    monkeypatch.undo()
    for name, avx512, wanted in [
        ("AMD EPYC 9B45", True, True),
        ("AMD EPYC 7763", False, False),
        ("Intel(R) Xeon(R) Platinum 8481C", True, False),
    ]:
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda n=name, a=avx512: {"cpu_name": n, "avx512_f": a}
        )
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        assert cpu_linear.onednn_is_faster() is wanted
    network = nn.Sequential(nn.Linear(2, 2))
    train_with_onednn(network)  # on the last of them
    assert type(network[0]) is nn.Linear
