"""Pools token vectors to one vector per text, and reads the pooling of other programs' models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict, Field
from safetensors import safe_open
from torch import Tensor

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import path_inside, read_json
from skilltrain.models.loading import has_architecture, num_positions, read_json_object
from skilltrain.texts import printable

Pooling = Literal["mean", "last_token", "cls"]
PROJECTED = "sentence_embedding"  # name of the vectors that a module `Dense` reads and writes
DEFAULT_QUERY_TOKENS = 512  # token limit of queries

_NO_LIMIT = 10**9  # transformers writes 1e30 for "no limit"
_SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize", "Dense", "MultiVectorMask")
_POOLING_BY_MODE: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
_MODE_FLAG = "pooling_mode_"  # sentence-transformers before version 6 has one flag per mode
_SKILL_PROMPTS = ("document", "passage", "corpus")  # names of a document's prompt, best first


def pool(
    hidden: Float[Tensor, "text token dim"], mask: Int[Tensor, "text token"], pooling: Pooling
) -> Float[Tensor, "text dim"]:
    """Return one vector per text: the first, the last or the mean vector of its tokens.

    Args:
        hidden: Hidden states of the tokens.
        mask: 1 for the tokens of a text, 0 for padding. Padding is on the right.
        pooling: Mean of all tokens, or the vector of the first (cls) or the last token.
    """
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last_token":
        last_positions = mask.sum(1) - 1  # [text]
        return hidden[torch.arange(len(hidden), device=hidden.device), last_positions]
    # Take the mean of the tokens, without padding.
    weights = mask[:, :, None].to(hidden.dtype)  # [text, token, 1]
    return (hidden * weights).sum(1) / weights.sum(1)


def at_least_float32(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Convert half-precision values to float32, because they are summed or compared next."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def max_sim(
    queries: Sequence[Float[Tensor, "_ dim"]], skills: Sequence[Float[Tensor, "_ dim"]]
) -> Float[Tensor, "query skill"]:
    """Return the late-interaction score of each query and skill (ColBERT, equation 3).

    For each token of the query, take the largest cosine with a token of the skill. The score is the
    mean of these cosines, where ColBERT takes their sum.

    Args:
        queries: Unit vectors of each query's tokens. In distributed training, a process may have no
            query.
        skills: Unit vectors of each skill's tokens.
    """
    empty = skills[0][:0]  # [0, dim], because torch.cat needs a tensor if there is no query
    tokens = torch.cat([empty, *queries])  # [token of any query, dim]
    with torch.autocast(tokens.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
        # One skill at a time, so that only the positions of the maxima are saved for the gradient.
        best_cosines = [(tokens @ skill.T).max(1).values for skill in skills]
        by_token = torch.stack(best_cosines, 1)  # [token of any query, skill]

    if not queries:
        return by_token  # [0, skill]
    by_query = by_token.split([len(query) for query in queries])  # [token, skill] each
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
        folder: Folder of the model.
        model_config: The model's config.json as an object of transformers.
        pooling: Pooling that the user chose, if any. It replaces that of the files.

    Raises:
        SkilltrainError: The model has modules, a pooling or a prompt that skilltrain does not
            compute. Its vectors would be wrong.
    """
    # Every model of sentence-transformers has this file, which lists its modules.
    if not (folder / "modules.json").is_file():
        return ForeignSettings({}, query_prompt="", skill_prompt="")

    content = read_json_object(folder / "config_sentence_transformers.json")
    content["modules"] = read_json(folder / "modules.json")
    config = validate(_SentenceTransformersConfig, content, folder)
    module_folders = _module_folders(config.modules, folder)

    # The documents' prompt may have several names. Take the first that exists, as
    # sentence-transformers documents for `encode_document`. In fact its release 6.2 uses only the
    # first name, unless the caller of that method gives another.
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
        leaves_prompt_out = pooling_config.get("include_prompt") is False
        if leaves_prompt_out and (query_prompt or skill_prompt):
            fault = (
                "its pooling leaves the prompt out (include_prompt: false), which an encoder here "
                "does not compute"
            )
            fix = "choose another model"
            raise SkilltrainError("unsupported-model", fault, where=folder, fix=fix)

    transformer_folder = module_folders.get("Transformer", folder)
    settings |= _token_limits(folder, transformer_folder, model_config)
    return ForeignSettings(settings, query_prompt, skill_prompt)


def _module_folders(modules: Sequence[_Module], folder: Path) -> dict[str, Path]:
    """Return the folder of each module by the name of its class.

    Args:
        modules: Modules that modules.json lists.
        folder: Folder of the model.

    Raises:
        SkilltrainError: skilltrain does not support a module, or its folder is outside `folder`.
    """
    folders = {}
    for module in modules:
        # A type is the full name of a class, such as sentence_transformers.models.Pooling.
        names = module.type.split(".")
        is_known = names[0] in ("sentence_transformers", "pylate")
        if not is_known or names[-1] not in _SUPPORTED_MODULES:
            fault = (
                f"its modules.json asks for {module.type}, which an encoder here does not compute"
            )
            fix = f"choose a model of {', '.join(_SUPPORTED_MODULES)} alone"
            raise SkilltrainError("unsupported-model", fault, where=folder, fix=fix)
        # Of two modules Dense, only the last folder stays. `load_projections` finds them itself.
        folders[names[-1]] = path_inside(folder, module.path, folder / "modules.json")
    return folders


def load_projections(folder: Path, model_config: Any) -> list[Any]:
    """Load the linear layers that an encoder applies to its vectors.

    Args:
        folder: Folder of the model.
        model_config: The model's config.json as an object of transformers.

    Returns:
        Modules `Dense` of sentence-transformers, in their order. Most models have none.

    Raises:
        SkilltrainError: A module cannot be read, or has an activation that is not torch's.
    """
    file = folder / "modules.json"
    modules = read_json(file) if file.is_file() else []
    paths = [module["path"] for module in modules if module["type"].endswith(".Dense")]
    # The checkpoints of ColBERT's authors hold the layer beside the transformer's weights.
    is_colbert = has_architecture(model_config, "HF_ColBERT")
    if not paths and not is_colbert:
        return []

    from sentence_transformers.sentence_transformer.modules import Dense

    folders = [path_inside(folder, path, file) for path in paths]
    for dense_folder in folders:
        # Dense.load would replace an activation of another package by Tanh. It is also its default.
        dense_config = read_json_object(dense_folder / "config.json")
        activation = str(dense_config.get("activation_function", "torch.nn.Tanh"))
        if not activation.startswith("torch."):
            fault = (
                f"a module Dense has the activation {printable(activation, 200)}, which an encoder "
                "here does not compute"
            )
            fix = "choose another model"
            raise SkilltrainError("unsupported-model", fault, where=dense_folder, fix=fix)
    try:
        projections = [Dense.load(str(dense_folder)) for dense_folder in folders]
        if is_colbert:
            with safe_open(folder / "model.safetensors", "pt") as tensors:
                weight = tensors.get_tensor("linear.weight")  # [out, in]
            # The shape of the transposed weight is (in_features, out_features).
            projection = Dense(*weight.T.shape, bias=False, activation_function=None)
            projection.linear.weight.data = weight
            projections.append(projection)
    except Exception as error:  # a damaged file can cause any exception
        fault = f"cannot load a linear layer (Dense): {printable(str(error), 200)}"
        raise SkilltrainError("unreadable-model", fault, where=folder) from error
    for projection in projections:
        # A module Dense reads and writes a dict, under these keys. The file's keys differ between
        # vectors of texts and of tokens. Here, both kinds of vectors have the key PROJECTED.
        projection.module_input_name = projection.module_output_name = PROJECTED
    return projections


def _read_pooling(folder: Path, pooling_folder: Path, config: Mapping[str, Any]) -> Pooling:
    """Return the pooling of a Pooling module of any release of sentence-transformers.

    Args:
        folder: Folder of the model.
        pooling_folder: Folder of the module.
        config: Settings of the module.

    Raises:
        SkilltrainError: There are no settings, or skilltrain does not compute this pooling.
    """
    if not config:
        fault = f"it has no {pooling_folder.name}/config.json, which its modules.json names"
        raise SkilltrainError("incomplete-model", fault, where=folder, fix="give pooling")

    # Newer releases write one mode or a list of modes. Older releases write a flag for each mode.
    modes = config.get("pooling_mode") or _modes_of_flags(config)
    if not isinstance(modes, list):
        modes = [modes]
    modes = [str(mode) for mode in modes]

    # Several modes mean that their vectors are concatenated.
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

    The limit of all texts comes from sentence-transformers' settings, else from the tokenizer. It
    is at most the number of the model's positions.

    The limit of queries is the one in the files, but at most the limit of all texts. If the files
    have none, it is the limit of all texts, but at least our default, because a query often states
    its task at the end. This may exceed the model's positions, so the caller reduces it.

    Args:
        folder: Folder of the model.
        transformer_folder: Folder of the module Transformer.
        model_config: The model's config.json as an object of transformers.

    Returns:
        `max_tokens` and `query_max_tokens`. A setting without a limit is left out.
    """
    # Find the settings of the transformer. Older releases name the file by the type of model.
    content = read_json_object(transformer_folder / "sentence_bert_config.json")
    if not content:
        older_name = f"sentence_{model_config.model_type}_config.json"
        content = read_json_object(transformer_folder / older_name)
    config = validate(_SentenceTransformersConfig, content, folder)

    # Find the limit of all texts.
    limit = config.max_seq_length
    if limit is None:
        tokenizer_config = read_json_object(transformer_folder / "tokenizer_config.json")
        tokenizer_limit = tokenizer_config.get("model_max_length")
        if isinstance(tokenizer_limit, int) and tokenizer_limit < _NO_LIMIT:
            limit = tokenizer_limit
    limit = _smallest(limit, num_positions(model_config))

    # Find the limits of skills and queries.
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
