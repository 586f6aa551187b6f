"""Strict settings: their base class, and the functions that read recipes and check them.

Notes:
    - PyYAML raises ValueError for values that it cannot convert, and keeps the last of equal keys
      silently.
    - A recipe with the key `recipe` is a Python program as well, so that `accelerate launch` can
      run it. To Python, the settings after this line are the inside of a string.
    - In pydantic's location of a fault, the tag that chose the class of a section follows the key
      of the section. Types of a union without a tag, such as `int`, are in the location too.
"""

import copy
import difflib
import itertools
import re
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

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
# Size of a tree while it is counted. An alias to the tree around it has this size. So the tree is
# larger than the limit.
_SIZE_INSIDE_ITSELF = _MAX_NODES
_MERGE_TAG = "tag:yaml.org,2002:merge"  # of the key `<<`, which may appear twice

REMOVED = {
    "chain": "write `based_on: chain.yaml`, and the chain's steps under its key `steps`",
    "smollm2": "use kind openai with the base_url of a local server: Ollama, llama.cpp or vLLM",
    "compose.candidates": "leave it out: 10 skills are retrieved for each step",
    "fields": "set body_chars: null, and a chat model sees no body",
    "min_score": "calibrate a router and plan with --router: it finds no skill where none fits",
    "true_count": "leave it out: a model is not told the number of gold steps",
    "llm.mode": "leave it out, for there is no Batch API any more and all requests are live",
    "poll_seconds": "leave it out, for there is no Batch API any more",
    "llm.batch_size": "leave it out, for there is no Batch API any more",
    "--schema": "run skilltrain recipes schema STAGE",
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
    """Return ` (removed: ADVICE)` for a name in `REMOVED`, else an empty string.

    Example: "openvino" gives " (removed: use onnx)".
    """
    advice = REMOVED.get(str(name))
    return f" (removed: {advice})" if advice else ""


class Config(BaseModel):
    """Base of every settings class. It is frozen, numbers are finite, and unknown keys are errors.

    Only these classes hold defaults. Other code has no defaults of its own for settings.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    def unused_settings(self) -> frozenset[str]:
        """Return the keys of settings whose inputs this run does not read, such as `systems.2`."""
        return frozenset()


class _RecipeLoader(yaml.SafeLoader):
    """YAML loader that refuses repeated keys and endless aliases, and reads dates as text."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the root of the YAML text. Raises SkilltrainError if there are too many nodes."""
        node = super().get_single_node()
        if node is not None:
            _count_nodes(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the dict of a YAML map. Raises SkilltrainError if a key appears twice.

        PyYAML's own loader keeps the last of equal keys silently.
        """
        keys = set()
        for key_node, _ in node.value:
            # The key `<<` includes another map. It may appear twice.
            if key_node.tag == _MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the base class raises an error for this key
            if key in keys:
                line = key_node.start_mark.line + 1
                raise SkilltrainError(
                    "repeated-key", f"key '{key}' appears twice (again on line {line})"
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


# No setting is a date, so what looks like a date stays text.
_RecipeLoader.add_constructor("tag:yaml.org,2002:timestamp", _RecipeLoader.construct_yaml_str)


def _count_nodes(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """Count the nodes of a YAML tree, its root included, with all aliases expanded.

    Args:
        node: Root of the tree.
        sizes: Number of nodes of each tree that was counted before, by its root. This call adds
            the trees inside `node`, and `node` itself.

    Raises:
        SkilltrainError: There are more than _MAX_NODES, or an alias refers to a node around it.
    """
    if node not in sizes:
        # An alias inside the tree may refer to `node` itself. For such an alias, the recursion
        # returns this provisional size. The tree around the alias is larger by at least 1, so its
        # size exceeds the limit.
        sizes[node] = _SIZE_INSIDE_ITSELF
        children: Iterable[yaml.Node] = ()
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = itertools.chain.from_iterable(node.value)  # of pairs of key and value
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
        # The loader does not know the name of the text, so add the name here.
        raise SkilltrainError(error.code, error.problem, where=where) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML raises ValueError for values that it cannot convert. Only YAMLError has a mark,
        # which is the place of the fault.
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = f"is not YAML: {getattr(error, 'problem', error)}"
        raise SkilltrainError("not-yaml", problem, where=f"{where}{line}", fix=fix) from error


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe file as nested maps, and apply overrides.

    A recipe with the key `based_on: FILE` only holds what differs from the recipe FILE, its base.
    The path FILE is relative to the recipe. A base has no base of its own.

    Args:
        path: Recipe file.
        overrides: Settings of the form `key=value`.
    """
    values = _read_recipe(path)
    base_name = values.pop("based_on", None)
    if base_name is not None:
        base = _read_recipe(path.parent / str(base_name))
        if "based_on" in base:
            raise SkilltrainError(
                "invalid-recipe",
                f"is based on a recipe that is based on another, {base_name}",
                where=path,
            )
        values = _merge(base, values)
    return apply_overrides(values, overrides)


def _read_recipe(path: Path) -> dict[str, Any]:
    """Read the settings in a recipe file.

    The key `recipe` is left out, because it is no setting. A recipe with this key is a Python
    program as well, so that `accelerate launch` can run it.
    """
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SkilltrainError(
            "unreadable-file",
            f"cannot read the recipe: {reason_of(error)}",
            where=path,
            fix="to copy a recipe that ships: skilltrain recipes copy NAME",
        ) from error
    values = parse_yaml(text, path)
    if not isinstance(values, dict):
        raise SkilltrainError("invalid-recipe", "a recipe is a map of keys to values", where=path)
    # To Python, the line of this key opens a string that holds all settings after the line.
    values.pop("recipe", None)
    return values


def _merge(base: Any, changes: Any) -> Any:
    """Merge two maps and the maps in them. Any other value of `changes` replaces that of `base`.

    Example: `{a: {x: 1, y: 2}}` changed by `{a: {y: 3}}` becomes `{a: {x: 1, y: 3}}`.
    """
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {key: _merge(base.get(key), value) for key, value in changes.items()}


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `values` with each override `section.key=value` set.

    The value is parsed as YAML. An empty value means null. A value that starts with `*` stays
    text, because it is a file pattern such as `*.json`. (In YAML, `*` marks an alias.)
    """
    result = copy.deepcopy(dict(values))
    for override in overrides:
        key, equals, text = str(override).partition("=")
        # An empty part of the key, as in `section..key`, is an error.
        if not equals or "" in key.split("."):
            raise SkilltrainError(
                "invalid-override",
                "an override has the form key=value or section.key=value",
                where=override,
            )
        value = None
        if text.startswith("*"):
            value = text
        elif text:
            fix = f"write text with special characters in quotes: {key}='\"…\"'"
            value = parse_yaml(text, override, fix)
        set_value(result, key, value, override)
    return result


def set_value(values: dict[str, Any], key: str, value: Any, where: object) -> None:
    """Set one setting in place, and create missing sections.

    Args:
        values: Settings as nested maps.
        key: Path of the setting, such as `section.key` or `list.0`.
        value: New value.
        where: The override, for errors.
    """
    names = key.split(".")
    last_name = names.pop()

    # Walk down to the section or the list that holds the setting.
    section: Any = values
    for name in names:
        if isinstance(section, dict):
            section.setdefault(name, {})
        section = section[_key_in(section, name, where)]
        if not isinstance(section, dict | list):
            raise SkilltrainError(
                "invalid-override", f"'{name}' is a value, not a section", where=where
            )
    section[_key_in(section, last_name, where)] = value


def _key_in(section: dict[str, Any] | list[Any], name: str, where: object) -> Any:
    """Return a key of a map, or the position that `name` means in a list.

    Example: for a list, the name "0" gives 0. For a map, the name stays as it is.

    Args:
        section: The map or list that a part of a key leads into.
        name: The next part of the key.
        where: The override, for the error.
    """
    if isinstance(section, dict):
        return name
    if not (name.isdecimal() and int(name) < len(section)):
        raise SkilltrainError(
            "invalid-override",
            f"'{name}' is no item of a list of {len(section)}, counted from 0",
            where=where,
        )
    return int(name)


# Code of our error by pydantic's type of a fault.
_CODES = {
    "extra_forbidden": "unknown-setting",
    "missing": "missing-setting",
    "union_tag_not_found": "missing-setting",
    "literal_error": "unknown-choice",
    "union_tag_invalid": "unknown-choice",
}


def validate(config_class: type[ConfigT], values: Mapping[str, Any], where: object) -> ConfigT:
    """Validate settings.

    Args:
        config_class: Class of the settings.
        values: Settings as nested maps.
        where: The recipe or the command, for the error.

    Raises:
        SkilltrainError: A setting is wrong. The error describes one fault with its key, and says
            how many more there are. Unknown keys are described before other faults.
    """
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        unknown_keys = [fault for fault in faults if fault["type"] == "extra_forbidden"]
        first = unknown_keys[0] if unknown_keys else faults[0]
        more = f"; {len(faults) - 1} more" if len(faults) > 1 else ""
        problem = _describe(config_class, first, values) + more
        code = _CODES.get(first["type"], "invalid-setting")
        raise SkilltrainError(code, problem, where=where) from error


def _describe(config_class: type[BaseModel], fault: Any, values: Mapping[str, Any]) -> str:
    """Describe one fault in a sentence that names the key.

    Args:
        config_class: Class of all settings.
        fault: An item of pydantic's `ValidationError.errors()`.
        values: All settings as nested maps.
    """
    # The section with the fault may have several classes if its tag is missing or unknown.
    path, classes = _follow(config_class, fault["loc"], values)
    allowed_keys = itertools.chain.from_iterable(section.model_fields for section in classes)
    keys = sorted(set(allowed_keys))
    kind = fault["type"]
    if kind == "extra_forbidden":
        return _describe_unknown_key(path, keys, values.get("stage"))
    if kind == "missing":
        missing_key = ".".join([*path, str(fault["loc"][-1])])
        return f"missing key '{missing_key}'"
    # A tag is the setting that chooses the class of a section, such as `kind: dense`.
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _describe_tag(path, classes, fault)

    key = ".".join(path)
    subject = f"{key}: " if key else ""
    # A section must be a map, but the recipe has another value there.
    if kind in ("model_type", "model_attributes_type"):
        value = _short(fault["input"])
        return f"{subject}must be a section of keys ({', '.join(keys)}), found {value}"
    return subject + _describe_value(fault)


def _describe_unknown_key(path: Sequence[str], keys: Sequence[str], stage: object) -> str:
    """Describe a key that its section does not have.

    Args:
        path: Keys that lead to the unknown key, which is the last.
        keys: Keys that the section may have.
        stage: Name of the recipe's stage. None: the settings are not those of a stage.
    """
    key = ".".join(path)
    # `REMOVED` names a removed setting as `name`, `section.name` or `stage.key`.
    section_and_name = ".".join(path[-2:])
    for removed_name in (path[-1], section_and_name, f"{stage}.{key}"):
        if removed_name in REMOVED:
            return f"unknown key '{key}'{removed_advice(removed_name)}"
    return f"unknown key '{key}'{suggestion(path[-1], keys)}allowed here: {', '.join(keys)}"


def _describe_value(fault: Any) -> str:
    """Describe a wrong value without its key, such as `must be a path, found 3`.

    Args:
        fault: An item of pydantic's `ValidationError.errors()`. It holds the type of the error,
            pydantic's message, and the wrong value as `input`.
    """
    # Shorten pydantic's message, and add the wrong value. For example, "Input should be a valid
    # integer" becomes "must be a valid integer, found 'ten'".
    kind = fault["type"]
    message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    end = f", found {_short(fault['input'])}"
    if kind == "value_error":
        # Our own validators raised this error, and their messages name the value already.
        end = ""
    elif kind == "path_type":
        message = "must be a path"
        if isinstance(fault["input"], int | float):
            # YAML reads a folder name such as 2024 as a number, unless it is in quotes.
            end += " (write it in quotes)"
    elif kind == "too_short":
        message = f"must hold at least {fault['ctx']['min_length']}"
    elif kind == "literal_error":
        # The setting has fixed choices, and the value is none of them. If an earlier version had
        # this choice, advise what to use now: ` (removed: use ...)`.
        end += removed_advice(fault["input"])
    # Start with a small letter, because the message follows the setting's key.
    return f"{message[:1].lower()}{message[1:]}{end}"


def _describe_tag(path: Sequence[str], classes: Sequence[type[BaseModel]], fault: Any) -> str:
    """Describe a missing or unknown tag: the setting that chooses the class of its section.

    Args:
        path: Keys that lead to the section.
        classes: Classes that the section may have.
        fault: An item of pydantic's `ValidationError.errors()`.
    """
    tag = fault["ctx"]["discriminator"].strip("'")
    key = ".".join([*path, tag])
    tags_by_class = [tags_of(section_class) for section_class in classes]
    # The allowed values of the tag, such as `dense` and `lexical` for the tag `kind`.
    choices = sorted({tags[tag] for tags in tags_by_class if tag in tags})
    if fault["type"] == "union_tag_not_found":
        return f"missing key '{key}': choose from {', '.join(choices)}"

    value = str(fault["ctx"]["tag"])
    # The advice begins with its separator: ` (removed: ...)`, `, did you mean ...? ` or `; `.
    advice = removed_advice(value)
    if not advice:
        advice = f"{suggestion(value, choices)}choose from {', '.join(choices)}"
    # The name `gpt-4.1` is no import path: names of Python begin with a letter.
    if re.search(r"[A-Za-z_]\w*\.[A-Za-z_]", value):
        advice += " (an import path has a colon: package.module:Class)"
    return f"{key}: unknown choice '{value}'{advice}"


def _follow(
    config_class: type[BaseModel], location: Sequence[Any], values: Any
) -> tuple[list[str], list[type[BaseModel]]]:
    """Follow pydantic's location of a fault through the settings.

    Args:
        config_class: Class of the settings.
        location: Keys, positions in lists, and tags: `("rankers", 0, "dense", "batch_size")`. A tag
            such as `dense` names the member of a union that pydantic chose.
        values: The settings.

    Returns:
        The keys that lead to the fault, without tags, and the classes that its section may have.
    """
    path = []
    classes = [config_class]  # classes that the current section may have
    expected_tag = ""
    for key in location:
        # If a tag chose the class of a section, the location holds it directly after the section.
        is_tag = key == expected_tag
        expected_tag = ""
        # Skip a key that the settings do not hold. It is a missing setting, or it names a type of a
        # union without a tag, such as `int`.
        if is_tag or not _holds(values, key):
            continue
        path.append(str(key))
        values = values[key]
        inner_classes = []
        for section in classes:
            if key in section.model_fields:
                inner_classes += sections_of(section.model_fields[key])
        # Without such a field, the section is a list, and the key is a position in it.
        classes = inner_classes or classes
        # If this section may have several classes, its tag chooses one.
        if len(classes) > 1 and isinstance(values, Mapping):
            classes = _chosen_sections(classes, values)
            expected_tag = next(iter(tags_of(classes[0]).values()), "")
    return path, classes


def _holds(values: Any, key: Any) -> bool:
    """Return whether a section has a key, or a list a position."""
    if isinstance(values, Mapping):
        return key in values
    return isinstance(values, Sequence) and isinstance(key, int) and key < len(values)


def _chosen_sections(
    section_classes: list[type[BaseModel]], values: Mapping[str, Any]
) -> list[type[BaseModel]]:
    """Return the classes that a section's tags choose, or all classes if the tags choose none.

    Args:
        section_classes: Classes that the section may have.
        values: Settings of the section, with tags such as `kind: dense`.
    """
    # The value of a tag may be the import path of a class, `package.module:Class`.
    plugin = _imported_plugin(values)
    if plugin is not None:
        return [plugin]

    # A class is chosen if `values` holds each of its tags with the same value.
    chosen = []
    for section_class in section_classes:
        tag_matches = [values.get(name) == tag for name, tag in tags_of(section_class).items()]
        if all(tag_matches):
            chosen.append(section_class)
    return chosen if chosen else section_classes


def _imported_plugin(values: Mapping[str, Any]) -> type[BaseModel] | None:
    """Return the class whose import path is a tag of a section, if it is imported.

    Args:
        values: Settings of the section, such as `{"kind": "my_package.rankers:MyRanker"}`.
    """
    for tag in ("name", "kind"):
        module_name, _, class_name = str(values.get(tag)).partition(":")
        # A module that is not imported is None, which has no such attribute.
        plugin = getattr(sys.modules.get(module_name), class_name, None)
        if isinstance(plugin, type) and issubclass(plugin, BaseModel):
            return plugin
    return None


def suggestion(word: str, choices: Sequence[str]) -> str:
    """Return the middle of an error: `, did you mean 'CHOICE'? `, or `; ` if no choice is similar.

    For example, an error may be `unknown key 'epoch', did you mean 'epochs'? allowed here: …`.

    Args:
        word: The unknown word, which the error names first.
        choices: Allowed words, which the error lists last.
    """
    similar = difflib.get_close_matches(word, choices, n=1)
    return f", did you mean '{similar[0]}'? " if similar else "; "


def sections_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the settings classes that a field may hold, also as items of lists and maps."""
    return _sections_in(field.annotation, field.metadata)


def _sections_in(annotation: Any, metadata: Sequence[Any] = ()) -> list[type[BaseModel]]:
    """Return the settings classes in a type, such as `A` and `B` in `list[A | B]`.

    Args:
        annotation: The type.
        metadata: Other arguments of `Annotated` for this type. If one is a `OneOf`, the type is the
            base class of plug-ins, and the classes of all plug-ins are returned.
    """
    for marker in metadata:
        if isinstance(marker, OneOf):
            return marker.classes()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return _sections_in(arguments[0], metadata=arguments[1:])
    sections = []
    if origin in (Union, UnionType, list, tuple, dict):
        for argument in arguments:
            sections += _sections_in(argument)
    return sections


def tags_of(section: type[BaseModel]) -> dict[str, str]:
    """Return the tags of a settings class: the settings that allow a single value, and this value.

    Example: `{"kind": "dense"}`. Tags choose the class of a section.
    """
    choices = {
        name: get_args(field.annotation)
        for name, field in section.model_fields.items()
        if get_origin(field.annotation) is Literal
    }
    return {name: str(values[0]) for name, values in choices.items() if len(values) == 1}


def _short(value: Any) -> str:
    """Return a wrong value as it is shown in an error, cut to 60 characters."""
    return shorten("null" if value is None else repr(value), 60, "...")


def to_yaml(config: BaseModel) -> str:
    """Return settings with all defaults as YAML, which can be run as a recipe."""
    values = config.model_dump(mode="json")
    # PyYAML loses the line breaks of Unicode unless it escapes all characters beyond ASCII.
    has_breaks = any(escape in repr(values) for escape in (r"\x85", r"\u2028", r"\u2029"))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=not has_breaks)


class InputMark:
    """Marker of a setting that is an input. The fingerprint of an input is written to run.json."""


InputPath = Annotated[Path, InputMark()]
PoolPath = Annotated[InputPath, Field(description="SKILLS table (file or folder)")]
"""Pool that a stage reads."""


def _as_list(value: Any) -> Any:
    """Return a single path as a tuple of one."""
    return value if isinstance(value, list | tuple) else (value,)


InputPaths = Annotated[tuple[InputPath, ...], BeforeValidator(_as_list)]
"""A path, or a list of paths."""
ModelSource = Annotated[str, InputMark()]
"""Folder, Hub id or package of a model. Only a folder gets a fingerprint, because an id or the name
of a package identifies the content."""
