"""Model folders, written whole or not at all: skilltrain reads them, and plain sentence-transformers scores alike."""

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import processors

from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import path_inside, read_json, shareable, write_json, write_text
from skilltrain.formats import MODEL
from skilltrain.models.adapters import adapter_files
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import CHECKPOINT_FILE
from skilltrain.models.modules import write_modules
from skilltrain.models.reranker import Reranker
from skilltrain.models.tokens import TextTokenizer, as_special
from skilltrain.templates import QWEN3_RERANKER_PREFIX, QWEN3_RERANKER_SUFFIX, RerankerTemplate
from skilltrain.version import __version__

_CHAT_TEMPLATE = Path(__file__).parent / "templates" / "yes_no_chat.j2"


def save_model(model: Encoder | Reranker, folder: Path, base: str, card: str | None = None) -> None:
    """Write what `SentenceTransformer(folder)` or `CrossEncoder(folder)` needs to give our vectors or scores.

    Raises SkilltrainError for weights that must not be saved, and where the folder cannot be written.
    """
    with _written_aside(folder, model, base) as aside:
        write_weights(model.network, aside, folder)
        tokenizer = _tokenizer_of(model)
        tokenizer.model_max_length = model.settings.max_tokens
        tokenizer.save_pretrained(str(aside))
        write_modules(model, aside)
        if card is not None:
            write_text(aside / "README.md", card)


def save_adapter(model: Encoder | Reranker, folder: Path, base: str) -> None:
    """Write a model's adapter alone: `PeftModel.from_pretrained(network, folder)` adds it to the network of `base`."""
    config, weights = adapter_files(model.network, shareable(base))
    with _written_aside(folder, model, base) as aside:
        config.save_pretrained(aside)
        save_file(weights, aside / "adapter_model.safetensors", metadata={"format": "pt"})


def copy_model(source: Path, target: Path) -> None:
    """Copy the files of a model, and no others that lie beside them. Raises SkilltrainError where one is missing."""
    record = source / CHECKPOINT_FILE
    for file in [path_inside(source, str(name), record) for name in read_json(record)["files"]]:
        if not file.is_file():
            raise SkilltrainError("a file of the model is missing", where=file)
        copied = target / file.relative_to(source)
        try:
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)
        except OSError as error:
            raise SkilltrainError(
                f"cannot save the model: {reason_of(error)}", where=target
            ) from error


@contextmanager
def _written_aside(folder: Path, model: Encoder | Reranker, base: str) -> Iterator[Path]:
    """Yield a folder inside `folder`; its files move out when the block succeeds.

    `folder` may hold a run's checkpoints, so skilltrain.json says which files are the model's.
    config.json moves last: without it no reader takes `folder` for a model.
    """
    aside = folder / ".model.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        kind = "encoder" if isinstance(model, Encoder) else "reranker"
        settings = model.settings.model_dump(mode="json")
        write_record(aside, {"kind": kind, "settings": settings, "base": shareable(base)})
        (folder / "config.json").unlink(missing_ok=True)
        for path in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            path.replace(folder / path.name)
    except (OSError, SafetensorError) as error:  # a full disk is either
        raise SkilltrainError(f"cannot save the model: {reason_of(error)}", where=folder) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_weights(network: Any, aside: Path, folder: Path) -> None:
    """Write config.json and the safetensors files to `aside`.

    Raises:
        SkilltrainError: An adapter is not merged, or a weight is no number. Its place is `folder`.
    """
    for name, value in network.state_dict().items():
        if "lora_" in name or "base_layer" in name:
            raise SkilltrainError(f"the adapter is not merged: {name}", where=folder)
        if value.is_floating_point() and not value.isfinite().all():
            fault = f"the weight {name} holds values that are no numbers"
            raise SkilltrainError(fault, where=folder)
    network.save_pretrained(str(aside), safe_serialization=True)
    config = read_json(aside / "config.json")
    if config.get("pad_token_id") is None:
        config.pop("pad_token_id", None)  # TEI takes no pad token, but no null
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta:
        config["rope_theta"] = theta  # readers of transformers 4 would compute with 10,000
    write_json(aside / "config.json", config)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write skilltrain.json: `record` and the names of the model's files. Everyone may read them."""
    names = {CHECKPOINT_FILE}
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors writes its file for its owner alone
            names.add(path.relative_to(folder).as_posix())
    facts = {"format": MODEL.number, "skilltrain": __version__, "files": sorted(names)}
    write_json(folder / CHECKPOINT_FILE, {**record, **facts})


def _tokenizer_of(model: Encoder | Reranker) -> Any:
    """Copy the model's tokenizer so that by itself it reads a text as the model does.

    The names of control tokens in texts are read as the letters they are, as by `TextTokenizer`.
    """
    tokenizer = copy.deepcopy(model.tokenizer)
    tokens = tokenizer.added_tokens_decoder
    rows = TextTokenizer(tokenizer).ids([token.content for token in tokens.values()])
    controls = {
        token.content: token
        for (number, token), ids in zip(tokens.items(), rows, strict=True)
        if number not in ids
    }
    if isinstance(model, Reranker) and model.settings.template.form == "yes_no":
        template = yes_no_chat_template(model.settings.template, sorted(controls))
        tokenizer.chat_template = template
        return tokenizer
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens([as_special(controls[name]) for name in sorted(controls)])
    tokenizer.init_kwargs["split_special_tokens"] = tokenizer.split_special_tokens = True
    needs_end = isinstance(model, Encoder) and model.settings.pooling == "last_token"
    if needs_end and tokenizer("a")["input_ids"][-1] != tokenizer.pad_token_id:  # base Qwen3
        end = tokenizer.pad_token
        ending = processors.TemplateProcessing(
            single=f"$A {end}",
            pair=f"$A $B {end}",
            special_tokens=[(end, tokenizer.pad_token_id)],
        )
        former = [backend.post_processor] if backend.post_processor else []
        backend.post_processor = processors.Sequence([*former, ending])
    return tokenizer


def yes_no_chat_template(template: RerankerTemplate, control_tokens: Sequence[str]) -> str:
    """Qwen3-Reranker's chat form for the roles system (another instruction), query and document.

    The name of a control token inside query or document is broken up by a space: untrusted text must not end its own
    message (skilltrain reads such names as plain text, without it).
    """
    values = {
        "CONTROL_TOKENS": [*control_tokens],
        "INSTRUCTION": template.instruction,
        "PREFIX": QWEN3_RERANKER_PREFIX,
        "SUFFIX": QWEN3_RERANKER_SUFFIX,
        "SEPARATOR": template.separator,
        "QUERY_CHARS": template.query_chars or 10**9,  # null: all of it
    }
    lines = [
        f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}"
        for name, value in values.items()
    ]
    return "\n".join([*lines, _CHAT_TEMPLATE.read_text(encoding="utf-8")]).strip() + "\n"
