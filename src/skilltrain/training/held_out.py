"""Whether what is trained on may be measured with the benchmarks that are held out, found before training starts."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from skilltrain.data.contamination import GROUNDS, BenchmarkIndex, HeldOut, open_benchmarks
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.records import Dropped
from skilltrain.terminal import say
from skilltrain.training.settings import DevConfig
from skilltrain.training.training_set import ListsSource, TrainingSet


def check_held_out(source: ListsSource, dev: DevConfig | None, data: TrainingSet) -> dict[str, int]:
    """How many lists are contaminated, by summary key; a key is there where its benchmark was compared.

    With the benchmarks of `held_out` queries and positives are compared, with the dev benchmark queries alone: a dev
    set measures the skills that are trained on, by other queries. Raises SkilltrainError where a list is contaminated,
    unless the recipe allows it; then it is said.
    """
    limits, counts = source.contamination_limits, dict[str, int]()
    if source.held_out:
        benchmarks = open_benchmarks(source.held_out, source.pool, limits.compares_skills)
        clean = _command(source, source.held_out)
        counts["num_contaminated_lists"] = _num_contaminated(benchmarks, data, source, clean)
    if dev is not None and limits.query_overlap is not None:
        benchmark = load_benchmark(dev.benchmark, dev.split)
        asked = [HeldOut(benchmark.name, benchmark.tasks, ())]
        clean = _command(source, [dev.benchmark], "limits.name=false limits.jaccard=null ")
        fix = f"choose another dev.split, or {clean}"
        counts["num_lists_of_dev_queries"] = _num_contaminated(asked, data, source, fix)
    return counts


def _command(source: ListsSource, benchmarks: Sequence[Path], limits: str = "") -> str:
    """What to run for lists that training accepts."""
    folders = ", ".join(map(str, benchmarks))
    queries = source.lists if isinstance(source.lists, Path) else "FOLDER"  # of each in turn
    command = f"skilltrain decontaminate pool={source.pool} queries={queries} 'benchmarks=[{folders}]'"
    return f"run `{command} {limits}out=…` and train on what it writes"


def _num_contaminated(benchmarks: Sequence[HeldOut], data: TrainingSet, source: ListsSource, fix: str) -> int:
    """The number of contaminated lists. Raises SkilltrainError if there is one, unless the recipe allows it."""
    index = BenchmarkIndex(benchmarks, source.contamination_limits)
    matches = cache(lambda skill_id: index.skill_matches(data.skills[skill_id]))
    found: list[Dropped] = []
    for one in data.lists:
        positives = [skill_id for skill_id, found in zip(one.skill_ids, one.is_positive, strict=True) if found]
        of_skills = [match for skill_id in positives for match in matches(skill_id)]
        found += index.contaminations(one.query_id, one.query, of_skills)
    if not found:
        return 0
    num_lists = len({one.query_id for one in found})
    grounds = Counter(ground for _, ground in {(one.query_id, one.filter) for one in found})
    by_ground = ", ".join(f"{ground} {grounds[ground]:,}" for ground in GROUNDS if grounds[ground])
    first = found[0]
    who = f"query {first.query_id}" + (f", positive {first.skill_id}" if first.skill_id else "")
    what = f"{num_lists:,} list(s) are contaminated ({by_ground}); the first, {who}: {first.reason}"
    if source.contamination == "refuse":
        raise SkilltrainError(
            what, where=", ".join(map(str, source.folders)), fix=f"{fix}, or set data.contamination=allow"
        )
    say(f"warning: {what}; figures on that benchmark will be too high (data.contamination: allow)")
    return num_lists
