"""Whether what is trained on may be measured with the benchmarks that are held out, found before training starts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from skilltrain.data.contamination.grounds import (
    GROUNDS,
    HeldOut,
    SkillIndex,
    TrainingQuery,
    contaminations,
    open_benchmarks,
    query_index,
)
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.records import Dropped
from skilltrain.terminal import say
from skilltrain.training.dev import DevConfig
from skilltrain.training.training_set import ListsSource, TrainingSet


def check_held_out(source: ListsSource, dev: DevConfig | None, data: TrainingSet) -> dict[str, int]:
    """How many lists are contaminated, by summary key; a key is there where its benchmark was compared.

    With the benchmarks of `held_out` queries and positives are compared, with the dev benchmark queries alone: a dev
    set measures the skills that are trained on, by other queries. Raises SkilltrainError where a list is contaminated,
    unless the recipe allows it; then it is said.
    """
    queries = [
        TrainingQuery(one.query_id, one.query, _trained_positives(one.gains, one.skill_ids)) for one in data.lists
    ]
    counts: dict[str, int] = {}
    if source.held_out:
        benchmarks = open_benchmarks(source.held_out, source.pool, source.contamination_limits.compares_skills)
        found = _compare(queries, benchmarks, data, source)
        counts["num_contaminated_lists"] = _judge(found, source, _command(source, source.held_out))
    if dev is not None and source.contamination_limits.query_overlap is not None:
        benchmark = load_benchmark(dev.benchmark, dev.split)
        found = _compare(queries, [HeldOut(benchmark.name, benchmark.tasks, ())], data, source)
        clean = _command(source, [dev.benchmark], "limits.name=false limits.jaccard=null ")
        counts["num_lists_of_dev_queries"] = _judge(found, source, f"choose another dev.split, or {clean}")
    return counts


def _command(source: ListsSource, benchmarks: Sequence[Path], limits: str = "") -> str:
    """What to run for lists that training accepts."""
    folders = ", ".join(map(str, benchmarks))
    command = f"skilltrain decontaminate pool={source.pool} queries={source.lists} 'benchmarks=[{folders}]'"
    return f"run `{command} {limits}out=…` and train on what it writes"


def _trained_positives(gains: Sequence[float], skill_ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(skill_id for skill_id, gain in zip(skill_ids, gains, strict=True) if gain > 0)


def _compare(
    queries: Sequence[TrainingQuery], benchmarks: Sequence[HeldOut], data: TrainingSet, source: ListsSource
) -> list[Dropped]:
    """All that stands against the lists, in their order."""
    limits = source.contamination_limits
    tasks, by_skill = query_index(benchmarks, limits), _matches(queries, benchmarks, data, source)
    return [one for query in queries for one in contaminations(query, tasks, by_skill)]


def _matches(
    queries: Sequence[TrainingQuery], benchmarks: Sequence[HeldOut], data: TrainingSet, source: ListsSource
) -> Mapping[str, Sequence[Dropped]]:
    """skill_id → matches of every skill that is a positive."""
    golds = [gold for benchmark in benchmarks for gold in benchmark.golds]
    if not golds:
        return {}
    index = SkillIndex(golds, source.contamination_limits)
    positives = dict.fromkeys(skill_id for query in queries for skill_id in query.positives)
    return {skill_id: index.matches(data.skills[skill_id]) for skill_id in positives}


def _judge(found: Sequence[Dropped], source: ListsSource, fix: str) -> int:
    """The number of contaminated lists. Raises SkilltrainError if there is one, unless the recipe allows it."""
    num_lists = len({one.query_id for one in found})
    if not found:
        return 0
    grounds = Counter(ground for _, ground in {(one.query_id, one.filter) for one in found})
    by_ground = ", ".join(f"{ground} {grounds[ground]:,}" for ground in GROUNDS if grounds[ground])
    first = found[0]
    who = f"query {first.query_id}" + (f", positive {first.skill_id}" if first.skill_id else "")
    what = f"{num_lists:,} list(s) are contaminated ({by_ground}); the first, {who}: {first.reason}"
    if source.contamination == "refuse":
        raise SkilltrainError(what, where=source.lists, fix=f"{fix}, or set data.contamination=allow")
    say(f"warning: {what}; figures on that benchmark will be too high (data.contamination: allow)")
    return num_lists
