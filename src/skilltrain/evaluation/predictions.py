"""Rankings that another program made, as a JSON file: read, and checked against the benchmark that they answer."""

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark
from skilltrain.files import read_json
from skilltrain.terminal import say


def read_predictions(path: Path) -> dict[str, list[str]]:
    """query_id → ranked skill ids, from a JSON object.

    Raises SkilltrainError, naming the query, for any other shape, a query that appears twice and an id that does.
    """
    values = read_json(path)
    if not isinstance(values, dict):
        raise SkilltrainError("predictions are an object {query_id: [skill_id, …]}", where=path)
    if not values:
        raise SkilltrainError("holds no prediction", where=path)
    for query_id, ranking in values.items():
        where = f"{path}, query {query_id}"
        if not isinstance(ranking, list) or not all(isinstance(skill_id, str) and skill_id for skill_id in ranking):
            raise SkilltrainError("a prediction is a list of skill ids", where=where)
        if len(set(ranking)) < len(ranking):
            raise SkilltrainError(f"skill '{Counter(ranking).most_common(1)[0][0]}' appears twice", where=where)
    return values


def scored_predictions(
    predictions: Mapping[str, list[str]], benchmark: Benchmark, skill_ids: Collection[str], where: Path
) -> dict[str, list[str]]:
    """The predictions for the tasks that are scored.

    Raises SkilltrainError for a task that the benchmark does not hold, where none is scored and, where the pool is
    known (`skill_ids` is not empty), for a skill that it lacks. A task without a prediction gets a warning: it scores
    0, for a system that fails to answer is not excused.
    """
    known = [task.query.query_id for task in benchmark.tasks]
    asked = benchmark.unscored.union(known)
    if unknown := [query_id for query_id in predictions if query_id not in asked]:
        what = f"{len(unknown)} of {len(predictions)} predicted queries are not in the benchmark, first '{unknown[0]}'"
        raise SkilltrainError(what, where=where, fix=f"its query ids look like '{known[0]}'")
    pairs = [(query_id, skill_id) for query_id, ranking in predictions.items() for skill_id in ranking]
    if strange := [pair for pair in pairs if skill_ids and pair[1] not in skill_ids]:
        query_id, skill_id = strange[0]
        what = f"{len(strange)} of {len(pairs)} predicted skills are not in the pool, first '{skill_id}'"
        fix = "predict ids of this pool, or score without pool=…"
        raise SkilltrainError(what, where=f"{where}, query {query_id}", fix=fix)
    scored = {query_id: ranking for query_id, ranking in predictions.items() if query_id in known}
    if not scored:
        raise SkilltrainError("all its predictions are for queries that are not scored here", where=where)
    if missing := [query_id for query_id in known if query_id not in scored]:
        count = f"{len(missing)} of {len(known)}"
        say(f"warning: {where}: no prediction for {count} queries, first '{missing[0]}'; they score 0")
    return scored
