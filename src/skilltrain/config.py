"""Strict settings: the base class of all sections, and the reading of recipes."""

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
"""Seed of random generators."""
_MAX_NODES = 100_000  # nodes of a YAML text, with its aliases expanded

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
    "requests_per_minute": "lower concurrency; requests that a server refuses as too many are "
    "repeated",
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
"""Advice by name of a removed setting, choice, stage or command. Errors about such a name quote it.

A name is written as in a recipe (`cosine_pair`). If something else still has the name, the key is
`section.setting` or `stage.setting`. Advice completes the sentence "removed: ...".
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
    """YAML loader that refuses repeated keys and endless aliases, and reads dates as text.

    PyYAML's own loader silently keeps the last of equal keys.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _count_nodes(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # PyYAML raises an error below
            if key in keys:
                line = key_node.start_mark.line + 1
                raise SkilltrainError(
                    "repeated-key", f"key '{key}' appears twice (again on line {line})"
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _count_nodes(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """Return the number of nodes in `node`, with all aliases expanded.

    Args:
        node: Root of the tree.
        sizes: Number of nodes by node counted so far; is filled.

    Raises:
        SkilltrainError: There are more than _MAX_NODES.
    """
    if node not in sizes:
        # An alias to a node that contains it would count without end.
        sizes[node] = _MAX_NODES
        children: list[yaml.Node] = []
        if isinstance(node, yaml.CollectionNode):
            for item in node.value:  # a node, or a (key, value) pair of nodes
                children += item if isinstance(item, tuple) else (item,)
        sizes[node] = 1 + sum(_count_nodes(child, sizes) for child in children)
    if sizes[node] > _MAX_NODES:
        line = node.start_mark.line + 1
        raise SkilltrainError(
            "not-yaml", f"too large, or an alias stands inside its own anchor (line {line})"
        )
    return sizes[node]


def parse_yaml(text: str, where: object, fix: str = "") -> Any:
    """Parse a YAML text.

    Args:
        text: The text.
        where: Name of the text in errors.
        fix: Advice for a syntax error.

    Raises:
        SkilltrainError: There is a syntax error, a repeated key or an endless alias.
    """
    try:
        return yaml.load(text, _RecipeLoader)
    except SkilltrainError as error:
        raise SkilltrainError(error.code, error.problem, where=where) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: PyYAML does not catch errors of its constructors.
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = f"is not YAML: {getattr(error, 'problem', error)}"
        raise SkilltrainError("not-yaml", problem, where=f"{where}{line}", fix=fix) from error


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe file as nested maps, and apply overrides.

    The key `recipe` (the line that makes a YAML file valid Python) is dropped.

    Args:
        path: Recipe file. With `based_on: FILE` it only holds what differs from that recipe. The
            path of the base is relative to the recipe, and a base has no base of its own.
        overrides: Settings of the form `key=value`.
    """
    values = _read_recipe(path)
    name = values.pop("based_on", None)
    if name is not None:
        base = _read_recipe(path.parent / str(name))
        if "based_on" in base:
            raise SkilltrainError(
                "invalid-recipe",
                f"is based on a recipe that is based on another, {name}",
                where=path,
            )
        values = _merge(base, values)
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


def _merge(base: Any, changes: Any) -> Any:
    """Merge two maps and the maps in them. Any other value of `changes` replaces that of `base`."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {key: _merge(base.get(key), value) for key, value in changes.items()}


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `values` with each override `section.key=value` set.

    The value is parsed as YAML. A value that starts with `*` stays text, so that it can be a file
    pattern. No value means null.
    """
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
        value = None
        if text.startswith("*"):
            value = text
        elif text:
            value = parse_yaml(text, override, fix)
        set_value(result, key, value, override)
    return result


def set_value(values: dict[str, Any], key: str, value: Any, where: object) -> None:
    """Set a key such as `section.key` or `list.0` in place, and create missing sections."""
    *parents, last = key.split(".")
    node: Any = values
    for part in parents:
        if isinstance(node, dict):
            node = node.setdefault(part, {})
        else:
            node = node[_position(node, part, where)]
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


# pydantic's type of a fault → the code of our error
_CODES = {
    "extra_forbidden": "unknown-setting",
    "missing": "missing-setting",
    "union_tag_not_found": "missing-setting",
    "literal_error": "unknown-choice",
    "union_tag_invalid": "unknown-choice",
}


def validate(config_class: type[ConfigT], values: Mapping[str, Any], where: object) -> ConfigT:
    """Validate settings.

    Raises:
        SkilltrainError: A setting is wrong. The error describes the first fault (unknown keys come
            first) with its key and the allowed choices.
    """
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
        more = f"; {len(faults) - 1} more" if len(faults) > 1 else ""
        problem = _describe(config_class, first, values) + more
        code = _CODES.get(first["type"], "invalid-setting")
        raise SkilltrainError(code, problem, where=where) from error


def _describe(config_class: type[BaseModel], fault: Any, values: Mapping[str, Any]) -> str:
    """Describe a fault that pydantic found in `values`, in one sentence with its key."""
    path, sections = _follow(config_class, fault["loc"], values)
    key = ".".join(path)
    keys = sorted(set[str]().union(*(section.model_fields for section in sections)))
    kind = fault["type"]
    if kind == "extra_forbidden":
        # A removed setting is listed by its name, by `section.name` or by `stage.key`.
        names = (path[-1], ".".join(path[-2:]), f"{values.get('stage')}.{key}")
        advice = next(filter(None, map(removed_advice, names)), "")
        allowed = f"{_nearest(path[-1], keys)} allowed here: {', '.join(keys)}"
        return f"unknown key '{key}'{advice or allowed}"
    if kind == "missing":
        return f"missing key '{'.'.join([*path, str(fault['loc'][-1])])}'"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _describe_tag(path, sections, fault)

    subject = f"{key}: " if key else ""
    value = _short(fault["input"])
    if kind in ("model_type", "model_attributes_type"):
        return f"{subject}must be a section of keys ({', '.join(keys)}), found {value}"
    message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if kind == "value_error":
        value = ""  # the messages of our own validators name the value
    else:
        value = f", found {value}"
    if kind == "path_type":
        message = "must be a path"
        if isinstance(fault["input"], int | float):
            value += " (write it in quotes)"
    elif kind == "too_short":
        message = f"must hold at least {fault['ctx']['min_length']}"
    elif kind == "literal_error":
        value += removed_advice(fault["input"])
    return f"{subject}{message[:1].lower()}{message[1:]}{value}"


def _describe_tag(path: Sequence[str], sections: Sequence[type[BaseModel]], fault: Any) -> str:
    """Describe a missing or unknown tag, the setting that chooses between kinds of a section."""
    tag = fault["ctx"]["discriminator"].strip("'")
    key = ".".join([*path, tag])
    choices = sorted({tags[tag] for tags in map(tags_of, sections) if tag in tags})
    if fault["type"] == "union_tag_not_found":
        return f"missing key '{key}': choose from {', '.join(choices)}"
    value = str(fault["ctx"]["tag"])
    advice = removed_advice(value)
    if not advice:
        advice = f"{_nearest(value, choices)} choose from {', '.join(choices)}"
    return f"{key}: unknown choice '{value}'{advice}"


def _follow(
    config_class: type[BaseModel], location: Sequence[Any], values: Any
) -> tuple[list[str], list[type[BaseModel]]]:
    """Follow pydantic's location of a fault through the settings.

    Returns:
        The keys that lead to the fault, and the classes that its section may have.
    """
    path: list[str] = []
    sections: list[type[BaseModel]] = [config_class]
    tag = ""  # a location also holds the tag that chose a member of a union
    for part in location:
        is_tag = tag == part
        tag = ""
        if is_tag:
            continue
        is_item = isinstance(values, Sequence) and isinstance(part, int)
        if not is_item and not (isinstance(values, Mapping) and part in values):
            continue  # the key is missing
        path.append(str(part))
        values = values[part]
        inner: list[type[BaseModel]] = []
        for section in sections:
            if part in section.model_fields:
                inner += sections_of(section.model_fields[part])
        sections = inner or sections
        if len(sections) > 1 and isinstance(values, Mapping):
            imported = _imported_sections(values)
            if imported:
                sections = imported
            else:
                sections = [c for c in sections if _has_tags(c, values)] or sections
            tag = next(iter(tags_of(sections[0]).values()), "")
    return path, sections


def _has_tags(section: type[BaseModel], values: Mapping[str, Any]) -> bool:
    return all(values.get(name) == tag for name, tag in tags_of(section).items())


def _imported_sections(values: Mapping[str, Any]) -> list[type[BaseModel]]:
    """Return the class that a section names by import path, `package.module:Class`, if any."""
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
    """Return the settings classes that a field may hold, also as items of lists and maps."""
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
    """Return the settings that allow one value only, with this value: they choose the section."""
    literals = {
        name: typing.get_args(field.annotation)
        for name, field in section.model_fields.items()
        if typing.get_origin(field.annotation) is typing.Literal
    }
    return {name: str(values[0]) for name, values in literals.items() if len(values) == 1}


def _short(value: Any) -> str:
    return shorten("null" if value is None else repr(value), 60, "...")


def to_yaml(config: BaseModel) -> str:
    """Return the resolved settings as YAML, with all defaults, so that it can repeat the run."""
    values = config.model_dump(mode="json")
    # PyYAML loses the line breaks of Unicode unless it escapes all characters beyond ASCII.
    has_breaks = any(escape in repr(values) for escape in (r"\x85", r"\u2028", r"\u2029"))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=not has_breaks)


class InputMark:
    """Marks a setting as an input, whose fingerprint is written beside the output."""


InputPath = typing.Annotated[Path, InputMark()]


def _as_list(value: Any) -> Any:
    """Return a single path as a tuple of one."""
    return value if isinstance(value, list | tuple) else (value,)


InputPaths = typing.Annotated[tuple[InputPath, ...], BeforeValidator(_as_list)]
"""A path, or a list of them."""
ModelSource = typing.Annotated[str, InputMark()]
"""Folder, Hub id or package of a model. Only a folder gets a fingerprint: the names of the others
identify their content."""
