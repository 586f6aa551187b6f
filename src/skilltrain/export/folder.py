"""A model folder, written whole or not at all: weights, tokenizer, our settings, and what sentence-transformers reads.

The JSON files of sentence-transformers are written here rather than by its `save_pretrained`: that would load the
model from disk a second time (16 GB for 8B weights) only to write five small files.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skilltrain import __version__
from skilltrain.errors import SkilltrainError
from skilltrain.export.shareable import shareable
from skilltrain.files import inside, read_json
from skilltrain.models.loading import CHECKPOINT_FILE

ST_VERSION = "6.2.0"  # the release of sentence-transformers whose folders these are; older ones warn
TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
_TRANSFORMER_FILE, _MODULES_FILE = "sentence_bert_config.json", "modules.json"
_MODEL_FILE, _CARD_FILE = "config_sentence_transformers.json", "README.md"


@dataclass(frozen=True)
class Module:
    """One module of a sentence-transformers model: its class, its folder ("" for the first), and its settings."""

    class_path: str
    folder: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """What skilltrain.json keeps: the kind of model, its settings, what it was trained from."""

    kind: Literal["encoder", "reranker"]
    settings: Mapping[str, Any]
    base: str


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
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


def write_weights(network: Any, aside: Path, folder: Path) -> None:
    """Write config.json and the safetensors. Raises SkilltrainError for an adapter that is not merged, and for a
    weight that is no number.
    """
    weights = network.state_dict()
    if adapted := [name for name in weights if "lora_" in name or "base_layer" in name]:
        raise SkilltrainError(f"the adapter is not merged: {adapted[0]}", where=folder)
    if bad := [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise SkilltrainError(f"the weight {bad[0]} holds values that are no numbers", where=folder)
    network.save_pretrained(str(aside), safe_serialization=True)


def write_modules(aside: Path, modules: Sequence[Module], model: Mapping[str, Any]) -> None:
    """Write what makes the folder a sentence-transformers model: its modules, and `model`'s prompts and the like."""
    listing = [
        {"idx": number, "name": str(number), "path": module.folder, "type": module.class_path}
        for number, module in enumerate(modules)
    ]
    _write_json(aside / _MODULES_FILE, listing)
    _write_json(aside / _MODEL_FILE, {"__version__": {"sentence_transformers": ST_VERSION}, **model})
    for module in modules:
        (aside / module.folder).mkdir(exist_ok=True)
        file = _TRANSFORMER_FILE if module.class_path == TRANSFORMER else "config.json"
        if module.settings:
            _write_json(aside / module.folder / file, module.settings)


def write_record(aside: Path, record: Record, card: str | None) -> None:
    """Write the model card where there is one, and skilltrain.json, which also lists the model's files."""
    if card is not None:
        (aside / _CARD_FILE).write_text(card, encoding="utf-8")
    files = [path.relative_to(aside).as_posix() for path in aside.rglob("*") if path.is_file()]
    content = {
        "kind": record.kind,
        "settings": record.settings,
        "base": shareable(record.base),
        "skilltrain": __version__,
        "files": sorted([*files, CHECKPOINT_FILE]),
    }
    _write_json(aside / CHECKPOINT_FILE, content)


def copy_model(source: Path, target: Path) -> None:
    """Copy the files of a model, and no others that lie beside them. Raises SkilltrainError where one is missing."""
    record = source / CHECKPOINT_FILE
    files = [inside(source, str(name), record) for name in read_json(record)["files"]]
    for file in files:
        if not file.is_file():
            raise SkilltrainError("a file of the model is missing", where=file)
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
