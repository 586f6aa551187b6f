"""Model folders that skilltrain reads back, and that plain sentence-transformers opens."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from skilltrain import __version__
from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import Encoder, bert_options
from skilltrain.models.loading import CHECKPOINT_FILE, quietly
from skilltrain.models.pooling import Pooling
from skilltrain.models.reranker import Reranker

_POOLING: dict[Pooling, Literal["mean", "lasttoken", "cls"]] = {"mean": "mean", "last_token": "lasttoken", "cls": "cls"}


def save_encoder(encoder: Encoder, folder: Path, base: str) -> None:
    """Write weights (safetensors), tokenizer, prompts, pooling and skilltrain.json into `folder`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule

    settings = encoder.settings
    _save_weights(encoder.backbone, encoder.tokenizer, folder)
    transformer = quietly(
        Transformer,
        str(folder),
        max_seq_length=settings.max_tokens,
        model_kwargs=bert_options(str(folder)),
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
    )
    modules = [transformer, PoolingModule(encoder.dim, _POOLING[settings.pooling]), Normalize()]
    prompts = {"query": settings.template.query_prompt(), "document": ""}
    model = SentenceTransformer(modules=modules, prompts=prompts, similarity_fn_name="cosine", device="cpu")
    model.save_pretrained(str(folder), safe_serialization=True, create_model_card=False)
    _write_checkpoint_file(folder, "encoder", settings.model_dump(mode="json"), base)


def save_reranker(reranker: Reranker, folder: Path, base: str) -> None:
    """Write weights (safetensors), tokenizer and skilltrain.json into `folder`."""
    _save_weights(reranker.network, reranker.tokenizer, folder)
    _write_checkpoint_file(folder, "reranker", reranker.settings.model_dump(mode="json"), base)


def _save_weights(network: Any, tokenizer: Any, folder: Path) -> None:
    names = network.state_dict()
    if adapted := [name for name in names if "lora_" in name or "base_layer" in name]:
        raise SkilltrainError(f"the adapter is not merged: {adapted[0]}", where=folder)
    if bad := [name for name, value in names.items() if value.is_floating_point() and not torch.isfinite(value).all()]:
        raise SkilltrainError(f"the weight {bad[0]} holds values that are no numbers", where=folder)
    network.save_pretrained(str(folder), safe_serialization=True)
    tokenizer.save_pretrained(str(folder))


def _write_checkpoint_file(folder: Path, kind: str, settings: dict[str, Any], base: str) -> None:
    content = {"kind": kind, "settings": settings, "base": base, "skilltrain": __version__}
    (folder / CHECKPOINT_FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
