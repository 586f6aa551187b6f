"""The one door for plug-ins: what each kind of plug-in is called, and where it is imported from.

A plug-in is a class or a function with a name: `rerank` is the name of a ranker. The plug-ins of this package are
listed in `BUILT_IN`. Another package lists its own as entry points of the group `skilltrain.plugins`, named
`KIND.NAME`; a recipe may also give an import path, `package.module:Class`, in place of a name.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from skilltrain.errors import SkilltrainError

GROUP = "skilltrain.plugins"
BUILT_IN: dict[str, dict[str, str]] = {
    "analysis": {
        "attention": "skilltrain.papers.skillrouter.analyses:Attention",
        "structure": "skilltrain.papers.skillrouter.analyses:Structure",
        "pass_rates": "skilltrain.papers.skillrouter.analyses:PassRates",
    },
    "benchmark": {  # the first whose marker is there reads a folder
        "livemcpbench": "skilltrain.metrics.benchmarks.livemcpbench:LIVEMCPBENCH",
        "livemcpbench_clone": "skilltrain.metrics.benchmarks.livemcpbench:CLONE",
        "skillrouter": "skilltrain.metrics.benchmarks.skillrouter:SKILLROUTER",
        "r3_skill": "skilltrain.metrics.benchmarks.r3:R3_SKILL",
        "beir": "skilltrain.metrics.benchmarks.qrels:BEIR",
        "tables": "skilltrain.metrics.benchmarks.load:TABLES",
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
    "loss": {
        "infonce": "skilltrain.losses.infonce:InfoNCE",
        "kl": "skilltrain.losses.list_losses:KL",
        "list_net": "skilltrain.losses.list_losses:ListNet",
        "listwise_ce": "skilltrain.losses.list_losses:ListwiseCE",
        "margin_mse": "skilltrain.losses.pair_losses:MarginMSE",
        "matryoshka": "skilltrain.losses.matryoshka:Matryoshka",
        "pointwise_bce": "skilltrain.losses.list_losses:PointwiseBCE",
        "ranknet": "skilltrain.losses.pair_losses:RankNet",
    },
    "measure": {
        "Hit": "skilltrain.metrics.measures:hit",
        "MRR": "skilltrain.metrics.measures:mrr",
        "nDCG": "skilltrain.metrics.measures:ndcg",
        "nDCG-exp": "skilltrain.metrics.measures:ndcg_exp",
        "nDCG-bin": "skilltrain.metrics.measures:ndcg_bin",
        "Recall": "skilltrain.metrics.measures:recall",
        "Precision": "skilltrain.metrics.measures:precision",
        "FC": "skilltrain.metrics.measures:full_coverage",
        "COMP": "skilltrain.metrics.measures:comp",
        "Set-Compat": "skilltrain.metrics.measures:set_compat",
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
    },
    "command": {},  # cli/ has those of this package
}
"""Kind of plug-in → name → import path. Strings, so that a module is imported only when it is used.

The stages are added by `skilltrain.stage`.
"""
LOADED: dict[str, str] = {}
"""Module of each plug-in from outside that this process has loaded, by the name that it was loaded by."""


@cache
def plugin_paths(kind: str) -> dict[str, str]:
    """Return the import paths of all plug-ins of a kind by name; those of this package come first.

    Raises:
        SkilltrainError: An installed package repeats a name.
    """
    paths = dict(BUILT_IN[kind])
    for entry in entry_points(group=GROUP):
        entry_kind, _, name = entry.name.partition(".")
        if entry_kind != kind:
            continue
        if paths.get(name, entry.value) != entry.value:
            what = f"two packages have a {kind} '{name}': {paths[name]} and {entry.value}"
            raise SkilltrainError("repeated-name", what, where=GROUP, fix="uninstall one of them")
        paths[name] = entry.value
    return paths


def load_plugin(kind: str, name: str) -> Any:
    """Import a plug-in by its name, or by an import path `package.module:Class`.

    Raises:
        SkilltrainError: There is no such plug-in, or it cannot be imported.
    """
    paths = plugin_paths(kind)
    path = name if ":" in name else paths.get(name)
    if path is None:
        raise SkilltrainError(
            "unknown-plugin", f"unknown {kind} '{name}'; choose from {', '.join(paths)}"
        )
    plugin = import_path(path)
    if name not in BUILT_IN[kind]:
        LOADED[name] = path.partition(":")[0]
    return plugin


def import_path(path: str) -> Any:
    """Import what a path `package.module:name` names. Raises SkilltrainError if there is no such thing."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SkilltrainError("unusable-plugin", f"cannot import {path}: {error}") from error


def chosen_plugin(kind: str, name: str) -> Any:
    """Import the plug-in that a setting names (see `load_plugin`). Raises ValueError, for pydantic."""
    try:
        return load_plugin(kind, name)
    except SkilltrainError as error:
        raise ValueError(error.what) from error


@dataclass(frozen=True)
class OneOf:
    """Marks a setting as a section of one kind of plug-in. The key `tag` of the section holds its name.

    Use it on the class that all plug-ins of the kind share:
    `ranker: Annotated[SerializeAsAny[RankerConfig], OneOf("ranker")]`.

    Attributes:
        kind: Kind of plug-in.
        tag: Key that holds the name.
        only: Class attribute that must be true; plug-ins without it are not allowed here.
    """

    kind: str
    tag: str = "kind"
    only: str = ""

    def classes(self) -> list[type[BaseModel]]:
        """Import and return all classes that are allowed here."""
        loaded = [load_plugin(self.kind, name) for name in plugin_paths(self.kind)]
        return [plugin for plugin in loaded if self._allows(plugin)]

    def _allows(self, plugin: type[BaseModel]) -> bool:
        return not self.only or getattr(plugin, self.only)

    def _choose(self, base: type[BaseModel], value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        context: dict[str, Any] = {"discriminator": f"'{self.tag}'"}
        if self.tag not in value:
            raise PydanticCustomError("union_tag_not_found", "missing {discriminator}", context)
        name = str(value[self.tag])
        is_known = ":" in name or name in plugin_paths(self.kind)
        if is_known:
            plugin = chosen_plugin(self.kind, name)
            if not (isinstance(plugin, type) and issubclass(plugin, base)):
                raise ValueError(f"{name} is no subclass of {base.__module__}.{base.__name__}")
            if inspect.isabstract(plugin):
                raise ValueError(f"{name} has no {', '.join(sorted(plugin.__abstractmethods__))}")
            if self._allows(plugin):
                return self._validate(plugin, value)
        context["tag"] = name
        raise PydanticCustomError("union_tag_invalid", "unknown {discriminator} {tag}", context)

    def _validate(self, plugin: type[BaseModel], value: Mapping[str, Any]) -> BaseModel:
        """Validate a section; an import path stays in place of the name that the class declares."""
        declared = get_args(plugin.model_fields[self.tag].annotation)
        named = {**value, self.tag: declared[0]} if ":" in value[self.tag] and declared else value
        return plugin.model_validate(named).model_copy(update={self.tag: value[self.tag]})

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choose = partial(self._choose, source)
        return core_schema.no_info_before_validator_function(choose, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        import_path = {
            "type": "object",
            "properties": {self.tag: {"type": "string", "pattern": ":"}},
            "required": [self.tag],
        }
        # A union, because pydantic puts its members into `$defs`.
        schemas = [plugin.__pydantic_core_schema__ for plugin in self.classes()]
        named = handler(core_schema.union_schema([*schemas]))
        return {"oneOf": [*named.get("anyOf", [named]), import_path]}
