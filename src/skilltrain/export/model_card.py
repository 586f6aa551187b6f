"""The README.md of a saved model, written from its run: what it is, how to use it, what it was trained on."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from skilltrain.export.shareable import shareable
from skilltrain.export.usage import usage
from skilltrain.models.encoder import EncoderSettings
from skilltrain.models.reranker import RerankerSettings

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_DATA = {
    "num_lists": "lists",
    "num_skills": "distinct skills",
    "num_pairs": "(query, skill) pairs",
    "num_positives": "positive pairs",
    "num_contaminated_lists": "lists contaminated by held-out benchmarks",
    "num_lists_of_dev_queries": "lists that ask a development query",
}
_TRAINING = {
    "num_parameters": "parameters",
    "num_trained_parameters": "trained parameters",
    "num_steps": "optimiser steps",
    "num_tokens": "tokens",
    "seconds": "seconds",
    "last_loss": "last loss",
    "checkpoint": "weights taken after",
}


@dataclass(frozen=True)
class RunRecord:
    """What a run has to say of its model.

    `recipe` is the resolved settings as plain values. `summary` is the run's own; its key `dev` maps a measure to
    mean, low, high (the 95% interval) and n. `exported` names the checkpoint, if it is not the run's chosen one.
    """

    settings: EncoderSettings | RerankerSettings
    base: str
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any]
    exported: str | None = None


def model_card(record: RunRecord) -> str:
    """Markdown with YAML front matter, for the Hub and for whoever opens the folder.

    Of local paths only the last part is told, and nothing that looks like a key; no text of the training data is.
    """
    kind = "encoder" if isinstance(record.settings, EncoderSettings) else "reranker"
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(record, kind), sort_keys=False, allow_unicode=True)}---",
        f"# Agent skill {kind}, from {_title(record.base)}",
        _about(record, kind),
        "## How to use it",
        usage(record.settings),
        "## Training data",
        _counts(record.summary, _DATA),
        "## Training",
        _counts(record.summary, _TRAINING),
        f"```yaml\n{yaml.safe_dump(shareable(record.recipe), sort_keys=False, allow_unicode=True)}```",
        "## Results",
        _results(record.summary.get("dev")),
        "## Limits",
        _limits(record.settings),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(record: RunRecord, kind: str) -> dict[str, Any]:
    values: dict[str, Any] = {"library_name": "sentence-transformers"}
    values["pipeline_tag"] = "sentence-similarity" if kind == "encoder" else "text-ranking"
    if _HUB_ID.fullmatch(record.base) and not Path(record.base).expanduser().exists():
        values["base_model"] = record.base
    own = ["feature-extraction"] if kind == "encoder" else ["cross-encoder", "reranker"]
    return values | {"tags": ["sentence-transformers", *own, "agent-skills", "skilltrain"]}


def _title(base: str) -> str:
    return shareable(base).removeprefix("package:")


def _about(record: RunRecord, kind: str) -> str:
    task = {
        "encoder": "It turns a request and the skills of a pool into vectors; the skills nearest to a request are the "
        "candidates for it.",
        "reranker": "It scores how well a skill answers a request, to order the candidates that an encoder found.",
    }
    origin = f"It was trained with skilltrain from `{_title(record.base)}`."
    if record.exported is not None:
        origin += (
            f" These are the weights of its checkpoint `{record.exported}`, not the model that the run ended with."
        )
    return f"A model for routing an agent's request to the right skill. {task[kind]} {origin}"


def _counts(summary: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    known = [(label, summary[key]) for key, label in labels.items() if key in summary]
    if not known:
        return "Not known: this is a checkpoint of a training."
    lines = [f"| {label} | {_number(value)} |" for label, value in known]
    return "\n".join(["| | |", "|---|---:|", *lines])


def _results(dev: Mapping[str, Mapping[str, float]] | None) -> str:
    if not dev:
        return "Not evaluated: measure it on queries of your own (`skilltrain evaluate`) before you rely on it."
    lines = [
        f"| {_cell(metric)} | {_figure(r['mean'])} | {_interval(r)} | {int(r['n'])} |" for metric, r in dev.items()
    ]
    head = "On the development queries that chose the checkpoint, so rather too good than too bad:"
    return "\n".join([head, "", "| metric | mean | 95% interval | queries |", "|---|---:|---:|---:|", *lines])


def _interval(result: Mapping[str, float]) -> str:
    return f"{_figure(result['low'])} to {_figure(result['high'])}"


def _limits(settings: EncoderSettings | RerankerSettings) -> str:
    is_encoder = isinstance(settings, EncoderSettings)
    cut = (
        f"Texts beyond {settings.max_tokens} tokens (queries: {settings.query_max_tokens}) are cut."
        if is_encoder
        else f"Pairs beyond {settings.max_tokens} tokens are cut at the skill's end; skilltrain also cuts queries at "
        f"{settings.query_max_tokens} tokens, which plain sentence-transformers does not."
    )
    lines = [
        "Skills are untrusted text: a skill can be written to rank high, and a high score says nothing about safety. "
        "Read a skill before an agent follows it.",
        f"{cut} What stands after the cut has no influence.",
        "Scores compare skills for one request. They are no probabilities, and no threshold was set.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _number(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else _cell(str(value))


def _figure(value: float) -> str:
    return f"{value:.3f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
