"""oneDNN's linear layers compute what PyTorch's do, with the same gradients."""

import copy
import os
from functools import partial

import pytest
import torch
from torch import nn

from processes import run_apart
from skilltrain.losses import ListwiseCE
from skilltrain.models import cpu_linear
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.models.cpu_linear import OneDnnLinear, pack_linear_layers, train_with_onednn
from skilltrain.models.encoder import Encoder
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
    """Use oneDNN on every processor."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    monkeypatch.setattr(cpu_linear, "onednn_is_faster", lambda: True)


def plain_and_fast(inner, outer, bias=True):
    """Return a plain layer, and one with the same weights that oneDNN computes."""
    torch.manual_seed(inner * 1000 + outer)
    plain = nn.Linear(inner, outer, bias)
    network = nn.Sequential(copy.deepcopy(plain))
    train_with_onednn(network)
    fast = network[0]
    assert type(fast) is OneDnnLinear
    return plain, fast


def outputs_and_gradients(layer, values, call=None):
    """Return the outputs, and the gradients of inputs, weight and bias."""
    values = values.detach().requires_grad_(True)
    layer.zero_grad()
    output = (call or layer)(values)
    weights = torch.linspace(-1, 2, max(1, output.numel()))[: output.numel()]
    (output * weights.view(output.shape)).sum().backward()
    return [output.detach(), values.grad, *(parameter.grad for parameter in layer.parameters())]


def largest(values):
    return values.abs().max().item() if values.numel() else 0.0


def assert_close(results, expected):
    for result, reference in zip(results, expected, strict=True):
        assert (result is None) == (reference is None)
        if result is not None:
            assert result.shape == reference.shape
            assert result.dtype == reference.dtype
            assert largest(result - reference) <= 1e-5 * max(1.0, largest(reference))


def assert_equal(results, expected):
    for result, reference in zip(results, expected, strict=True):
        assert torch.equal(result, reference)


@pytest.mark.parametrize(("shape", "outer", "bias"), SHAPES)
def test_results_equal_plain_layer(shape, outer, bias):
    plain, fast = plain_and_fast(shape[-1], outer, bias)
    values = torch.randn(shape)

    results = outputs_and_gradients(fast, values)

    assert_close(results, outputs_and_gradients(plain, values))


VIEWS = {
    "transposed": lambda layer: lambda values: layer(values.transpose(0, 1)),
    "every other row": lambda layer: lambda values: layer(values[::2, 1:]),
    "transposed gradient": lambda layer: lambda values: layer(values).transpose(0, 2).contiguous(),
    "expanded gradient": lambda layer: lambda values: layer(values).sum(0, keepdim=True),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_tensors_need_not_be_contiguous(view):
    plain, fast = plain_and_fast(24, 40)
    values = torch.randn(9, 24, 24)

    results = outputs_and_gradients(fast, values, view(fast))

    assert_close(results, outputs_and_gradients(plain, values, view(plain)))


def test_subclasses_are_not_replaced():
    class Subclass(nn.Linear):
        pass

    network = nn.ModuleDict({"layer": Subclass(4, 4)})

    train_with_onednn(network)
    pack_linear_layers(network, 8)

    assert type(network["layer"]) is Subclass


def test_packing_keeps_layers_for_training():
    network = nn.ModuleDict({"layer": nn.Linear(4, 9)})

    train_with_onednn(network)
    pack_linear_layers(network, 8)

    assert type(network["layer"]) is OneDnnLinear


@pytest.fixture
def tied_network():
    """A network whose head has the weights of a table, and a hook that doubles its inputs."""
    network = nn.ModuleDict({"table": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
    network["head"].weight = network["table"].weight
    network["head"].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    return network


def test_replaced_layer_keeps_tied_weights(tied_network):
    train_with_onednn(tied_network)

    assert type(tied_network["head"]) is OneDnnLinear
    assert tied_network["head"].weight is tied_network["table"].weight


def test_replaced_layer_keeps_its_hooks(tied_network):
    values = torch.randn(3, 4)
    expected = tied_network["head"](values)

    train_with_onednn(tied_network)

    assert torch.allclose(tied_network["head"](values), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_formats_are_computed_as_before(dtype):
    plain, fast = (layer.to(dtype) for layer in plain_and_fast(12, 20))
    values = torch.randn(5, 12, dtype=dtype)

    results = outputs_and_gradients(fast, values)

    assert_equal(results, outputs_and_gradients(plain, values))


def test_equal_inputs_give_equal_bits():
    _, fast = plain_and_fast(96, 384)
    values = torch.randn(1031, 96)

    first = outputs_and_gradients(fast, values)

    assert_equal(outputs_and_gradients(fast, values), first)
    assert_equal(outputs_and_gradients(fast, values.clone()), first)


def test_unaligned_inputs_give_equal_bits():
    _, fast = plain_and_fast(96, 384)
    values = torch.randn(1031, 96)
    unaligned = torch.empty(values.numel() + 1)[1:].view(values.shape).copy_(values)

    results = outputs_and_gradients(fast, unaligned)

    assert_equal(results, outputs_and_gradients(fast, values))


MODELS = ["bert", "qwen3_reranker", "qwen3 with an adapter"]


@pytest.fixture
def open_model(open_encoder_of, open_reranker_of):
    """Return a function that opens a model of MODELS."""

    def open_by_name(name):
        opener = open_reranker_of if name.endswith("reranker") else open_encoder_of
        model = opener(name.split()[0])
        if name.endswith("adapter"):
            add_adapter(model.network, AdapterConfig(rank=4, alpha=8))
        return model

    return open_by_name


def loss_and_gradients(model):
    """Return the loss of a training step, and its gradients by name."""
    data = training_set(6)
    step_class = EncoderStep if isinstance(model, Encoder) else RerankerStep
    step = step_class(model, ListwiseCE(), data, StepSettings(400, recompute=True)).train()
    loss = step(data.lists)
    return loss.item(), gradients(model, loss)


@pytest.mark.parametrize("name", MODELS)
def test_training_step_equals_plain_one(open_model, name):
    model = open_model(name)
    plain_loss, plain_gradients = loss_and_gradients(model)

    train_with_onednn(model)
    loss, fast_gradients = loss_and_gradients(model)

    assert any(type(module) is OneDnnLinear for module in model.modules())
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert fast_gradients.keys() == plain_gradients.keys()

    tolerance = 1e-5 * max(map(largest, plain_gradients.values()))

    for key, gradient in fast_gradients.items():
        assert largest(gradient - plain_gradients[key]) <= tolerance


@pytest.mark.parametrize("name", MODELS)
def test_replacing_layers_changes_no_name(open_model, name):
    model = open_model(name)
    names = list(model.state_dict())

    train_with_onednn(model)

    assert list(model.state_dict()) == names


@pytest.fixture
def set_processor(monkeypatch):
    """Return a function that sets the name of the processor and whether it has AVX-512."""
    monkeypatch.undo()

    def set_capabilities(name, has_avx512):
        capabilities = {"cpu_name": name, "avx512_f": has_avx512}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)

    return set_capabilities


@pytest.mark.parametrize(
    ("name", "has_avx512", "expected"),
    [
        ("AMD EPYC 9B45", True, True),
        ("AMD EPYC 7763", False, False),
        ("Intel(R) Xeon(R) Platinum 8481C", True, False),
    ],
)
def test_the_processor_decides(set_processor, name, has_avx512, expected):
    set_processor(name, has_avx512)

    assert cpu_linear.onednn_is_faster() is expected


def test_layers_stay_where_onednn_is_not_faster(set_processor):
    set_processor("AMD EPYC 7763", has_avx512=False)
    network = nn.Sequential(nn.Linear(2, 2))

    train_with_onednn(network)

    assert type(network[0]) is nn.Linear


def compute_many_sizes(capacity: str | None, starts_training: bool) -> None:
    """Compute products of 1 to 100 rows, then of one row again, while oneDNN logs its kernels.

    Args:
        capacity: The user's number of kernels that oneDNN keeps, if any.
        starts_training: Whether a training run starts before the products.
    """
    os.environ.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY", None)
    if capacity is not None:
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = capacity
    os.environ["ONEDNN_VERBOSE"] = "profile_create"

    cpu_linear.onednn_is_faster = lambda: True
    if starts_training:
        train_with_onednn(nn.Sequential(nn.Linear(4, 4)))
    layer = OneDnnLinear(nn.Linear(4, 4))
    for num_rows in [*range(1, 101), 1]:
        layer(torch.zeros(num_rows, 4))


@pytest.mark.parametrize(
    ("capacity", "starts_training", "last_lookup"),
    [
        (None, True, "cache_miss"),
        ("1024", True, "cache_hit"),  # the user's value stays
        (None, False, "cache_hit"),  # an import changes nothing
    ],
)
def test_training_keeps_few_kernels(capacity, starts_training, last_lookup):
    (ended,) = run_apart(partial(compute_many_sizes, capacity, starts_training))

    assert ended.code == 0, ended
    assert f"create:{last_lookup}" in ended.out.splitlines()[-1]
