"""Strict settings: a recipe either means what it says or is refused in one line."""

import copy
import difflib
import sys
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import check_regular
from skilltrain.plugins import OneOf
from skilltrain.texts import shorten

ConfigT = TypeVar("ConfigT", bound="Config")
Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""What every random generator takes."""
_MAX_NODES = 100_000  # of a YAML text, its aliases written out

REMOVED: dict[str, str] = {
    "chain": "write `based_on: chain.yaml`, and the chain's steps under its key `steps`",
    "smollm2": "use kind openai with the base_url of a local server: Ollama, llama.cpp or vLLM",
    "compose.candidates": "leave it out: 10 skills are retrieved for each step",
    "fields": "set body_chars: null, and a chat model sees no body",
    "min_score": "calibrate a router and plan with --router: it finds no skill where none fits",
    "true_count": "leave it out: a model is not told the number of gold steps",
    "llm.mode": "leave it out, for there is no Batch API any more and all requests are live",
    "poll_seconds": "leave it out, for there is no Batch API any more",
    "llm.batch_size": "leave it out, for there is no Batch API any more",
    "--interpolate": "choose a checkpoint with --checkpoint instead",
    "openvino": "use onnx",
    "collect": "run examples/collect_registry.py, then the stage pool on the file that it writes",
    "decontaminate.clusters": "limits.jaccard finds near-duplicates",
    "decontaminate.cosine": "limits.jaccard finds near-duplicates",
    "decontaminate.encoder": "limits.jaccard finds near-duplicates",
    "mine.index": "search is always exact",
    "fusion": "give a fuse ranker weights, such as [1, 0.5]",
    "cosine_pair": "use form pair, with a loss of temperature 1",
    "data.clusters": "training finds near-duplicates by near_duplicates",
    "lambda_rank": "use ranknet",
    "lexical_weight": "fuse the trained encoder with BM25",
    "margin": "use ranknet",
    "analysis.num_attention": "use analysis.more=[{kind: attention, num_queries: NUM}]",
    "analysis.structure": "use analysis.more=[{kind: structure}]",
    "requests_per_minute": "lower concurrency; requests that a server refuses as too many are repeated",
    "rejections": "use skilltrain r3 rejections",
    "rewrite": "use skilltrain r3 rewrite",
    "equivalents": "use skilltrain r3 equivalents",
    "gradients": "use skilltrain r3 gradients",
    "distractors": "use skilltrain skillrouter distractors",
    "provision": "use skilltrain skillflow provision",
    "agents": "use skilltrain skillflow agents",
    "plan": "use skilltrain skillweaver plan",
    "plans": "use skilltrain skillweaver plans",
}
"""Removed settings, choices, stages and commands: name to use instead. An error about such a name quotes the advice.

Keys are names as a user writes them (`cosine_pair`, `lexical_weight`). Where the name is still used elsewhere, a key is
`section.setting` or `stage.setting`. Values complete the sentence "removed: ...".
"""


def removed_advice(name: object) -> str:
    """Return ` (removed: ADVICE)` for a name in `REMOVED`, else an empty string."""
    advice = REMOVED.get(str(name))
    return f" (removed: {advice})" if advice else ""


class Config(BaseModel):
    """Base of every settings class: frozen, numbers are finite, and unknown keys are errors.

    Defaults live here only; code never falls back to a default of its own.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


class _RecipeLoader(yaml.SafeLoader):
    """Refuses equal keys, of which PyYAML silently keeps the last, and aliases without end; a date stays text."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # PyYAML's own error says it well
            if key in seen:
                line = key_node.start_mark.line + 1
                raise SkilltrainError(
                    "repeated-key", f"key '{key}' appears twice (again on line {line})"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _check_size(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """How many nodes are in `node`, each alias counted whole. Raises SkilltrainError for too many."""
    if node not in sizes:
        sizes[node] = _MAX_NODES  # what an alias to a node around it comes to
        values = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (
            part for value in values for part in (value if isinstance(value, tuple) else (value,))
        )
        sizes[node] = 1 + sum(_check_size(part, sizes) for part in parts)
    if sizes[node] > _MAX_NODES:
        line = node.start_mark.line + 1
        raise SkilltrainError(
            "not-yaml", f"too large, or an alias stands inside its own anchor (line {line})"
        )
    return sizes[node]


def parse_yaml(text: str, where: object, fix: str = "") -> Any:
    """The value in a YAML text. Raises SkilltrainError for syntax errors, duplicate keys and endless aliases."""
    try:
        return yaml.load(text, _RecipeLoader)
    except SkilltrainError as error:
        raise SkilltrainError(error.code, error.what, where=where) from error
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # PyYAML lets an impossible date's ValueError out
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        what = f"is not YAML: {getattr(error, 'problem', error)}"
        raise SkilltrainError("not-yaml", what, where=f"{where}{line}", fix=fix) from error


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe file as nested maps, with `key=value` overrides applied.

    The key `recipe` (the line that makes a YAML file valid Python) is dropped. A file with `based_on` says, key by key,
    what differs from that recipe, whose place is relative to its own; one base, not a chain of them.
    """
    values = _read_recipe(path)
    if (name := values.pop("based_on", None)) is not None:
        base = _read_recipe(path.parent / str(name))
        if "based_on" in base:
            raise SkilltrainError(
                "invalid-recipe",
                f"is based on a recipe that is based on another, {name}",
                where=path,
            )
        values = laid_over(base, values)
    return apply_overrides(values, overrides)


def _read_recipe(path: Path) -> dict[str, Any]:
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SkilltrainError(
            "unreadable-file", f"cannot read the recipe: {reason_of(error)}", where=path
        ) from error
    values = parse_yaml(text, path)
    if not isinstance(values, dict):
        raise SkilltrainError("invalid-recipe", "a recipe is a map of keys to values", where=path)
    values.pop("recipe", None)
    return values


def laid_over(under: Any, over: Any) -> Any:
    """`over`, and what only `under` says; where not both are maps, `over`."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return under | {key: laid_over(under.get(key), value) for key, value in over.items()}


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`values` with each `a.b=value` set; the value is read as YAML, a lone word or a pattern (*.jsonl) stays text."""
    result = copy.deepcopy(dict(values))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise SkilltrainError(
                "invalid-override",
                "an override has the form key=value or section.key=value",
                where=override,
            )
        fix = f"write text with special characters in quotes: {key}='\"…\"'"
        value = text if text.startswith("*") else parse_yaml(text, override, fix) if text else None
        set_value(result, key, value, override)
    return result


def set_value(values: dict[str, Any], key: str, value: Any, where: object) -> None:
    """Set what stands at `a.b` in `values`, in place; missing sections are made, items of lists are counted from 0."""
    *parents, last = key.split(".")
    node: Any = values
    for part in parents:
        node = (
            node.setdefault(part, {})
            if isinstance(node, dict)
            else node[_position(node, part, where)]
        )
        if not isinstance(node, dict | list):
            raise SkilltrainError(
                "invalid-override", f"'{part}' is a value, not a section", where=where
            )
    if isinstance(node, dict):
        node[last] = value
    else:
        node[_position(node, last, where)] = value


def _position(items: list[Any], part: str, where: object) -> int:
    if not (part.isdecimal() and int(part) < len(items)):
        raise SkilltrainError(
            "invalid-override",
            f"'{part}' is no item of a list of {len(items)}, counted from 0",
            where=where,
        )
    return int(part)


def validate(config_class: type[ConfigT], values: Mapping[str, Any], where: object) -> ConfigT:
    """`values` as a config. Raises SkilltrainError with the first fault's key path and the allowed choices."""
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
        more = f"; {len(faults) - 1} more" if len(faults) > 1 else ""
        what = _describe(config_class, first, values) + more
        code = "invalid-setting"
        if first["type"] == "extra_forbidden":
            code = "unknown-setting"
        elif first["type"] in ("missing", "union_tag_not_found"):
            code = "missing-setting"
        elif first["type"] in ("literal_error", "union_tag_invalid"):
            code = "unknown-choice"
        raise SkilltrainError(code, what, where=where) from error


def _describe(config_class: type[BaseModel], fault: Any, values: Mapping[str, Any]) -> str:
    path, sections = _followed(config_class, fault["loc"], values)
    key, kind, found = ".".join(path), fault["type"], _short(fault["input"])
    place, keys = (
        f"{key}: " if key else "",
        sorted({name for c in sections for name in c.model_fields}),
    )
    if kind == "extra_forbidden":
        names = path[-1], ".".join(path[-2:]), f"{values.get('stage')}.{key}"
        advice = next(filter(None, map(removed_advice, names)), "")
        allowed = f"{_nearest(path[-1], keys)} allowed here: {', '.join(keys)}"
        return f"unknown key '{key}'{advice or allowed}"
    if kind == "missing":
        return f"missing key '{'.'.join([*path, str(fault['loc'][-1])])}'"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = fault["ctx"]["discriminator"].strip("'")
        key = ".".join([*path, tag])
        choices = sorted({tags_of(c)[tag] for c in sections if tag in tags_of(c)})
        if kind == "union_tag_not_found":
            return f"missing key '{key}': choose from {', '.join(choices)}"
        found = str(fault["ctx"]["tag"])
        if found in REMOVED:
            return f"{key}: unknown choice '{found}'{removed_advice(found)}"
        return f"{key}: unknown choice '{found}'{_nearest(found, choices)} choose from {', '.join(choices)}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{place}must be a section of keys ({', '.join(keys)}), found {found}"
    message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if kind == "path_type":
        message = "must be a path"
        found += " (write it in quotes)" if isinstance(fault["input"], int | float) else ""
    elif kind == "too_short":
        message = f"must hold at least {fault['ctx']['min_length']}"
    found = (
        f", found {found}" if kind != "value_error" else ""
    )  # a validator of ours says itself what it found
    if kind == "literal_error":
        found += removed_advice(fault["input"])
    return f"{place}{message[:1].lower()}{message[1:]}{found}"


def _followed(
    config_class: type[BaseModel], location: Sequence[Any], values: Any
) -> tuple[list[str], list[type[BaseModel]]]:
    """Follow pydantic's location of a fault through the settings.

    Returns:
        The keys that lead to the fault; the classes that the section at its place may have.
    """
    path: list[str] = []
    sections: list[type[BaseModel]] = [config_class]
    tag = ""  # pydantic also names the chosen member of a union by its tag
    for part in location:
        is_tag = tag == part
        tag = ""
        if is_tag:
            continue
        is_item = isinstance(values, Sequence) and isinstance(part, int)
        if not is_item and not (isinstance(values, Mapping) and part in values):
            continue  # a key that is missing
        path.append(str(part))
        values = values[part]
        inner: list[type[BaseModel]] = []
        for section in sections:
            if part in section.model_fields:
                inner += sections_of(section.model_fields[part])
        sections = inner or sections
        if len(sections) > 1 and isinstance(values, Mapping):
            imported = _imported_sections(values)
            sections = imported or [c for c in sections if _has_tags(c, values)] or sections
            tag = next(iter(tags_of(sections[0]).values()), "")
    return path, sections


def _has_tags(section: type[BaseModel], values: Mapping[str, Any]) -> bool:
    return all(values.get(name) == tag for name, tag in tags_of(section).items())


def _imported_sections(values: Mapping[str, Any]) -> list[type[BaseModel]]:
    """Return the plug-in that a section names by its import path, `package.module:Class`."""
    for tag in ("name", "kind"):
        module, _, attribute = str(values.get(tag)).partition(":")
        plugin = getattr(sys.modules.get(module), attribute, None)
        if isinstance(plugin, type) and issubclass(plugin, BaseModel):
            return [plugin]
    return []


def _nearest(word: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=1)
    return f", did you mean '{near[0]}'?" if near else ";"


def sections_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the settings classes that a field may hold; of lists and maps, those of their items."""
    return _sections((field.annotation, *field.metadata))


def _sections(parts: Sequence[Any]) -> list[type[BaseModel]]:
    """Return the settings classes in a type and the metadata that follows it."""
    annotation, *metadata = parts
    for mark in metadata:
        if isinstance(mark, OneOf):
            return mark.classes()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _sections(arguments)
    sections: list[type[BaseModel]] = []
    if origin in (typing.Union, types.UnionType, list, tuple, dict):
        for argument in arguments:
            sections += _sections((argument,))
    return sections


def tags_of(section: type[BaseModel]) -> dict[str, str]:
    """The settings of which a section allows one value: they tell it from others that may stand in its place."""
    literals = {
        name: typing.get_args(field.annotation)
        for name, field in section.model_fields.items()
        if typing.get_origin(field.annotation) is typing.Literal
    }
    return {name: str(values[0]) for name, values in literals.items() if len(values) == 1}


def _short(value: Any) -> str:
    return shorten("null" if value is None else repr(value), 60, "...")


def to_yaml(config: BaseModel) -> str:
    """The resolved settings as YAML, defaults written out, so that a run can be repeated from it alone."""
    values = config.model_dump(mode="json")
    # PyYAML folds Unicode's own line breaks away unless it escapes them.
    readable = not any(mark in repr(values) for mark in (r"\x85", r"\u2028", r"\u2029"))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=readable)


class InputMark:
    """Marks what a stage reads, so that its fingerprint can be kept beside the output."""


InputPath = typing.Annotated[Path, InputMark()]


def _several(value: Any) -> Any:
    """A single path as a list of one."""
    return value if isinstance(value, list | tuple) else (value,)


InputPaths = typing.Annotated[tuple[InputPath, ...], BeforeValidator(_several)]
"""A path, or a list of them."""
ModelSource = typing.Annotated[str, InputMark()]
"""A model's folder, Hub id or package; the last two keep to one content by their names."""
