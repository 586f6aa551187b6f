"""From token vectors to a text's one vector, or to MaxSim; and what sentence-transformers' files say of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict, Field
from torch import Tensor

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import path_inside, read_json
from skilltrain.models.loading import num_positions, read_map

Pooling = Literal["mean", "last_token", "cls"]
_ENDLESS = 10**9  # transformers writes 1e30 for "no limit"
_COMPUTED = ("Transformer", "Pooling", "Normalize")
_POOLING: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
_OF_SKILLS = ("document", "passage", "corpus")
_FLAG = "pooling_mode_"  # sentence-transformers before version 6: one switch for each mode


def pool(
    hidden: Float[Tensor, "text token dim"], mask: Int[Tensor, "text token"], how: Pooling
) -> Float[Tensor, "text dim"]:
    """One vector per text; `mask` is 1 on its tokens, which stand on the left (the last is found by length alone)."""
    if how == "cls":
        return hidden[:, 0]
    if how == "last_token":
        return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    weights = mask[:, :, None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def at_least_float32(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Half-precision values widened to float32, for what is summed or compared afterwards; others as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def max_sim(
    queries: Sequence[Float[Tensor, "_ dim"]], skills: Sequence[Float[Tensor, "_ dim"]]
) -> Float[Tensor, "query skill"]:
    """The mean over a query's tokens of the largest cosine with a skill's, all unit vectors (ColBERT, eq. 3: sum).

    One skill at a time, for `max` keeps for its gradient only where the largest cosines were, not all of them.
    """
    tokens = torch.cat([skills[0][:0], *queries])  # a rank may have no query
    with torch.autocast(tokens.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
        best = torch.stack([(tokens @ skill.T).max(1).values for skill in skills], 1)
    return (
        torch.stack([part.mean(0) for part in best.split([*map(len, queries)])])
        if queries
        else best
    )


class _Foreign(Config):
    """Settings of another program, of which some are read."""

    model_config = ConfigDict(extra="ignore")


class _Module(_Foreign):
    type: str
    path: str


class _Files(_Foreign):
    modules: list[_Module] = Field(default=[])
    prompts: dict[str, str | None] = Field(default={})
    max_seq_length: int | None = Field(default=None, ge=8)
    document_length: int | None = Field(default=None, ge=8)
    query_length: int | None = Field(default=None, ge=8)


def foreign_settings(
    folder: Path, model_config: Any, pooling: Pooling | None, least_query_tokens: int
) -> tuple[dict[str, Any], tuple[str, str]]:
    """(`pooling` if not given, `max_tokens`, `query_max_tokens`; prompts of query and skill), as a folder's files say.

    Raises SkilltrainError for modules, a pooling or prompts that an encoder here does not compute: other vectors than
    the model's would be wrong without a word.
    """
    if not (folder / "modules.json").is_file():
        return {}, ("", "")
    files = read_map(folder / "config_sentence_transformers.json") | {
        "modules": read_json(folder / "modules.json")
    }
    found = validate(_Files, files, folder)
    places: dict[str, Path] = {}
    for module in found.modules:
        package, kind = module.type.split(".")[0], module.type.split(".")[-1]
        if package != "sentence_transformers" or kind not in _COMPUTED:
            what = (
                f"its modules.json asks for {module.type}, which an encoder here does not compute"
            )
            raise SkilltrainError(
                what, where=folder, fix=f"choose a model of {', '.join(_COMPUTED)} alone"
            )
        places[kind] = path_inside(folder, module.path, folder / "modules.json")
    settings: dict[str, Any] = {}
    # encode_document is documented so, though release 6.2 overlooks the last two names unless they are in the call.
    prompts = {name: text for name, text in found.prompts.items() if text is not None}
    used = (
        prompts.get("query", ""),
        next((prompts[name] for name in _OF_SKILLS if name in prompts), ""),
    )
    if "Pooling" in places:
        config = read_map(places["Pooling"] / "config.json")
        settings["pooling"] = pooling or _pooling(folder, places["Pooling"], config)
        if any(used) and config.get("include_prompt") is False:
            what = "its pooling leaves the prompt out (include_prompt: false), which an encoder here does not compute"
            raise SkilltrainError(what, where=folder, fix="choose another model")
    limits = _token_limits(
        folder, places.get("Transformer", folder), model_config, least_query_tokens
    )
    return settings | limits, used


def _pooling(folder: Path, place: Path, config: dict[str, Any]) -> Pooling:
    if not config:
        what = f"it has no {place.name}/config.json, which its modules.json names"
        raise SkilltrainError(what, where=folder, fix="give pooling")
    switched = [
        flag.removeprefix(_FLAG)
        for flag, is_on in config.items()
        if flag.startswith(_FLAG) and is_on
    ]
    modes = (
        config.get("pooling_mode")
        or [mode.removesuffix("s").removesuffix("_token") for mode in switched]
        or "mean"
    )
    modes = [modes] if isinstance(modes, str) else [*modes]
    if len(modes) > 1 or modes[0] not in _POOLING:
        what = (
            f"its pooling is {' + '.join(map(str, modes))}, which an encoder here does not compute"
        )
        raise SkilltrainError(
            what, where=folder, fix=f"give pooling: {', '.join(_POOLING.values())}"
        )
    return _POOLING[modes[0]]


def _token_limits(
    folder: Path, place: Path, model_config: Any, least_query_tokens: int
) -> dict[str, int]:
    """The limits of sentence-transformers, else the tokenizer's, within the positions; of queries `least_query_tokens`:
    they are cut by characters first, and their ends hold what is asked.
    """
    names = ("sentence_bert_config.json", f"sentence_{model_config.model_type}_config.json")
    given = validate(
        _Files, next(filter(None, (read_map(place / name) for name in names)), {}), folder
    )
    own = read_map(place / "tokenizer_config.json").get("model_max_length")
    own = own if isinstance(own, int) and own < _ENDLESS else None
    most = _least(
        own if given.max_seq_length is None else given.max_seq_length, num_positions(model_config)
    )
    query_most = most if most is None or given.query_length else max(most, least_query_tokens)
    limits = _least(given.document_length, most), _least(given.query_length, query_most)
    named = zip(("max_tokens", "query_max_tokens"), limits, strict=True)
    return {name: limit for name, limit in named if limit is not None}


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
