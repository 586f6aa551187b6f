"""Pools token vectors to one vector per text, and reads the pooling of other programs' models.

Notes:
    - bfloat16 would round cosines to 1/256, so they are computed without autocast.
    - In distributed training, a process may call `max_sim` without queries.
    - `max_sim` takes one skill at a time, so that only the positions of the maxima are saved for
      the gradient.
    - A prompt of documents may have several names. sentence-transformers documents for
      `encode_document` that the first one that exists is used. Its release 6.2 uses only the first
      name, unless the caller gives another.
    - Newer releases of sentence-transformers write one pooling mode or a list of modes, older
      releases a flag for each mode.
    - Without a limit of queries in the files, it is the limit of all texts, but at least our
      default, because a query often states its task at the end. The template has limited its
      characters already. This limit may exceed the model's positions, so the caller reduces it.
    - sentence-transformers' limit of all texts takes precedence over the tokenizer's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict, Field
from torch import Tensor

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import path_inside, read_json
from skilltrain.models.loading import num_positions, read_json_object

Pooling = Literal["mean", "last_token", "cls"]
DEFAULT_QUERY_TOKENS = 512  # token limit of queries

_NO_LIMIT = 10**9  # transformers writes 1e30 for "no limit"
_SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLING_BY_MODE: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
_MODE_FLAG = "pooling_mode_"  # sentence-transformers before version 6 has one flag per mode
_SKILL_PROMPTS = ("document", "passage", "corpus")  # names of a document's prompt, best first


def pool(
    hidden: Float[Tensor, "text token dim"], mask: Int[Tensor, "text token"], pooling: Pooling
) -> Float[Tensor, "text dim"]:
    """Return one vector per text: the first, the last or the mean vector of its tokens.

    Args:
        hidden: Hidden states of the tokens.
        mask: 1 for tokens, 0 for padding on the right.
    """
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last_token":
        last_positions = mask.sum(1) - 1  # [text]
        return hidden[torch.arange(len(hidden), device=hidden.device), last_positions]
    weights = mask[:, :, None].to(hidden.dtype)  # [text, token, 1]
    return (hidden * weights).sum(1) / weights.sum(1)


def at_least_float32(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Convert half-precision values to float32, because they are summed or compared next."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def max_sim(
    queries: Sequence[Float[Tensor, "_ dim"]], skills: Sequence[Float[Tensor, "_ dim"]]
) -> Float[Tensor, "query skill"]:
    """Return the mean over a query's tokens of the best cosine with a skill's token.

    ColBERT (equation 3) takes the sum.

    Args:
        queries: Unit vectors of each query's tokens.
        skills: Unit vectors of each skill's tokens.
    """
    empty = skills[0][:0]  # [0, dim]
    tokens = torch.cat([empty, *queries])  # [query token, dim]
    with torch.autocast(tokens.device.type, enabled=False):
        best_cosines = [(tokens @ skill.T).max(1).values for skill in skills]
        by_token = torch.stack(best_cosines, 1)  # [query token, skill]

    if not queries:
        return by_token  # [0, skill]
    by_query = by_token.split([len(query) for query in queries])
    return torch.stack([cosines.mean(0) for cosines in by_query])


class _ForeignConfig(Config):
    """Settings of another program. skilltrain reads a few, and ignores the others."""

    model_config = ConfigDict(extra="ignore")


class _Module(_ForeignConfig):
    type: str
    path: str


class _SentenceTransformersConfig(_ForeignConfig):
    """Settings of a sentence-transformers model, from all of its files."""

    modules: list[_Module] = Field(default=[])
    prompts: dict[str, str | None] = Field(default={})
    max_seq_length: int | None = Field(default=None, ge=8)
    document_length: int | None = Field(default=None, ge=8)
    query_length: int | None = Field(default=None, ge=8)


class ForeignSettings(NamedTuple):
    """Settings of an encoder from the files of sentence-transformers.

    Attributes:
        settings: Those of `pooling`, `max_tokens` and `query_max_tokens` that the files have.
        query_prompt: Text before every query.
        skill_prompt: Text before every skill.
    """

    settings: dict[str, Any]
    query_prompt: str
    skill_prompt: str


def foreign_settings(folder: Path, model_config: Any, pooling: Pooling | None) -> ForeignSettings:
    """Read the settings of a sentence-transformers model. There are none for other models.

    Args:
        model_config: The model's config.json as an object of transformers.
        pooling: Pooling that the user chose, if any.
    """
    if not (folder / "modules.json").is_file():
        return ForeignSettings({}, "", "")

    content = read_json_object(folder / "config_sentence_transformers.json")
    content["modules"] = read_json(folder / "modules.json")
    config = validate(_SentenceTransformersConfig, content, folder)
    module_folders = _module_folders(config.modules, folder)

    prompts = {name: text for name, text in config.prompts.items() if text is not None}
    query_prompt = prompts.get("query", "")
    skill_prompt = next((prompts[name] for name in _SKILL_PROMPTS if name in prompts), "")

    settings: dict[str, Any] = {}
    if "Pooling" in module_folders:
        pooling_folder = module_folders["Pooling"]
        pooling_config = read_json_object(pooling_folder / "config.json")
        if pooling is None:
            pooling = _read_pooling(folder, pooling_folder, pooling_config)
        settings["pooling"] = pooling
        if query_prompt or skill_prompt:
            _check_prompt_is_pooled(pooling_config, folder)

    transformer_folder = module_folders.get("Transformer", folder)
    settings |= _token_limits(folder, transformer_folder, model_config)
    return ForeignSettings(settings, query_prompt, skill_prompt)


def _check_prompt_is_pooled(pooling_config: Mapping[str, Any], folder: Path) -> None:
    """Check that a Pooling module does not leave out the tokens of the prompt."""
    if pooling_config.get("include_prompt") is False:
        fault = (
            "its pooling leaves the prompt out (include_prompt: false), which an encoder here "
            "does not compute"
        )
        raise SkilltrainError("unsupported-model", fault, where=folder, fix="choose another model")


def _module_folders(modules: Sequence[_Module], folder: Path) -> dict[str, Path]:
    """Return the folder of each module by the name of its class.

    Raises:
        SkilltrainError: skilltrain does not compute a module, or its folder is outside `folder`.
    """
    folders = {}
    for module in modules:
        names = module.type.split(".")
        if names[0] != "sentence_transformers" or names[-1] not in _SUPPORTED_MODULES:
            fault = (
                f"its modules.json asks for {module.type}, which an encoder here does not compute"
            )
            fix = f"choose a model of {', '.join(_SUPPORTED_MODULES)} alone"
            raise SkilltrainError("unsupported-model", fault, where=folder, fix=fix)
        folders[names[-1]] = path_inside(folder, module.path, folder / "modules.json")
    return folders


def _read_pooling(folder: Path, pooling_folder: Path, config: Mapping[str, Any]) -> Pooling:
    """Return the pooling of a Pooling module of any release of sentence-transformers.

    Args:
        folder: Folder of the model.
        pooling_folder: Folder of the module.
        config: Settings of the module.
    """
    if not config:
        fault = f"it has no {pooling_folder.name}/config.json, which its modules.json names"
        raise SkilltrainError("incomplete-model", fault, where=folder, fix="give pooling")

    modes = config.get("pooling_mode") or _modes_of_flags(config)
    if not isinstance(modes, list):
        modes = [modes]
    modes = [str(mode) for mode in modes]
    if len(modes) > 1 or modes[0] not in _POOLING_BY_MODE:
        description = " + ".join(modes)
        fault = f"its pooling is {description}, which an encoder here does not compute"
        fix = f"give pooling: {', '.join(_POOLING_BY_MODE.values())}"
        raise SkilltrainError("unsupported-model", fault, where=folder, fix=fix)
    return _POOLING_BY_MODE[modes[0]]


def _modes_of_flags(config: Mapping[str, Any]) -> list[str]:
    """Return the pooling modes whose flag is set, such as `cls` for `pooling_mode_cls_token`."""
    modes = []
    for flag, is_set in config.items():
        if flag.startswith(_MODE_FLAG) and is_set:
            name = flag.removeprefix(_MODE_FLAG)  # such as cls_token, mean_tokens
            modes.append(name.removesuffix("s").removesuffix("_token"))
    return modes or ["mean"]


def _token_limits(folder: Path, transformer_folder: Path, model_config: Any) -> dict[str, int]:
    """Return the token limits of skills and queries that a model's files state.

    Returns:
        `max_tokens` and `query_max_tokens`. A setting without a limit is left out.
    """
    content = read_json_object(transformer_folder / "sentence_bert_config.json")
    if not content:
        older_name = f"sentence_{model_config.model_type}_config.json"
        content = read_json_object(transformer_folder / older_name)
    config = validate(_SentenceTransformersConfig, content, folder)

    limit = config.max_seq_length
    if limit is None:
        tokenizer_config = read_json_object(transformer_folder / "tokenizer_config.json")
        tokenizer_limit = tokenizer_config.get("model_max_length")
        if isinstance(tokenizer_limit, int) and tokenizer_limit < _NO_LIMIT:
            limit = tokenizer_limit
    limit = _smallest(limit, num_positions(model_config))

    query_limit = _smallest(config.query_length, limit)
    if limit is not None and config.query_length is None:
        query_limit = max(limit, DEFAULT_QUERY_TOKENS)
    limits = {
        "max_tokens": _smallest(config.document_length, limit),
        "query_max_tokens": query_limit,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _smallest(*limits: int | None) -> int | None:
    """Return the smallest limit. None means that there is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)
