"""Writes model folders that skilltrain, sentence-transformers and peft can read.

A folder is complete, or it is no model folder.
"""

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
from skilltrain.models.loading import CHECKPOINT_FILE, heads, read_json_object
from skilltrain.models.modules import IDENTITY, write_modules
from skilltrain.models.reranker import Reranker
from skilltrain.models.tokens import TextTokenizer, as_special
from skilltrain.templates import QWEN3_RERANKER_PREFIX, QWEN3_RERANKER_SUFFIX, RerankerTemplate
from skilltrain.version import __version__

_CHAT_TEMPLATE = Path(__file__).parent / "templates" / "yes_no_chat.j2"


def save_model(model: Encoder | Reranker, folder: Path, base: str, card: str | None = None) -> None:
    """Save a model so that sentence-transformers computes the same vectors or scores.

    `SentenceTransformer(folder)` opens an encoder, `CrossEncoder(folder)` a reranker.

    Args:
        model: The model. An adapter must be merged first.
        folder: Where to save it. The folder may hold other files, such as checkpoints.
        base: Source of the model that was trained, for skilltrain.json.
        card: Text of README.md, if it should be written.

    Raises:
        SkilltrainError: A weight is not finite, an adapter is not merged, or the folder cannot be
            written.
    """
    with _staging_folder(folder, model, base) as staging:
        write_weights(model.network, staging, folder)
        tokenizer = _standalone_tokenizer(model)
        tokenizer.model_max_length = model.settings.max_tokens
        tokenizer.save_pretrained(str(staging))
        write_modules(model, staging)
        if card is not None:
            write_text(staging / "README.md", card)


def save_adapter(model: Encoder | Reranker, folder: Path, base: str) -> None:
    """Save only the adapter of a model, in the format of peft.

    `PeftModel.from_pretrained(network, folder)` adds it to the network of `base`.

    Args:
        model: A model with an adapter.
        folder: Where to save it.
        base: Source of the model without the adapter.
    """
    config, weights = adapter_files(model.network, shareable(base))
    with _staging_folder(folder, model, base) as staging:
        config.save_pretrained(staging)
        save_file(weights, staging / "adapter_model.safetensors", metadata={"format": "pt"})


def listed_files(folder: Path) -> list[str]:
    """Return the names of a model's files, which its skilltrain.json lists.

    Raises:
        SkilltrainError: skilltrain.json lists no files.
    """
    record = folder / CHECKPOINT_FILE
    names = read_json_object(record).get("files")
    if not isinstance(names, list):
        raise SkilltrainError("not-a-model", "does not list the model's files", where=record)
    return [str(name) for name in names]


def copy_model(source: Path, target: Path) -> None:
    """Copy the files of a model that its skilltrain.json lists, and no others.

    Raises:
        SkilltrainError: A file is missing, or `target` cannot be written.
    """
    record = source / CHECKPOINT_FILE
    # Check all names first, so that a path outside the folder is refused before anything is copied.
    files = [path_inside(source, name, record) for name in listed_files(source)]
    for file in files:
        if not file.is_file():
            raise SkilltrainError("incomplete-model", "a file of the model is missing", where=file)
        destination = target / file.relative_to(source)
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, destination)
        except OSError as error:
            fault = f"cannot save the model: {reason_of(error)}"
            raise SkilltrainError("cannot-write", fault, where=target) from error


@contextmanager
def _staging_folder(folder: Path, model: Encoder | Reranker, base: str) -> Iterator[Path]:
    """Yield a temporary folder for the files of a model, and move them to `folder` at the end.

    The caller writes weights, settings and tokenizer to the temporary folder.

    skilltrain.json lists all files of the model, so this function writes it after them. After an
    error, `folder` never holds a part of a model that another program would open.

    Args:
        folder: Folder of the model. It may also hold the checkpoints of a run.
        model: The model that the caller saves. skilltrain.json holds its settings.
        base: Folder or Hub id of the model that training started from.

    Yields:
        The temporary folder, empty.

    Raises:
        SkilltrainError: A file cannot be written.
    """
    # An interrupted run may have left this folder behind. Start with an empty folder.
    staging = folder / ".model.partial"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging

        # Write skilltrain.json, now that the other files are there.
        kind = "encoder" if isinstance(model, Encoder) else "reranker"
        settings = model.settings.model_dump(mode="json")
        write_record(staging, {"kind": kind, "settings": settings, "base": shareable(base)})

        # No program takes a folder without config.json for a model. So delete the old config.json
        # first, and move the new file last: `sorted` puts True after False.
        (folder / "config.json").unlink(missing_ok=True)
        for path in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
            # `replace` overwrites a file, but not a folder with files.
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            path.replace(folder / path.name)
    except (OSError, SafetensorError) as error:  # a full disk can cause either
        raise SkilltrainError(
            "cannot-write", f"cannot save the model: {reason_of(error)}", where=folder
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_weights(network: Any, staging: Path, folder: Path) -> None:
    """Check the weights, and write config.json and the safetensors files to `staging`.

    Args:
        network: The network of an encoder or a reranker.
        staging: Where to write the files.
        folder: Final folder of the model, for errors.

    Raises:
        SkilltrainError: An adapter is not merged, or a weight is not finite.
    """
    for name, value in network.state_dict().items():
        if "lora_" in name or "base_layer" in name:
            raise SkilltrainError(
                "unmerged-adapter", f"the adapter is not merged: {name}", where=folder
            )
        if value.is_floating_point() and not value.isfinite().all():
            fault = f"the weight {name} holds values that are no numbers"
            raise SkilltrainError("not-a-number", fault, where=folder)
    network.save_pretrained(str(staging), safe_serialization=True)

    # Adapt config.json to other programs.
    config = read_json(staging / "config.json")
    if config.get("pad_token_id") is None:
        config.pop("pad_token_id", None)  # TEI accepts a missing key, but not null
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta:
        config["rope_theta"] = theta  # transformers 4 reads this key, and else uses 10,000
    is_classifier = len(heads(network)) > 0
    if is_classifier:
        # Without this key, vLLM and sentence-transformers 5 apply a sigmoid to the score.
        config["sentence_transformers"] = {"activation_fn": IDENTITY}
    write_json(staging / "config.json", config)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write skilltrain.json, which holds `record` and the names of all files in the folder.

    This makes all files readable by everyone.

    Args:
        folder: Folder of the model.
        record: Kind, settings and base of the model, for example.
    """
    names = {CHECKPOINT_FILE}
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors lets only the owner read its file
            names.add(path.relative_to(folder).as_posix())
    facts = {"format": MODEL.number, "skilltrain": __version__, "files": sorted(names)}
    write_json(folder / CHECKPOINT_FILE, {**record, **facts})


def _standalone_tokenizer(model: Encoder | Reranker) -> Any:
    """Return a copy of the tokenizer that handles untrusted texts safely without skilltrain's code.

    The name of a control token in a text, such as `<|im_end|>`, does not become the control token.
    Inside skilltrain, `TextTokenizer` ensures this. Other programs use the copy.
    """
    tokenizer = copy.deepcopy(model.tokenizer)
    control_tokens = _control_tokens(tokenizer)

    # The prompt of a yes_no reranker needs control tokens. So its chat template changes their names
    # in the texts of a pair.
    if isinstance(model, Reranker) and model.settings.template.form == "yes_no":
        names = [token.content for token in control_tokens]
        tokenizer.chat_template = yes_no_chat_template(model.settings.template, names)
        return tokenizer

    # The prompts of other models need no control tokens. `split_special_tokens` makes the tokenizer
    # read the names of special tokens as plain letters, so mark all control tokens as special.
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens([as_special(token) for token in control_tokens])
    tokenizer.split_special_tokens = True
    tokenizer.init_kwargs["split_special_tokens"] = True
    if isinstance(model, Encoder) and model.settings.pooling == "last_token":
        # The vector of such an encoder is the hidden state of a pad token at the end of the text.
        _append_pad_token(tokenizer)
    return tokenizer


def _control_tokens(tokenizer: Any) -> list[Any]:
    """Return the added tokens that `TextTokenizer` reads as plain letters, sorted by name."""
    added_tokens = tokenizer.added_tokens_decoder  # by token id
    ids_by_token = TextTokenizer(tokenizer).ids([token.content for token in added_tokens.values()])
    # The name of such a token is split, so the token itself is not among the ids of its name.
    control_tokens = []
    for (token_id, token), text_ids in zip(added_tokens.items(), ids_by_token, strict=True):
        if token_id not in text_ids:
            control_tokens.append(token)
    return sorted(control_tokens, key=lambda token: token.content)


def _append_pad_token(tokenizer: Any) -> None:
    """Let the tokenizer append its pad token to every text, as `Encoder.tokenize` does.

    The tokenizer of Qwen3-Embedding does so already, that of the base model Qwen3 does not.
    """
    if tokenizer("a")["input_ids"][-1] == tokenizer.pad_token_id:
        return

    pad = tokenizer.pad_token
    append_pad = processors.TemplateProcessing(
        single=f"$A {pad}",  # $A and $B stand for the texts
        pair=f"$A $B {pad}",
        special_tokens=[(pad, tokenizer.pad_token_id)],
    )
    # Run it after the step that the tokenizer already has, if any.
    backend = tokenizer.backend_tokenizer
    steps = [backend.post_processor] if backend.post_processor else []
    backend.post_processor = processors.Sequence([*steps, append_pad])


def yes_no_chat_template(template: RerankerTemplate, control_tokens: Sequence[str]) -> str:
    """Return a chat template that formats a query and a skill as Qwen3-Reranker expects them.

    A chat has one message with the role `query` and one with the role `document`. A message with
    the role `system` replaces the instruction. Only other programs use the chat template.

    If a text has the name of a control token, such as `<|im_end|>`, the chat template inserts a
    space into the name. Otherwise the text could end its own message.

    Args:
        template: Template of the reranker.
        control_tokens: Names of the control tokens.
    """
    variables = {
        "CONTROL_TOKENS": [*control_tokens],
        "INSTRUCTION": template.instruction,
        "PREFIX": QWEN3_RERANKER_PREFIX,
        "SUFFIX": QWEN3_RERANKER_SUFFIX,
        "SEPARATOR": template.separator,
        "SKILL_PROMPT": template.skill_prompt(),
        "QUERY_CHARS": template.query_chars or 10**9,  # without a limit, the whole query
    }
    # The variables are set above the text of the chat template, as in {%- set SUFFIX = "..." -%}.
    lines = [
        f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}"
        for name, value in variables.items()
    ]
    lines.append(_CHAT_TEMPLATE.read_text(encoding="utf-8"))
    return "\n".join(lines).strip() + "\n"
