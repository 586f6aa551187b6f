"""Model folders that skilltrain reads back, and that plain sentence-transformers opens."""

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from skilltrain import __version__
from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import Encoder, bert_options
from skilltrain.models.loading import CHECKPOINT_FILE, quietly
from skilltrain.models.pooling import Pooling
from skilltrain.models.reranker import Reranker
from skilltrain.terminal import say

_POOLING: dict[Pooling, Literal["mean", "lasttoken", "cls"]] = {"mean": "mean", "last_token": "lasttoken", "cls": "cls"}


def save_encoder(encoder: Encoder, folder: Path, base: str) -> None:
    """Write weights (safetensors), tokenizer, prompts, pooling and skilltrain.json into `folder`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule

    settings = encoder.settings
    with _written_aside(folder) as aside:
        _save_weights(encoder.backbone, _ending_tokenizer(encoder), aside, folder)
        without_pooler = {key: value for key, value in bert_options(str(aside)).items() if key == "add_pooling_layer"}
        transformer = quietly(
            Transformer,
            str(aside),
            max_seq_length=settings.max_tokens,
            model_kwargs=without_pooler,
            modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            module_output_name="token_embeddings",
        )
        modules = [transformer, PoolingModule(encoder.dim, _POOLING[settings.pooling]), Normalize()]
        prompts = {"query": settings.template.query_prompt(), "document": ""}
        model = SentenceTransformer(modules=modules, prompts=prompts, similarity_fn_name="cosine", device="cpu")
        model.save_pretrained(str(aside), safe_serialization=True, create_model_card=False)
        _write_checkpoint_file(aside, "encoder", settings.model_dump(mode="json"), base)


def save_reranker(reranker: Reranker, folder: Path, base: str) -> None:
    """Write weights (safetensors), tokenizer and skilltrain.json into `folder`."""
    with _written_aside(folder) as aside:
        _save_weights(reranker.network, reranker.tokenizer, aside, folder)
        _write_checkpoint_file(aside, "reranker", reranker.settings.model_dump(mode="json"), base)


@contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """A folder inside `folder` whose files move into it when the block succeeds.

    config.json goes last: without it no reader takes `folder` for a model, so that none reads half of one.
    """
    aside = folder / ".model.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        (folder / "config.json").unlink(missing_ok=True)
        for path in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            path.replace(folder / path.name)
    except OSError as error:
        raise SkilltrainError(f"cannot save the model: {error.strerror or error}", where=folder) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _ending_tokenizer(encoder: Encoder) -> Any:
    """The encoder's tokenizer; with last-token pooling one that appends the end token itself, as `tokenize` does.

    So base Qwen3 becomes like Qwen3-Embedding. A tokenizer that adds other tokens of its own, as BERT's does, is left
    as it is: with last-token pooling its folder is for skilltrain's reader only.
    """
    tokenizer, end = encoder.tokenizer, encoder.tokenizer.pad_token
    if encoder.settings.pooling != "last_token" or tokenizer("a")["input_ids"][-1] == tokenizer.pad_token_id:
        return tokenizer
    if tokenizer.num_special_tokens_to_add():
        say(f"plain sentence-transformers will not append {end!r} to texts; this tokenizer adds tokens of its own")
        return tokenizer
    from tokenizers.processors import Sequence, TemplateProcessing

    tokenizer = copy.deepcopy(tokenizer)
    ending = TemplateProcessing(
        single=["$A", end], pair=["$A", "$B", end], special_tokens=[(end, tokenizer.pad_token_id)]
    )
    backend = tokenizer.backend_tokenizer
    backend.post_processor = Sequence([backend.post_processor, ending]) if backend.post_processor else ending
    return tokenizer


def _save_weights(network: Any, tokenizer: Any, aside: Path, folder: Path) -> None:
    names = network.state_dict()
    if adapted := [name for name in names if "lora_" in name or "base_layer" in name]:
        raise SkilltrainError(f"the adapter is not merged: {adapted[0]}", where=folder)
    if bad := [name for name, value in names.items() if value.is_floating_point() and not torch.isfinite(value).all()]:
        raise SkilltrainError(f"the weight {bad[0]} holds values that are no numbers", where=folder)
    network.save_pretrained(str(aside), safe_serialization=True)
    tokenizer.save_pretrained(str(aside))


def _write_checkpoint_file(aside: Path, kind: str, settings: dict[str, Any], base: str) -> None:
    content = {"kind": kind, "settings": settings, "base": base, "skilltrain": __version__}
    (aside / CHECKPOINT_FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
