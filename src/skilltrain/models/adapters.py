"""LoRA (Hu et al. 2021: y = W x + (alpha / rank) B A x, W frozen) and QLoRA (Dettmers et al. 2023: W in NF4)."""

import importlib.util
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.models.loading import cast_to_weight_dtype, heads

_NAME = "default"  # peft's name for a model's only adapter
# Kept out of 4 bits by name: heads, which are trained or read as they are, and the pooler, which is part of a head.
_HEADS = (
    "lm_head",
    "score",
    "classifier",
    "classifier.dense",
    "classifier.out_proj",
    "head.dense",
    "pooler.dense",
)


class AdapterConfig(Config):
    """Train low-rank additions to linear layers instead of all weights; the saved model has them merged in."""

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


def quantizing_options(adapter: AdapterConfig | None) -> dict[str, Any]:
    """What `from_pretrained` needs beside the usual. Raises SkilltrainError where bitsandbytes is missing."""
    if adapter is None or adapter.quantize == "none":
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        what = "adapter.quantize=nf4 needs bitsandbytes, which is not installed"
        raise SkilltrainError(what, fix="pip install 'skilltrain[qlora]'")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=[*_HEADS],
    )
    return {"quantization_config": config}


def add_adapter(network: Any, adapter: AdapterConfig) -> None:
    """Put an adapter into `network` in place: it keeps its class and methods, and at first its outputs.

    It trains in float32, as does the classification head (with BERT's pooler) of a model that has one. A is random:
    all ranks must come here with the same seed. Raises SkilltrainError for a rank or targets that no layers have.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = _target_names(network, adapter)
    widest = max(
        min(layer.in_features, layer.out_features) for layer in map(network.get_submodule, targets)
    )
    if adapter.rank > widest:
        raise SkilltrainError(
            f"{adapter.rank} exceeds the width of every layer, at most {widest}",
            where="adapter.rank",
        )
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
        bias="none",
    )  # type: ignore[call-arg]
    for name, module in network.named_modules():
        if type(module).__name__ == "Linear4bit":  # by name: bitsandbytes need not be installed
            _prepare_for_cpu(name, module)
    inject_adapter_in_model(config, network)
    for name, parameter in network.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    for head in _heads(network):  # in float32 as well: FSDP2 wants one number format of what trains
        head.float().requires_grad_(True).register_forward_pre_hook(cast_to_weight_dtype)


def adapter_files(network: Any, base: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """(settings, weights by name) of an adapter and the head that trained with it, as peft keeps them for `base`."""
    config, heads_of = network.peft_config[_NAME], {id(head) for head in _heads(network)}
    config.base_model_name_or_path, config.inference_mode = base, True
    config.target_modules = sorted(
        config.target_modules
    )  # a set: the file would differ from run to run
    config.modules_to_save = [
        name for name, module in network.named_modules() if id(module) in heads_of
    ] or None
    trained = {name: value for name, value in network.named_parameters() if value.requires_grad}
    named = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": value
        for name, value in trained.items()
    }
    return config, {name: value.detach().contiguous() for name, value in named.items()}


def merge_adapter(network: Any) -> Any:
    """`network` with its adapter added into plain linear layers; all its weights must lie on this process."""
    from peft.tuners.lora import LoraLayer

    if getattr(network, "is_quantized", False):
        network.dequantize()
        network.is_loaded_in_4bit = False
    for name, module in [*network.named_modules()]:
        if isinstance(module, LoraLayer):
            adapted: Any = module
            plain = adapted.get_base_layer()
            plain.weight.data += adapted.get_delta_weight(_NAME)  # the sum is rounded once
            network.set_submodule(name, plain)
    return network.requires_grad_(True)


def _prepare_for_cpu(name: str, linear: Any) -> None:
    """What bitsandbytes 0.50 needs on CPU: rows of whole blocks of 64 weights (else SkilltrainError), and no repacking.

    Where the CPU multiplies bfloat16 it repacks at the first evaluation, and no gradient passes; state_dict() unpacks.
    """
    if linear.weight.device.type != "cpu":
        return
    if linear.in_features % 64:
        what = (
            f"adapter.quantize=nf4 on a CPU needs layers whose width is a multiple of 64; {name} is"
        )
        raise SkilltrainError(
            f"{what} {linear.in_features} wide", fix="train it on a GPU, or with quantize=none"
        )
    linear.support_avx512bf16_for_cpu = False
    linear.state_dict()


def _target_names(network: Any, adapter: AdapterConfig) -> list[str]:
    in_heads = {id(module) for head in _heads(network) for module in head.modules()}
    in_heads.add(id(network.get_output_embeddings()))
    linear = (
        (name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)
    )
    names = [name for name, module in linear if id(module) not in in_heads]
    if adapter.targets == "all_linear":
        return names
    chosen = {
        target: [n for n in names if f".{n}".endswith(f".{target}")] for target in adapter.targets
    }
    for target, found in chosen.items():
        if not found:
            endings = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            what = f"no linear layer's name ends with '{target}'; this model's end with {endings}"
            raise SkilltrainError(what, where="adapter.targets")
    return [name for name in names if any(name in found for found in chosen.values())]


def _heads(network: Any) -> list[nn.Module]:
    """What a sequence-classification model has on its backbone, BERT's pooler included; of other models nothing."""
    found = heads(network)
    pooler = getattr(network.base_model, "pooler", None)
    return [*found, pooler] if found and pooler is not None else found
