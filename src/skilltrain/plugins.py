"""Names and import paths of all plug-ins, and the functions that load them.

A plug-in is a class or a function with a name. For example, `rerank` is the name of a ranker.
`BUILT_IN` lists the plug-ins of this package. Another package lists its plug-ins as entry points of
the group `skilltrain.plugins`, with the names `KIND.NAME`. A recipe may also give an import path,
`package.module:Class`, instead of a name.
"""

import importlib
import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from skilltrain.errors import SkilltrainError, TerminationError

GROUP = "skilltrain.plugins"
BUILT_IN = {
    "analysis": {
        "attention": "skilltrain.papers.skillrouter.analyses:Attention",
        "structure": "skilltrain.papers.skillrouter.analyses:Structure",
        "body_length": "skilltrain.papers.skillrouter.profiles:BodyLength",
        "diversity": "skilltrain.papers.skillrouter.profiles:Diversity",
        "pass_rates": "skilltrain.papers.skillrouter.analyses:PassRates",
    },
    "benchmark": {  # the order matters: the first reader whose marker is in a folder reads it
        "livemcpbench": "skilltrain.metrics.benchmarks.livemcpbench:LIVEMCPBENCH",
        "livemcpbench_clone": "skilltrain.metrics.benchmarks.livemcpbench:CLONE",
        "skillrouter": "skilltrain.metrics.benchmarks.skillrouter:SKILLROUTER",
        "r3_skill": "skilltrain.metrics.benchmarks.r3:R3_SKILL",
        "beir": "skilltrain.metrics.benchmarks.qrels:BEIR",
        "tables": "skilltrain.metrics.benchmarks.load:TABLES",
        "mteb": "skilltrain.metrics.benchmarks.qrels:MTEB",
        "toolret": "skilltrain.metrics.benchmarks.toolret:TOOLRET",
        "skillret": "skilltrain.metrics.benchmarks.qrels:SKILLRET",
        "skillrouter_tier": "skilltrain.metrics.benchmarks.skillrouter:TIER",
    },
    "filter": {
        "name": "skilltrain.data.filter_layers:NameLayer",
        "jaccard": "skilltrain.data.filter_layers:JaccardLayer",
        "cosine": "skilltrain.data.filter_layers:CosineLayer",
        "cluster": "skilltrain.data.filter_layers:ClusterLayer",
        "ceiling": "skilltrain.data.filter_layers:CeilingLayer",
        "rank_window": "skilltrain.data.filter_layers:RankWindowLayer",
    },
    "hook": {},  # only of other packages
    "loss": {
        "infonce": "skilltrain.losses.infonce:InfoNCE",
        "kl": "skilltrain.losses.list_losses:KL",
        "list_net": "skilltrain.losses.list_losses:ListNet",
        "listwise_ce": "skilltrain.losses.list_losses:ListwiseCE",
        "margin_mse": "skilltrain.losses.pair_losses:MarginMSE",
        "matryoshka": "skilltrain.losses.matryoshka:Matryoshka",
        "pointwise_bce": "skilltrain.losses.list_losses:PointwiseBCE",
        "ranknet": "skilltrain.losses.pair_losses:RankNet",
        "spread_out": "skilltrain.losses.spread_out:SpreadOut",
        "sum": "skilltrain.losses.weighted_sum:WeightedSum",
    },
    "measure": {
        "Hit": "skilltrain.metrics.measures:hit",
        "MRR": "skilltrain.metrics.measures:mrr",
        "nDCG": "skilltrain.metrics.measures:ndcg",
        "nDCG-exp": "skilltrain.metrics.measures:ndcg_exp",
        "nDCG-bin": "skilltrain.metrics.measures:ndcg_bin",
        "Recall": "skilltrain.metrics.measures:recall",
        "Precision": "skilltrain.metrics.measures:precision",
        "MAP": "skilltrain.metrics.measures:average_precision",
        "FC": "skilltrain.metrics.measures:full_coverage",
        "COMP": "skilltrain.metrics.measures:comp",
        "Set-Compat": "skilltrain.metrics.measures:set_compat",
    },
    "optimizer": {
        "adamw": "skilltrain.training.optimizers:AdamW",
        "adamw_8bit": "skilltrain.training.optimizers:AdamW8bit",
        "adafactor": "skilltrain.training.optimizers:Adafactor",
    },
    "scheduler": {
        "cosine": "skilltrain.training.optimizers:Cosine",
        "linear": "skilltrain.training.optimizers:Linear",
        "constant": "skilltrain.training.optimizers:Constant",
        "warmup_stable_decay": "skilltrain.training.optimizers:WarmupStableDecay",
    },
    "prompt": {
        "styles": "skilltrain.data.llm_stage:STYLES",
        "skillrouter": "skilltrain.data.llm_stage:SKILLROUTER",
    },
    "source": {
        "semantic": "skilltrain.data.sources:SemanticSource",
        "lexical": "skilltrain.data.sources:LexicalSource",
        "taxonomy": "skilltrain.data.sources:TaxonomySource",
        "random": "skilltrain.data.sources:RandomSource",
    },
    "ranker": {
        "lexical": "skilltrain.retrieval.lexical:LexicalConfig",
        "dense": "skilltrain.retrieval.dense:DenseConfig",
        "api": "skilltrain.retrieval.api:ApiConfig",
        "saved": "skilltrain.retrieval.rankings:SavedConfig",
        "rerank": "skilltrain.retrieval.rerank:RerankConfig",
        "late": "skilltrain.retrieval.late:LateConfig",
        "fuse": "skilltrain.retrieval.fusion:FuseConfig",
        "select": "skilltrain.retrieval.select:SelectConfig",
        "admit": "skilltrain.papers.skillflow.admit:AdmitConfig",
        "expand": "skilltrain.papers.skillflow.expand:ExpandConfig",
        "interleave": "skilltrain.papers.skillflow.interleave:InterleaveConfig",
    },
    "command": {},  # only of other packages; our own are in cli/
}
"""Import path by kind and name of a plug-in. A module is imported when it is first used.

The module `skilltrain.stage` adds the kind `stage`.
"""


class LoadedPlugin(NamedTuple):
    """A plug-in of another package that this process has imported.

    Attributes:
        label: Kind and name for errors, such as `loss acme.losses:Hinge`.
        module: Module of the plug-in, such as `acme.losses`.
    """

    label: str
    module: str


LOADED: dict[str, LoadedPlugin] = {}
"""Loaded plug-ins of other packages by their name. Records of runs and errors name them."""


@cache
def plugin_paths(kind: str) -> dict[str, str]:
    """Return the import path of each plug-in of a kind, by its name.

    Plug-ins of this package come first. Plug-ins of other packages are found by their entry points,
    which have names such as `ranker.mine`.

    Args:
        kind: Kind of plug-in, a key of BUILT_IN, such as `ranker`.

    Raises:
        SkilltrainError: Two packages use the same name.
    """
    paths = dict(BUILT_IN[kind])
    for entry in entry_points(group=GROUP):
        entry_kind, _, name = entry.name.partition(".")
        if entry_kind != kind:
            continue
        # `entry.value` is the import path. A package that is installed twice gives equal paths.
        if name in paths and paths[name] != entry.value:
            problem = f"two packages have a {kind} '{name}': {paths[name]} and {entry.value}"
            raise SkilltrainError(
                "repeated-name", problem, where=GROUP, fix="uninstall one of them"
            )
        paths[name] = entry.value
    return paths


def load_plugin(kind: str, name: str) -> Any:
    """Import a plug-in.

    Args:
        kind: Kind of plug-in, a key of BUILT_IN.
        name: Name of the plug-in, or an import path `package.module:Class`.

    Raises:
        SkilltrainError: There is no such plug-in, or it cannot be imported.
    """
    paths = plugin_paths(kind)
    path = name if ":" in name else paths.get(name)  # only an import path has a colon
    if path is None:
        raise SkilltrainError(
            "unknown-plugin", f"unknown {kind} '{name}'; choose from {', '.join(paths)}"
        )
    plugin = import_path(path)
    # A recipe may also give the import path of a plug-in of this package.
    if not path.startswith("skilltrain."):
        module = path.split(":")[0]
        LOADED[name] = LoadedPlugin(f"{kind} {name}", module)
    return plugin


def import_path(path: str) -> Any:
    """Import the object at `package.module:name`. Raises SkilltrainError if there is none."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    # SIGTERM may arrive during the import. It is no fault of the plug-in.
    except TerminationError:
        raise
    # The module of another package may raise any error, or call `sys.exit`.
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}{_last_line(error, module)}"
        raise SkilltrainError("unusable-plugin", f"cannot import {path}: {cause}") from error


def plugin_fault(error: BaseException) -> SkilltrainError | None:
    """Explain an unexpected error by the plug-in of another package that raised it.

    Example: `loss acme.losses:Hinge: KeyError: 'x' (acme/losses.py, line 20)`

    Args:
        error: The error as Python raised it.

    Returns:
        The error that names the plug-in. None if the traceback has no line of a plug-in.
    """
    plugins = LOADED.values()
    line = _last_line(error, *[plugin.module for plugin in plugins])
    if not line:
        return None
    # Name the plug-ins of the package that holds this line. There may be several, because the
    # line does not tell apart the plug-ins of one package.
    labels = [plugin.label for plugin in plugins if _last_line(error, plugin.module) == line]
    return SkilltrainError(
        "unusable-plugin", f"{type(error).__name__}: {error}{line}", where=", ".join(labels)
    )


def _last_line(error: BaseException, *modules: str) -> str:
    """Return the last line of an error's traceback in the packages of some modules.

    Returns:
        File and line with a leading space, so that a message can end with it:
        ` (acme/losses.py, line 20)`. Empty if the traceback has no line in these packages.
    """
    packages = [module.partition(".")[0] for module in modules]  # `acme` of `acme.losses`
    last_line = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] in packages:
            last_line = f" ({frame.f_code.co_filename}, line {line})"
    return last_line


def chosen_plugin(kind: str, name: str) -> Any:
    """Import a plug-in like `load_plugin`, but raise ValueError, which pydantic reports."""
    try:
        return load_plugin(kind, name)
    except SkilltrainError as error:
        raise ValueError(error.problem) from error


@dataclass(frozen=True)
class OneOf:
    """Marker of a setting whose value is a plug-in of one kind.

    Annotate the base class of the plug-ins with it:
    `ranker: Annotated[SerializeAsAny[RankerConfig], OneOf("ranker")]`.

    Attributes:
        kind: Kind of plug-in.
        tag: Key of the section that holds the name of the plug-in.
        only: Name of a class attribute. Plug-ins without it, or with a false value, are not
            allowed. Empty: all plug-ins of the kind are allowed.
    """

    kind: str
    tag: str = "kind"
    only: str = ""

    def classes(self) -> list[type[BaseModel]]:
        """Import and return all classes that are allowed here."""
        plugins = [load_plugin(self.kind, name) for name in plugin_paths(self.kind)]
        return [plugin for plugin in plugins if self._allows(plugin)]

    def _allows(self, plugin: type[BaseModel]) -> bool:
        return not self.only or getattr(plugin, self.only, False)

    def _choose(self, base: type[BaseModel], value: Any) -> Any:
        """Validate a section with the plug-in that it names.

        Args:
            base: Base class of the plug-ins.
            value: Settings of the section. A value that is no map, such as a plug-in's object, is
                returned without a check.

        Returns:
            The settings as an object of the plug-in's class.

        Raises:
            PydanticCustomError: The section names no plug-in, an unknown one, or a forbidden one.
            ValueError: The plug-in cannot be imported, or is of another class.
        """
        if not isinstance(value, Mapping):
            return value
        context: dict[str, Any] = {"discriminator": f"'{self.tag}'"}
        if self.tag not in value:
            raise PydanticCustomError("union_tag_not_found", "missing {discriminator}", context)
        name = str(value[self.tag])
        if ":" in name or name in plugin_paths(self.kind):
            plugin = chosen_plugin(self.kind, name)
            if not (isinstance(plugin, type) and issubclass(plugin, base)):
                raise ValueError(f"{name} is no subclass of {base.__module__}.{base.__name__}")
            # A class that lacks a method of its base class cannot be used.
            if inspect.isabstract(plugin):
                raise ValueError(f"{name} has no {', '.join(sorted(plugin.__abstractmethods__))}")
            if self._allows(plugin):
                return self._validate(plugin, value)
        # A plug-in that is not allowed here is reported as unknown, too.
        context["tag"] = name
        raise PydanticCustomError("union_tag_invalid", "unknown {discriminator} {tag}", context)

    def _validate(self, plugin: type[BaseModel], value: Mapping[str, Any]) -> BaseModel:
        """Validate the settings of a section with the class of its plug-in.

        For example, the field `kind: Literal["dense"]` of a class has the name `dense`. The class
        accepts only its own name. Therefore an import path is replaced by this name, and
        put back after the validation.
        """
        name = value[self.tag]
        accepted_names = get_args(plugin.model_fields[self.tag].annotation)
        if ":" in name and accepted_names:
            value = {**value, self.tag: accepted_names[0]}
        return plugin.model_validate(value).model_copy(update={self.tag: name})

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return pydantic's schema of the base class `source`, with `_choose` in front of it.

        Pydantic calls this method for an annotation `Annotated[source, OneOf(...)]`.
        """
        choose = partial(self._choose, source)
        return core_schema.no_info_before_validator_function(choose, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return a JSON Schema that allows each plug-in, and any section with an import path."""
        # Only an import path, `package.module:Class`, has a colon.
        path_schema = {
            "type": "object",
            "properties": {self.tag: {"type": "string", "pattern": ":"}},
            "required": [self.tag],
        }
        schemas = [plugin.__pydantic_core_schema__ for plugin in self.classes()]
        # Pydantic moves the members of a union to `$defs`, and leaves references to them here. A
        # union with a single member becomes this member, without `anyOf`.
        union = handler(core_schema.union_schema([*schemas]))
        return {"oneOf": [*union.get("anyOf", [union]), path_schema]}
