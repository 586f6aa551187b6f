"""What a model card gains at the export: name, licence, languages, data sets, and the results of an evaluation."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.runs import RUN_FILE
from skilltrain.tables import SKILLS, read_table, table_path

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LEAST_SHARE = 0.01  # of the pool's skills, for a language to be named
_HUB_SOURCE = re.compile(r"hf:([^:]+)")


@dataclass(frozen=True)
class Published:
    """What a run cannot know of its model: its name on the Hub, its licence, the report of an evaluation of the run."""

    repo: str | None = None
    license: str | None = None
    report: Path | None = None

    def check(self) -> None:
        """Raise SkilltrainError for a name that is none."""
        if self.repo is not None and HUB_ID.fullmatch(self.repo) is None:
            raise SkilltrainError("is no name of a model on the Hub", where=self.repo, fix="write OWNER/NAME")


def complete_card(file: Path, published: Published, run: Path, pool: Path) -> None:
    """Add to the card `file` of a model that `run` trained what `published` says, and what the pool tells of the data.

    Raises SkilltrainError for a report in which no system uses the run.
    """
    from huggingface_hub import ModelCard

    card: Any = ModelCard.load(file)
    card.data.license = published.license
    card.data.language, card.data.datasets = _languages(pool), _data_sets(pool)
    if published.repo is not None:
        card.text = _named(card.text, published.repo)
    if published.report is not None:
        _add_results(card, published.report, run)
    card.save(file)


def _languages(pool: Path) -> list[str] | None:
    """Those of the skills, the most frequent first; None where the pool is not there any more."""
    if not table_path(pool, SKILLS).is_file():
        return None
    counts = Counter(filter(None, read_table(pool, SKILLS).column("lang").to_pylist()))
    return [lang for lang, count in counts.most_common() if count >= _LEAST_SHARE * counts.total()] or None


def _data_sets(pool: Path) -> list[str] | None:
    """Names on the Hub of the data sets that the pool was made from."""
    record = read_json(pool / RUN_FILE) if (pool / RUN_FILE).is_file() else {}
    found = [_HUB_SOURCE.match(str(source)) for source in record.get("recipe", {}).get("sources", ())]
    return [match[1] for match in found if match] or None


def _named(text: str, repo: str) -> str:
    """The card's programs and command with the model's name in place of its folder."""
    text = text.replace('(".")  # this folder, or the model\'s name on the Hub', f'("{repo}")')
    text = text.replace('source="."', f'source="{repo}"').replace('  # "." is this folder', "")
    return re.sub(r"(--(?:encoder|reranker)) \.$", rf"\1 {repo}", text, flags=re.MULTILINE)


def _add_results(card: Any, report: Path, run: Path) -> None:
    """Write a report's systems into the card, and the figures of the first that uses `run` into its front matter."""
    from huggingface_hub import EvalResult

    found, recipe = read_json(report / "metrics.json"), read_json(report / RUN_FILE)["recipe"]
    own = [system["name"] for system in recipe["systems"] if _uses(system, run.resolve())]
    if not own:
        raise SkilltrainError(f"no system of this report uses {run}", where=report, fix="evaluate it first")
    rows = {system["name"]: system["metrics"] for system in found["systems"]}
    task, name = card.data.pipeline_tag, found["benchmark"]
    figures = [
        EvalResult(task, "agent-skills", name, measure, round(value["mean"], 4), metric_name=measure)
        for measure, value in rows[own[0]].items()
    ]
    card.data.model_name = card.data.model_name or "agent skill model"
    card.data.eval_results = [*(card.data.eval_results or ()), *figures]
    text = re.sub(r"^Not evaluated: .*\n", "", card.text, flags=re.MULTILINE)
    card.text = text.replace("\n## Limits\n", f"\n{_table(rows, own, name)}\n\n## Limits\n")


def _uses(value: Any, run: Path) -> bool:
    if isinstance(value, Mapping):
        source = value.get("source")
        return (isinstance(source, str) and Path(source).resolve() == run) or _uses([*value.values()], run)
    return isinstance(value, list) and any(_uses(item, run) for item in value)


def _table(rows: Mapping[str, Mapping[str, Mapping[str, float]]], own: list[str], benchmark: str) -> str:
    measures = [*next(iter(rows.values()))]
    num = max(value["n"] for row in rows.values() for value in row.values())
    title = f"On {num:,} queries of the benchmark “{benchmark}”, mean and 95% interval; systems in bold use this model:"
    lines = [title, "", f"| system | {' | '.join(measures)} |", f"|---|{'---:|' * len(measures)}"]  # fmt: skip
    for name, row in rows.items():
        cells = [
            f"{row[m]['mean']:.3f} [{row[m]['low']:.2f}, {row[m]['high']:.2f}]" if m in row else "–" for m in measures
        ]
        shown = name.replace("|", "\\|")
        lines.append(f"| {f'**{shown}**' if name in own else shown} | {' | '.join(cells)} |")
    return "\n".join(lines)
