"""Other forms of a saved model, for servers and runtimes that do not take it as training saves it."""

import copy
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.export.folder import write_record, write_weights
from skilltrain.export.modules import IDENTITY, write_modules
from skilltrain.files import read_json
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import CHECKPOINT_FILE, heads
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker

ONNX, ONNX_INT8 = "onnx/model.onnx", "onnx/model_quantized.onnx"
OPENVINO = "openvino/openvino_model.xml"
_MOST_IN_ONE_FILE = 2**30  # bytes; ONNX's own limit is 2 GiB


def open_model(
    folder: Path, device: str = "cpu", precision: Literal["float32", "bfloat16"] = "float32"
) -> Any:
    """The `Encoder` or `Reranker` that was saved in `folder`. Raises SkilltrainError where there is none."""
    given: dict[str, Any] = {"source": str(folder), "precision": precision}
    if read_json(folder / CHECKPOINT_FILE)["kind"] == "encoder":
        return load_encoder(EncoderConfig(**given), torch.device(device))
    return load_reranker(RerankerConfig(**given), torch.device(device))


def write_form(folder: Path, form: Form) -> None:
    """Bring the saved model in `folder`, in place, into a form, or add that form's files.

    `sequence_classification`: a Qwen3-like reranker with one output, yes - no. `multi_vector`: an encoder as
    `MultiVectorEncoder` opens it. `onnx`: beside the weights, the network in float32 and with 8-bit weights and
    activations (dynamic quantisation). `openvino`: with 8-bit weights.
    Raises SkilltrainError for a model that has no such form, and for a package that is missing.
    """
    if form == "multi_vector":
        _as_multi_vector(folder)
    elif form == "sequence_classification":
        _as_classifier(folder)
    else:
        _add_graph(folder, form)
    write_record(folder, read_json(folder / CHECKPOINT_FILE) | {"form": form})


def _as_multi_vector(folder: Path) -> None:
    model = open_model(folder, "meta")
    if not isinstance(model, Encoder):
        raise SkilltrainError("only an encoder has the form multi_vector", where=folder)
    for place in folder.glob("[0-9]_*"):
        shutil.rmtree(place)
    write_modules(model, folder, per_token=True)


def _as_classifier(folder: Path) -> None:
    """Put one row in the place of the vocabulary's: the same score, and no logits of a vocabulary are computed."""
    stored = read_json(folder / "config.json").get("dtype")
    model = open_model(folder, precision="bfloat16" if stored == "bfloat16" else "float32")
    if not (isinstance(model, Reranker) and model.yes_no_ids is not None):
        what = "only a reranker with template.form=yes_no has the form sequence_classification"
        raise SkilltrainError(f"{what}; one of form pair is a classifier already", where=folder)
    model.network = _classifier(model)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    shutil.rmtree(folder / "1_LogitScore", ignore_errors=True)
    write_weights(model.network, folder, folder)
    write_modules(model, folder)


def _classifier(model: Reranker) -> Any:
    """A yes_no reranker's network, its weights shared, with W_yes - W_no for a head, in float32."""
    from transformers import AutoModelForSequenceClassification

    config, direction = copy.deepcopy(model.network.config), model.direction()
    assert direction is not None
    config.update({"num_labels": 1, "pad_token_id": model.tokenizer.pad_token_id})
    config.update(
        {"use_sep_token": False, "use_pad_token": False}
    )  # vLLM's name, and its older one
    config.update({"sentence_transformers": {"activation_fn": IDENTITY}})
    with torch.device("meta"):
        network = AutoModelForSequenceClassification.from_config(config)
    setattr(network, network.base_model_prefix, model.network.base_model)
    heads(network)[0].weight = nn.Parameter(direction.detach()[None].clone())
    return network.eval()


class _Graph(nn.Module):
    """What ONNX and OpenVINO compute: an encoder's token vectors, which readers pool, or a reranker's logits."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        input_ids: Int[Tensor, "text token"],
        attention_mask: Int[Tensor, "text token"],
        token_type_ids: Int[Tensor, "text token"] | None = None,
    ) -> Float[Tensor, "text ..."]:
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        found = self.network(input_ids=input_ids, attention_mask=attention_mask, **segments)
        return found.logits if heads(self.network) else found.last_hidden_state


def _add_graph(folder: Path, form: Form) -> None:
    model = open_model(folder)
    if isinstance(model, Reranker) and model.settings.template.form == "cosine_pair":
        raise SkilltrainError(
            f"a reranker of form cosine_pair has no head to compute in {form}", where=folder
        )
    is_yes_no = isinstance(model, Reranker) and model.yes_no_ids is not None
    network = _classifier(model) if is_yes_no else model.network
    network.set_attn_implementation("sdpa")  # ours for packed texts is no part of a graph
    network.config.use_cache = network.base_model.config.use_cache = False
    ids, mask = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0  # a trace without padding would leave the mask out
    example = {"input_ids": ids, "attention_mask": mask}
    if (getattr(network.config, "type_vocab_size", None) or 0) > 1:
        example["token_type_ids"] = torch.zeros_like(ids)
    graph = _Graph(network).requires_grad_(False)
    try:
        (_write_onnx if form == "onnx" else _write_openvino)(graph, example, folder)
    except ImportError as error:
        fix = f"pip install 'skilltrain[{form}]'"
        raise SkilltrainError(
            f"this form needs the package {error.name}", where=form, fix=fix
        ) from error


def _write_onnx(graph: _Graph, example: dict[str, Tensor], folder: Path) -> None:
    import onnxscript  # noqa: F401  torch needs it
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file, small = folder / ONNX, folder / ONNX_INT8
    file.parent.mkdir()
    is_large = sum(value.numel() for value in graph.parameters()) * 4 > _MOST_IN_ONE_FILE
    axes = {0: torch.export.Dim("text"), 1: torch.export.Dim("token")}
    output = "logits" if heads(graph.network) else "last_hidden_state"
    torch.onnx.export(
        graph,
        (*example.values(),),
        file,
        input_names=[*example],
        output_names=[output],
        external_data=is_large,
        dynamic_shapes=(axes,) * len(example),
        dynamo=True,
        verbose=False,
    )
    quantize_dynamic(
        file,
        small,
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=is_large,
    )


def _write_openvino(graph: _Graph, example: dict[str, Tensor], folder: Path) -> None:
    # Both send word of every conversion to their maker, unasked; without this package they run as well.
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    import nncf
    import openvino

    shapes = [(name, openvino.PartialShape([-1, -1]), openvino.Type.i64) for name in example]
    converted = openvino.convert_model(graph, example_input=(*example.values(),), input=shapes)
    compressed = nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_ASYM)
    (folder / OPENVINO).parent.mkdir()
    openvino.save_model(compressed, folder / OPENVINO, compress_to_fp16=False)
