"""Other forms of a saved model, for servers and runtimes that cannot open it as it was saved.

Notes:
    - The score of a yes_no reranker is the logit of yes minus the logit of no. A classifier with
      the output row W_yes - W_no gives the same scores.
    - vLLM puts a separator token between query and skill unless `use_sep_token` is false.
      `use_pad_token` is the name of this setting in older releases of vLLM.
    - `write_modules` looks for the head of the model's network.
    - A graph in ONNX cannot hold our attention for packed texts. Tracing removes a mask that shows
      no padding. A full disk can cause any exception in the export.
"""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from skilltrain.errors import SkilltrainError, install_command, reason_of
from skilltrain.export import Form
from skilltrain.files import read_json
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import CHECKPOINT_FILE, heads, is_encoder
from skilltrain.models.modules import write_modules
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker
from skilltrain.models.saving import write_record, write_weights
from skilltrain.texts import printable

ONNX = "onnx/model.onnx"
ONNX_INT8 = "onnx/model_quantized.onnx"
_MAX_FILE_BYTES = 2**30  # ONNX's own limit is 2 GiB


def open_model(
    folder: Path,
    device: str = "cpu",
    precision: Literal["float32", "bfloat16"] = "float32",
    runs_code: bool = False,
) -> Any:
    """Open the `Encoder` or `Reranker` in a folder.

    Args:
        folder: Folder of a saved model.
        device: Device of the weights.
        precision: Number format of the weights.
        runs_code: Whether the model's own Python code may run.

    Raises:
        SkilltrainError: The folder holds no model.
    """
    values: dict[str, Any] = {"source": str(folder), "precision": precision}
    values["trust_remote_code"] = runs_code
    if is_encoder(folder):
        return load_encoder(EncoderConfig(**values), torch.device(device))
    return load_reranker(RerankerConfig(**values), torch.device(device))


def write_form(folder: Path, form: Form) -> None:
    """Convert the saved model in `folder` to another form, in place.

    Args:
        folder: A folder that `save_model` wrote.
        form: `sequence_classification` for a yes_no reranker, `multi_vector` for an encoder, `onnx`
            for any model (float32 and 8 bits).
    """
    # On the device meta, weights have shapes but no values. That is enough to choose the modules.
    model = open_model(folder, "meta")
    # Only yes_no rerankers have the ids of the tokens "yes" and "no".
    answers_yes_no = isinstance(model, Reranker) and model.yes_no_ids is not None
    problem = ""
    if form == "multi_vector" and not isinstance(model, Encoder):
        problem = "only an encoder has this form"
    if form == "sequence_classification" and not answers_yes_no:
        problem = "only a reranker with template.form=yes_no has this form"
        if isinstance(model, Reranker):
            problem += "; a reranker with template.form=pair is already a classifier"
    if form == "onnx" and isinstance(model, Encoder) and model.projection:
        # The graph holds the network alone, so its vectors would be those before the projection.
        problem = "an encoder with modules Dense has no such form"
    if problem:
        raise SkilltrainError("unsupported-form", problem, where=f"--form {form}")

    if form == "multi_vector":
        # Replace the modules of a single vector, such as `1_Pooling`.
        for module_folder in folder.glob("[0-9]_*"):
            shutil.rmtree(module_folder)
        write_modules(model, folder, per_token=True)
    elif answers_yes_no:
        # The ONNX form of a yes_no reranker is made from its classifier too.
        _convert_to_classifier(folder)
    if form == "onnx":
        with _hide_warnings():
            _add_onnx(folder)
    write_record(folder, read_json(folder / CHECKPOINT_FILE) | {"form": form})


def _convert_to_classifier(folder: Path) -> None:
    """Turn a saved yes_no reranker into a classifier with one output, in place.

    The reranker scores a pair by the logit of yes minus the logit of no. A classifier with the
    output row W_yes - W_no has the same scores, and servers can open it.

    Args:
        folder: Folder of the reranker.
    """
    # The classifier keeps the number format of the saved weights.
    dtype = read_json(folder / "config.json").get("dtype")
    reranker = open_model(folder, precision="bfloat16" if dtype == "bfloat16" else "float32")
    reranker.network = _classifier_of(reranker)

    # Remove the old weights and the module that computed yes minus no, and write the new ones.
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    shutil.rmtree(folder / "1_LogitScore", ignore_errors=True)
    write_weights(reranker.network.eval(), staging=folder, folder=folder)
    write_modules(reranker, folder)


def _classifier_of(reranker: Reranker) -> Any:
    """Return a classifier with the layers of a yes_no reranker and the row W_yes - W_no.

    W_yes and W_no are the rows of the output layer for the tokens "yes" and "no".
    """
    from transformers import AutoModelForSequenceClassification

    # The device meta allocates no memory. All weights are replaced below.
    with torch.device("meta"):
        network: Any = AutoModelForSequenceClassification.from_config(reranker.network.config)
    network.config.update(
        {
            "num_labels": 1,
            "pad_token_id": reranker.tokenizer.pad_token_id,
            # vLLM must put no separator between query and skill. Older releases of vLLM call this
            # setting `use_pad_token`.
            "use_sep_token": False,
            "use_pad_token": False,
        }
    )
    setattr(network, network.base_model_prefix, reranker.network.base_model)
    row: Any = reranker.score_vector()  # [hidden], float32
    output_layer = heads(network)[0]
    output_layer.weight = nn.Parameter(row.detach()[None].clone())  # [1, hidden]
    return network


@contextmanager
def _hide_warnings() -> Iterator[None]:
    """Hide the warnings of the ONNX exporter. They ask for nothing that a user could do."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _add_onnx(folder: Path) -> None:
    """Export the network of a saved model to ONNX in float32, and quantise a copy to 8 bits."""
    try:
        import onnxscript  # noqa: F401  torch needs it
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        problem = f"this form needs the package {error.name}"
        fix = install_command("onnx")
        raise SkilltrainError("missing-package", problem, where="--form onnx", fix=fix) from error

    network = open_model(folder).network
    # A graph in ONNX cannot hold our own attention for packed texts.
    network.set_attn_implementation("sdpa")
    # The graph must not return a cache of keys and values, which only text generation needs.
    network.config.use_cache = False
    network.base_model.config.use_cache = False

    # The exporter runs the network on an example. Without padding in the example, it would remove
    # the mask from the graph.
    ids = torch.ones(2, 8, dtype=torch.long)  # [text, token]
    mask = torch.ones_like(ids)  # [text, token]
    mask[1, 5:] = 0  # the second text has padding
    example = {"input_ids": ids, "attention_mask": mask}
    # Models such as BERT also read whether a token belongs to the first or the second text.
    if (getattr(network.config, "type_vocab_size", None) or 0) > 1:
        example["token_type_ids"] = torch.zeros_like(ids)
    # Both axes of the inputs may have other lengths than in the example.
    axes = {0: torch.export.Dim("text"), 1: torch.export.Dim("token")}

    (folder / ONNX).parent.mkdir()
    # A float32 weight has 4 bytes. A large model stores its weights in a file beside the graph.
    is_large = network.num_parameters() * 4 > _MAX_FILE_BYTES
    try:
        torch.onnx.export(
            network.requires_grad_(False),
            f=folder / ONNX,
            kwargs=example,
            input_names=[*example],
            output_names=["logits" if heads(network) else "last_hidden_state"],
            external_data=is_large,
            dynamic_shapes=dict.fromkeys(example, axes),
            dynamo=True,
            verbose=False,
        )
        quantize_dynamic(
            folder / ONNX,
            folder / ONNX_INT8,
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=is_large,
        )
    except Exception as error:  # a full disk can cause any exception in the exporter
        problem = f"cannot write the ONNX model: {printable(reason_of(error), 300)}"
        raise SkilltrainError("cannot-write", problem, where=folder) from error
