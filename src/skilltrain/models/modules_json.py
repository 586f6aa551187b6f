"""What a model in sentence-transformers' form says of its vectors: modules.json and the files it names."""

from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.files import inside, read_json
from skilltrain.models.loading import num_positions
from skilltrain.models.pooling import Pooling

_MIN_TOKENS, _ENDLESS = 8, 10**9
_COMPUTED = ("Transformer", "Pooling", "Normalize")
_POOLING: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
_FLAGS = {  # sentence-transformers before version 6: one switch for each mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def module_settings(folder: Path, model_config: Any, pooling_is_given: bool, least_query_tokens: int) -> dict[str, Any]:
    """`pooling`, `max_tokens` and `query_max_tokens` as the model's files say; empty for one without modules.json.

    Raises SkilltrainError for modules that an encoder here does not compute, and, unless `pooling_is_given`, for such
    a pooling: other vectors than the model's would be wrong without a word.
    """
    if not (folder / "modules.json").is_file():
        return {}
    places = _places(folder)
    settings: dict[str, Any] = {}
    if "Pooling" in places and not pooling_is_given:
        settings["pooling"] = _pooling(folder, places["Pooling"])
    return settings | _limits(folder, places.get("Transformer", folder), model_config, least_query_tokens)


def _places(folder: Path) -> dict[str, Path]:
    """Kind of module → its folder inside the model's."""
    modules = read_json(folder / "modules.json")
    is_list = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    if not is_list or not all({"type", "path"} <= module.keys() for module in modules):
        raise SkilltrainError("its modules.json is no list of modules", where=folder)
    places: dict[str, Path] = {}
    for module in modules:
        name = str(module["type"])
        package, kind = name.split(".")[0], name.split(".")[-1]
        if package != "sentence_transformers" or kind not in _COMPUTED:
            what = f"its modules.json asks for {name}, which an encoder here does not compute"
            raise SkilltrainError(what, where=folder, fix=f"choose a model of {', '.join(_COMPUTED)} alone")
        places[kind] = inside(folder, str(module["path"]), folder / "modules.json")
    return places


def _pooling(folder: Path, place: Path) -> Pooling:
    config = _config(place / "config.json")
    if config is None:
        what = f"it has no {place.name}/config.json, which its modules.json names"
        raise SkilltrainError(what, where=folder, fix="give pooling")
    modes = config.get("pooling_mode") or [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else [*modes]
    if len(modes) > 1 or modes[0] not in _POOLING:
        what = f"its pooling is {' + '.join(map(str, modes))}, which an encoder here does not compute"
        raise SkilltrainError(what, where=folder, fix=f"give pooling: {', '.join(_POOLING.values())}")
    return _POOLING[modes[0]]


def _limits(folder: Path, place: Path, model_config: Any, least_query_tokens: int) -> dict[str, int]:
    """The token limits that sentence-transformers would use, within the model's positions.

    Without any that is the tokenizer's own limit. Of tens of thousands (Qwen3-Embedding's) texts use what they need:
    the template has cut their characters before. One limit for both kinds of text leaves a query `least_query_tokens`:
    queries are cut by characters first, and their ends hold what is asked.
    """
    names = ("sentence_bert_config.json", f"sentence_{model_config.model_type}_config.json")
    config = next(filter(None, (_config(place / name) for name in names)), {})
    most = config.get("max_seq_length")
    if most is None:
        most = (_config(place / "tokenizer_config.json") or {}).get("model_max_length")
        most = most if isinstance(most, int) and most < _ENDLESS else None  # transformers writes 1e30 for "no limit"
    every = _within(folder, most, num_positions(model_config))
    limits = {"max_tokens": every, "query_max_tokens": every and max(every, least_query_tokens)}
    for name, theirs in (("max_tokens", "document_length"), ("query_max_tokens", "query_length")):
        if config.get(theirs) is not None:
            limits[name] = _within(folder, config[theirs], every)
    return {name: limit for name, limit in limits.items() if limit is not None}


def _within(folder: Path, limit: Any, most: int | None) -> int | None:
    if limit is not None and not (isinstance(limit, int) and limit >= _MIN_TOKENS):
        raise SkilltrainError(f"its files give a token limit of {limit}", where=folder, fix="correct it there")
    return min((number for number in (limit, most) if number is not None), default=None)


def _config(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    config = read_json(file)
    if not isinstance(config, dict):
        raise SkilltrainError("is no map of settings", where=file)
    return config
