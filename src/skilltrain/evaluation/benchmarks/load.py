"""Reading a benchmark from its folder, whichever form it has."""

from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark
from skilltrain.evaluation.benchmarks.rows import read_skills
from skilltrain.evaluation.benchmarks.skillrouter import skillrouter_tasks
from skilltrain.evaluation.benchmarks.tables import table_tasks


def load_benchmark(path: Path, split: str | None = None) -> Benchmark:
    """The benchmark in a folder, all of it or one split, in whichever of the two forms the folder holds.

    Our own tables, queries.parquet and judgements.parquet: a required skill is gold with gain 1, a useful one has
    gain 0.5 without being gold; irrelevant and rejected skills gain nothing.

    SkillRouter's files, tasks.jsonl and relevance.json (gold_skills.jsonl may stand beside them): relevance.json
    alone decides what is scored. `core_gt_ids` are gold (`gt_skill_ids` where an entry has none; they differ only by
    auxiliary skills) and `relevance` holds the gains, 3 for gold and 1 for a degraded copy. Entries of task_type
    `generic_only` are skipped, as in the released evaluation. `excluded: true` in tasks.jsonl does not skip a task:
    it is SkillsBench's own note that the task's environment is faulty (the only one here says "timeout issues"),
    which does not touch routing; the released evaluation never reads it, and its 75 scored tasks contain excluded
    ones. The released data is a test set, so all its queries are of split `test`.

    Raises SkilltrainError, naming file and query, for malformed files, a query without gold, a query without
    relevance and relevance without a query.
    """
    if not path.is_dir():
        raise SkilltrainError("no such folder; a benchmark is a folder", where=path)
    if (path / "tasks.jsonl").exists():
        tasks, skills = skillrouter_tasks(path, split), read_skills(path / "gold_skills.jsonl")
    elif (path / "queries.parquet").exists():
        tasks, skills = table_tasks(path, split), ()
    else:
        fix = "a benchmark holds queries.parquet and judgements.parquet, or tasks.jsonl and relevance.json"
        raise SkilltrainError("is not a benchmark", where=path, fix=fix)
    return Benchmark(name=path.resolve().name, tasks=tuple(tasks), gold_skills=skills)
