"""What a loss sees of a step: scores from vectors, gains, and who may be a negative of whom."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.losses import EncoderLoss, RerankerLoss, infonce_in
from skilltrain.losses.scored_batch import ScoredBatch, SideScores, SideTerm
from skilltrain.models.micro_batches import on_device
from skilltrain.texts import name_key
from skilltrain.training.training_set import TrainingList, TrainingSet


@dataclass(frozen=True)
class ScoreContext:
    """What stays the same over a training: what the loss needs, and which skills and queries belong together.

    `groups` are the numbers of a skill's name and, if it is in one, its near-duplicate cluster: skills that share
    one answer the same queries. `answers` are, for a query's text, the groups of every skill known to answer it,
    gathered over all lists with that text. `lexical` are the BM25 scores that the loss adds, if it does.
    """

    in_batch: bool
    needs_sides: bool
    needs_teacher_scores: bool
    groups: Mapping[str, tuple[int, ...]]
    answers: Mapping[str, Set[int]]
    lexical: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, data: TrainingSet, loss: EncoderLoss, in_batch: bool) -> "ScoreContext":
        """The context of a training. Raises SkilltrainError as `check_teacher_scores` does."""
        check_teacher_scores(data, loss)
        numbers: dict[tuple[str, str | int], int] = {}

        def groups_of(key: str) -> tuple[int, ...]:
            skill = data.skills.get(key)
            skill_id, name = (skill.skill_id, name_key(skill.name)) if skill else (key, "")
            keys: list[tuple[str, str | int]] = [("name", name) if name else ("id", skill_id)]
            if skill_id in data.clusters:
                keys.append(("cluster", data.clusters[skill_id]))
            return tuple(numbers.setdefault(key, len(numbers)) for key in keys)

        answers: dict[str, set[int]] = {}
        for one in data.lists:
            answers.setdefault(one.query, set()).update(g for skill_id in one.positives for g in groups_of(skill_id))
        groups = {skill_id: groups_of(skill_id) for skill_id in data.skills}
        return cls(in_batch, infonce_in(loss).needs_sides, loss.needs_teacher_scores, groups, answers, data.lexical)


def check_teacher_scores(data: TrainingSet, loss: EncoderLoss | RerankerLoss) -> None:
    """Raises SkilltrainError, naming a query, where `loss` learns from a teacher that has not scored a list."""
    if not loss.needs_teacher_scores:
        return
    without = [one.query_id for one in data.lists if all(math.isnan(score) for score in one.teacher_scores or ())]
    if without:
        what = f"loss {loss.name} needs teacher scores, and {len(without)} of {len(data.lists)} lists have none"
        fix = "fill teacher_scores, or choose another loss"
        raise SkilltrainError(f"{what} (query {without[0]!r})", where="data.lists", fix=fix)


def in_batch_negatives(
    lists: Sequence[TrainingList], skill_ids: Sequence[str], context: ScoreContext
) -> Bool[Tensor, "query skill"]:
    """Which skills of other lists count against each query: all but those known to answer it, or queries of the same
    text, and their twins by name and by near-duplicate cluster.
    """
    answers = [context.answers[one.query] for one in lists]
    negative = ~_share_a_group(answers, [context.groups[skill_id] for skill_id in skill_ids])
    negative[_own_cells(lists, skill_ids)] = False
    return negative


def candidate_labels(
    lists: Sequence[TrainingList], skill_ids: Sequence[str], context: ScoreContext
) -> tuple[Float[Tensor, "query skill"], Bool[Tensor, "query skill"]]:
    """(gains, valid) of every skill of a batch for each query: its own list always, and in-batch negatives if asked."""
    cells = _own_cells(lists, skill_ids)
    gains = torch.zeros(len(lists), len(skill_ids))
    gains[cells] = torch.tensor([gain for one in lists for gain in one.gains], dtype=gains.dtype)
    if context.in_batch:
        valid = in_batch_negatives(lists, skill_ids, context)
    else:
        valid = torch.zeros(len(lists), len(skill_ids), dtype=torch.bool)
    valid[cells] = True
    return gains, valid


def positive_labels(lists: Sequence[TrainingList], skill_ids: Sequence[str]) -> Bool[Tensor, "query skill"]:
    """Which skills of a batch are positives of each query, by their verdicts in its own list."""
    positive = torch.zeros(len(lists), len(skill_ids), dtype=torch.bool)
    found = [is_positive for one in lists for is_positive in one.is_positive]
    positive[_own_cells(lists, skill_ids)] = torch.tensor(found, dtype=torch.bool)
    return positive


def encoder_scores(
    own: Sequence[TrainingList],
    batch: Sequence[TrainingList],
    query_vectors: Float[Tensor, "own dim"],
    all_queries: Float[Tensor, "all dim"] | None,
    skill_ids: Sequence[str],
    skill_vectors: Float[Tensor, "skill dim"],
    context: ScoreContext,
) -> ScoredBatch:
    """What the encoder's loss sees of this rank's queries `own`, against all skills of the `batch`.

    Vectors are unit vectors; `all_queries` are those of `batch`, given where the loss needs sides. Scores are cosines
    in float32 or wider, also under autocast, which would round them to 1/256. For a loss that learns from a teacher
    only the candidates that the teacher scored are valid, so in-batch negatives play no part.
    """
    device, teacher, negatives = skill_vectors.device, None, None
    gains, valid = candidate_labels(own, skill_ids, context)
    positive = positive_labels(own, skill_ids)
    if context.needs_teacher_scores:
        cells = _own_cells(own, skill_ids)
        teacher = torch.full_like(gains, torch.nan)
        teacher[cells] = torch.tensor(_teacher_scores(own), dtype=gains.dtype)
        valid &= ~teacher.isnan()
        teacher = on_device(teacher, device)
    if all_queries is not None:
        negatives = [on_device(part, device) for part in _side_negatives(own, batch, skill_ids, context)]
    gains, valid, positive = (on_device(part, device) for part in (gains, valid, positive))
    lexical = on_device(_lexical_scores(own, skill_ids, context), device) if context.lexical else None

    def scored(dim: int | None = None) -> ScoredBatch:
        """The batch by the whole vectors, or by their first `dim` coordinates, made unit vectors again."""
        queries, skills = _first(query_vectors, dim), _first(skill_vectors, dim)
        scores, sides = _cosines(queries, skills), None
        if negatives is not None and all_queries is not None:
            asked = _first(all_queries, dim)
            column, query_to_query, skill_to_query, skill_to_skill = negatives
            positives = skills[column]
            sides = SideScores(
                SideTerm(_cosines(queries, asked), query_to_query),
                SideTerm(_cosines(positives, asked), skill_to_query),
                SideTerm(_cosines(positives, skills), skill_to_skill),
            )
        return ScoredBatch(scores, gains.to(scores.dtype), valid, teacher, sides, lexical, scored, positive)

    return scored()


def list_scores(lists: Sequence[TrainingList], flat: Float[Tensor, "pair"], needs_teacher_scores: bool) -> ScoredBatch:
    """What the reranker's loss sees: the scores of the lists' pairs, one list after the other, as one table."""
    sizes = torch.tensor([len(one.gains) for one in lists])
    cells = on_device(torch.arange(int(sizes.max())) < sizes[:, None], flat.device)
    scores = flat.new_zeros(cells.shape).masked_scatter(cells, flat)
    given = torch.tensor([gain for one in lists for gain in one.gains], dtype=flat.dtype)
    gains = torch.zeros_like(scores).masked_scatter(cells, on_device(given, flat.device))
    named = torch.tensor([found for one in lists for found in one.is_positive], dtype=torch.bool)
    positive = torch.zeros_like(cells).masked_scatter(cells, on_device(named, flat.device))
    if not needs_teacher_scores:
        return ScoredBatch(scores, gains, cells, positive=positive)
    given = torch.tensor(_teacher_scores(lists), dtype=flat.dtype)
    teacher = torch.full_like(scores, torch.nan).masked_scatter(cells, on_device(given, flat.device))
    return ScoredBatch(scores, gains, cells & ~teacher.isnan(), teacher, positive=positive)


def _side_negatives(
    own: Sequence[TrainingList], batch: Sequence[TrainingList], skill_ids: Sequence[str], context: ScoreContext
) -> tuple[
    Int[Tensor, "positive"], Bool[Tensor, "own all"], Bool[Tensor, "positive all"], Bool[Tensor, "positive skill"]
]:
    """(columns of this rank's positives, and who is a negative: query to query, skill to query, skill to skill).

    A query's negatives among queries share no answer with it; a positive's among queries are those for which it
    is a negative or of lower gain; among skills those of other lists that are no false negatives of its query.
    """
    gains, _ = candidate_labels(own, skill_ids, context)
    row, column = positive_labels(own, skill_ids).nonzero(as_tuple=True)
    all_gains, _ = candidate_labels(batch, skill_ids, context)
    counts = in_batch_negatives(batch, skill_ids, context)
    counts[_own_cells(batch, skill_ids)] = True
    is_lower = gains[row, column].unsqueeze(1) > all_gains[:, column].T
    own_answers, all_answers = ([context.answers[one.query] for one in lists] for lists in (own, batch))
    return (
        column,
        ~_share_a_group(own_answers, all_answers),
        counts[:, column].T & is_lower,
        in_batch_negatives(own, skill_ids, context)[row],
    )


def _cosines(left: Float[Tensor, "left dim"], right: Float[Tensor, "right dim"]) -> Float[Tensor, "left right"]:
    wide = torch.promote_types(left.dtype, torch.float32)
    with torch.autocast(left.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
        return left.to(wide) @ right.to(wide).T


def _first(vectors: Float[Tensor, "text dim"], dim: int | None) -> Float[Tensor, "text cut"]:
    """The first `dim` coordinates, made unit vectors again; the vectors themselves without `dim`."""
    if dim is None:
        return vectors
    wide = torch.promote_types(vectors.dtype, torch.float32)
    with torch.autocast(vectors.device.type, enabled=False):
        return torch.nn.functional.normalize(vectors[:, :dim].to(wide), dim=1)


def _own_cells(
    lists: Sequence[TrainingList], skill_ids: Sequence[str]
) -> tuple[Int[Tensor, "candidate"], Int[Tensor, "candidate"]]:
    """(row, column) of each list's own candidates, list by list."""
    column = {skill_id: position for position, skill_id in enumerate(skill_ids)}
    sizes = torch.tensor([len(one.skill_ids) for one in lists], dtype=torch.long)
    rows = torch.arange(len(lists)).repeat_interleave(sizes)
    return rows, torch.tensor([column[skill_id] for one in lists for skill_id in one.skill_ids], dtype=torch.long)


def _lexical_scores(
    lists: Sequence[TrainingList], skill_ids: Sequence[str], context: ScoreContext
) -> Float[Tensor, "query skill"]:
    """What BM25 says of every skill of a batch for each query; 0 for what it did not find."""
    column = {skill_id: place for place, skill_id in enumerate(skill_ids)}
    scores = torch.zeros(len(lists), len(skill_ids))
    for row, one in enumerate(lists):
        found = {column[s]: score for s, score in context.lexical[one.query].items() if s in column}
        scores[row, [*found]] = torch.tensor([*found.values()])
    return scores


def _teacher_scores(lists: Sequence[TrainingList]) -> list[float]:
    """One list after the other; `check_teacher_scores` has seen to it that all have some."""
    return [score for one in lists for score in one.teacher_scores or ()]


def _share_a_group(
    rows: Sequence[Set[int]], columns: Sequence[tuple[int, ...] | Set[int]]
) -> Bool[Tensor, "row column"]:
    """Whether a row's groups and a column's groups have one in common."""
    holders: dict[int, list[int]] = {}
    for place, groups in enumerate(columns):
        for group in groups:
            holders.setdefault(group, []).append(place)
    cells = [(row, place) for row, groups in enumerate(rows) for group in groups for place in holders.get(group, ())]
    row, column = torch.tensor(cells, dtype=torch.long).reshape(-1, 2).T
    shared = torch.zeros(len(rows), len(columns), dtype=torch.bool)
    shared[row, column] = True
    return shared
