"""Low-rank adapters: LoRA (Hu et al. 2021, arXiv 2106.09685) and QLoRA (Dettmers et al. 2023).

A layer with an adapter computes y = W x + (alpha / rank) B A x. LoRA freezes W, and QLoRA stores it
in the 4-bit format NF4.

Notes:
    - Outputs do not change before the first step. The matrices A are random, so all ranks must call
      `add_adapter` with the same seed.
    - FSDP2 needs one number format for all trained weights. So adapters and heads are in float32.
    - peft imports bitsandbytes, which would warn about a kernel for 4 bits that is not needed.
    - A target is one or more whole components of a dotted name: `proj` does not match `q_proj`.
    - A 4-bit layer is found by the name of its class, because bitsandbytes may not be installed.
    - bitsandbytes 0.50 has a fast layout of 4-bit weights, for CPUs with bfloat16 instructions. A
      layer changes to it at the first evaluation, and then no gradient passes through its weights.
      So the fast layout is switched off. As a side effect, `state_dict` returns weights in it to
      the ordinary layout.
    - FSDP2 casts what it shards to bfloat16, so 4-bit weights are stored as such numbers there.
    - A merge adds the change in float32, and rounds only the sum to the format of the weights.
    - peft casts the inputs of an adapter to float32, its weights' format. Under autocast this is a
      waste, because autocast casts them back to bfloat16.
    - peft has the target modules as a set, without a fixed order. So its config is sorted.
    - transformers leaves `is_loaded_in_4bit` set after `dequantize`.
"""

import importlib.util
import logging
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError, install_command
from skilltrain.models.loading import cast_to_weight_dtype, heads

_ADAPTER = "default"  # peft's name for the only adapter of a model

# Names of layers that stay out of 4 bits: heads, and poolers, which are part of a head.
_HEAD_NAMES = (
    "lm_head",
    "score",
    "classifier",
    "classifier.dense",
    "classifier.out_proj",
    "head.dense",
    "pooler.dense",
)
_NF4_BLOCK = 64  # weights that share a scale


class AdapterConfig(Config):
    """Train low-rank additions to linear layers instead of all weights.

    They are merged into the weights of the saved model.
    """

    rank: int = Field(default=32, ge=1, description="width of the low-rank matrices")
    alpha: int = Field(default=64, ge=1, description="the addition is scaled by alpha / rank")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of an adapter's inputs set to 0 in training"
    )
    targets: Literal["all_linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        default="all_linear",
        description="all linear layers but heads, or names' endings, such as [q_proj, v_proj]",
    )
    quantize: Literal["none", "nf4"] = Field(
        default="none", description="nf4: the frozen weights in 4 bits (QLoRA)"
    )


def is_quantized(adapter: AdapterConfig | None) -> bool:
    """Return whether the frozen weights are in 4 bits."""
    return adapter is not None and adapter.quantize != "none"


def quantizing_options(adapter: AdapterConfig | None, sharded: bool = False) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load a network in 4 bits.

    There are none if the adapter does not quantise.

    Args:
        adapter: Settings of the adapter; None if all weights are trained.
        sharded: Whether ranks will hold shards of the network (FSDP2).

    Raises:
        SkilltrainError: The package bitsandbytes is not installed.
    """
    if not is_quantized(adapter):
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        fault = "adapter.quantize=nf4 needs bitsandbytes, which is not installed"
        raise SkilltrainError("missing-package", fault, fix=install_command("qlora"))
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        # FSDP2 casts what it shards to bfloat16, so packed weights are stored as such numbers.
        bnb_4bit_quant_storage=torch.bfloat16 if sharded else torch.uint8,
        llm_int8_skip_modules=[*_HEAD_NAMES],
    )
    return {"quantization_config": config}


def add_adapter(network: Any, adapter: AdapterConfig) -> None:
    """Add an adapter to a network in place.

    The adapter, a classification head and its pooler train in float32. All other weights stay as
    they are. The adapter starts with random values, so all ranks must have the same seed.

    Args:
        network: A network of transformers. Its linear layers may be in 4 bits.
        adapter: Settings of the adapter, such as its rank.

    Raises:
        SkilltrainError: The rank exceeds the width of every layer, or no layer is a target.
    """
    # peft imports bitsandbytes, which would warn about a kernel that is not needed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, inject_adapter_in_model

    targets = _target_names(network, adapter)
    layers = [network.get_submodule(name) for name in targets]
    # A matrix of a layer cannot have a rank above the smaller of its two sizes.
    widths = [min(layer.in_features, layer.out_features) for layer in layers]
    max_rank = max(widths)
    if adapter.rank > max_rank:
        fault = f"{adapter.rank} exceeds the width of every layer, at most {max_rank}"
        raise SkilltrainError("exceeds-model", fault, where="adapter.rank")

    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
        bias="none",
    )  # type: ignore[call-arg]
    # Gradients must pass through layers in 4 bits. Find these layers by the name of their class,
    # because bitsandbytes may not be installed.
    for name, module in network.named_modules():
        if type(module).__name__ == "Linear4bit":
            _keep_trainable_layout(name, module)
    inject_adapter_in_model(config, network)

    # FSDP2 needs one number format for all trained weights, so adapters and heads are in float32.
    for name, parameter in network.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    for head in _trained_heads(network):
        # The hook casts the inputs of the head from the format of the layers below to float32.
        head.float().requires_grad_(True).register_forward_pre_hook(cast_to_weight_dtype)


def keep_input_dtype(network: Any) -> None:
    """Leave it to autocast to cast the inputs of adapters. All forward passes must use autocast.

    By default, peft casts the inputs to float32, the format of the adapter's weights. Autocast
    would cast them back to bfloat16, so this step only costs time.
    """
    from peft.tuners.lora import LoraLayer

    for module in network.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False


def adapter_files(network: Any, base: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return peft's config of an adapter, and the weights of the adapter and a trained head.

    With these two, peft can load the adapter onto the base model.

    Args:
        network: Network with an adapter.
        base: Source of the model without the adapter.
    """
    trained_heads = _trained_heads(network)
    head_names = [name for name, module in network.named_modules() if module in trained_heads]
    config = network.peft_config[_ADAPTER]
    config.base_model_name_or_path = base
    config.inference_mode = True  # peft loads the adapter with frozen weights
    # peft has the target modules as a set, whose order changes from run to run.
    config.target_modules = sorted(config.target_modules)
    config.modules_to_save = head_names or None

    weights = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            # A file of peft has a prefix in each name, and leaves out the name of the adapter.
            peft_name = f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"
            weights[peft_name] = parameter.detach().contiguous()
    return config, weights


def merge_adapter(network: Any) -> Any:
    """Merge the adapter into plain linear layers, in place, and return the network.

    The weight W of a layer becomes W + (alpha / rank) B A. A and B are the adapter's matrices.

    Args:
        network: Network with an adapter. All weights must be on this process.
    """
    from peft.tuners.lora import LoraLayer

    if getattr(network, "is_quantized", False):
        network.dequantize()  # turns 4-bit weights into ordinary numbers
        network.is_loaded_in_4bit = False  # `dequantize` does not reset this mark
    for name, module in [*network.named_modules()]:
        if isinstance(module, LoraLayer):
            adapted: Any = module
            # Replace the layer with an adapter by the linear layer inside.
            linear = adapted.get_base_layer()
            linear.weight.data += adapted.get_delta_weight(_ADAPTER)
            network.set_submodule(name, linear)
    return network.requires_grad_(True)


def _keep_trainable_layout(name: str, linear: Any) -> None:
    """Keep the weights of a 4-bit layer on a CPU in a layout through which gradients pass.

    On CPUs with bfloat16 instructions, bitsandbytes changes a layer to a fast layout at the first
    evaluation. No gradient passes through the fast layout, so this function switches it off.

    Args:
        name: Name of the layer, for errors.
        linear: A `Linear4bit` of bitsandbytes.

    Raises:
        SkilltrainError: The width of the layer is no multiple of the block that shares a scale.
    """
    if linear.weight.device.type != "cpu":
        return
    if linear.in_features % _NF4_BLOCK:
        fault = (
            f"adapter.quantize=nf4 on a CPU needs layers whose width is a multiple of {_NF4_BLOCK}"
            f"; {name} is {linear.in_features} wide"
        )
        raise SkilltrainError(
            "unsupported-model", fault, fix="train it on a GPU, or with quantize=none"
        )
    linear.support_avx512bf16_for_cpu = False
    # As a side effect, `state_dict` returns weights in the fast layout to the ordinary layout.
    linear.state_dict()


def _target_names(network: Any, adapter: AdapterConfig) -> list[str]:
    """Return the names of the linear layers that get an adapter.

    For example, the target `q_proj` selects `layers.0.self_attn.q_proj` and all other layers whose
    names end so.

    Raises:
        SkilltrainError: No layer has a name that ends with one of the targets.
    """
    # Heads train in full, and the output layer over the vocabulary stays frozen.
    excluded = {network.get_output_embeddings()}
    for head in _trained_heads(network):
        excluded.update(head.modules())
    names = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and module not in excluded:
            names.append(name)
    if adapter.targets == "all_linear":
        return names

    selected = set()
    for target in adapter.targets:
        # The dots keep `proj` from matching `q_proj`.
        matches = [name for name in names if f".{name}".endswith(f".{target}")]
        if not matches:
            last_components = [name.rpartition(".")[2] for name in names]
            endings = ", ".join(dict.fromkeys(last_components))
            fault = f"no linear layer's name ends with '{target}'; this model's end with {endings}"
            raise SkilltrainError("unknown-choice", fault, where="adapter.targets")
        selected.update(matches)
    return [name for name in names if name in selected]


def _trained_heads(network: Any) -> list[nn.Module]:
    """Return the head layers of a sequence classification model, and its pooler if it has one.

    Other models have no such layers, so the list is empty.
    """
    layers = heads(network)
    pooler = getattr(network.base_model, "pooler", None)
    if layers and pooler is not None:
        layers.append(pooler)
    return layers
