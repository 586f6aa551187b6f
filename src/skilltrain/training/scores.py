"""What a loss sees of a step: scores from vectors, gains, and who may be a negative of whom."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.losses import EncoderLoss, RerankerLoss
from skilltrain.losses.scored_batch import ScoredBatch, SideScores, SideTerm
from skilltrain.models.micro_batches import on_device
from skilltrain.models.pooling import at_least_float32
from skilltrain.texts import name_key
from skilltrain.training.training_set import TrainingList, TrainingSet


@dataclass(frozen=True)
class ScoreContext:
    """What stays the same over a training: what the loss needs, and which skills and queries belong together.

    `groups` are a skill's name and near-duplicate cluster: skills that share one answer the same
    queries. `answers` are, for a query's text, the groups of all its answers.
    """

    in_batch: bool
    needs_sides: bool
    needs_teacher_scores: bool
    groups: Mapping[str, tuple[str, ...]]
    answers: Mapping[str, Set[str]]

    @classmethod
    def of(cls, data: TrainingSet, loss: EncoderLoss, in_batch: bool) -> "ScoreContext":

        def groups_of(key: str) -> tuple[str, ...]:
            skill = data.skills.get(key)
            skill_id, name = (skill.skill_id, name_key(skill.name)) if skill else (key, "")
            own = f"name {name}" if name else f"id {skill_id}"
            return (
                (own, f"cluster {data.clusters[skill_id]}") if skill_id in data.clusters else (own,)
            )

        answers: dict[str, set[str]] = {}
        for one in data.lists:
            answers.setdefault(one.query, set()).update(
                g for skill_id in one.positives for g in groups_of(skill_id)
            )
        groups = {skill_id: groups_of(skill_id) for skill_id in data.skills}
        return cls(in_batch, loss.needs_sides, loss.needs_teacher_scores, groups, answers)


def check_teacher_scores(data: TrainingSet, loss: EncoderLoss | RerankerLoss) -> None:
    """Raises SkilltrainError, naming a query, where `loss` learns from a teacher that has not scored a list."""
    if not loss.needs_teacher_scores:
        return
    without = [
        one.query_id
        for one in data.lists
        if all(math.isnan(score) for score in one.teacher_scores or ())
    ]
    if without:
        what = f"loss {loss.name} needs teacher scores, and {len(without)} of {len(data.lists)} lists have none"
        fix = "fill teacher_scores, or choose another loss"
        raise SkilltrainError(f"{what} (query {without[0]!r})", where="data.lists", fix=fix)


class _Cells:
    """Where the candidates of lists stand in a table that has a row for each list."""

    def __init__(self, columns: Sequence[Sequence[int]], width: int) -> None:
        rows = np.repeat(np.arange(len(columns)), [*map(len, columns)])
        self.own = rows.astype(int), np.fromiter(chain.from_iterable(columns), int)
        self.mask = np.zeros((len(columns), width), bool)  # which cells are the lists' own
        self.mask[self.own] = True

    @classmethod
    def among(cls, lists: Sequence[TrainingList], skill_ids: Sequence[str]) -> "_Cells":
        """The lists' candidates among all skills of a batch."""
        place = {skill_id: number for number, skill_id in enumerate(skill_ids)}
        return cls(
            [[place[skill_id] for skill_id in one.skill_ids] for one in lists], len(skill_ids)
        )

    def table(
        self, values: Iterable[Iterable[float]], empty: float | bool
    ) -> Shaped[np.ndarray, "query skill"]:
        """The lists' values in their cells, `empty` elsewhere; booleans where that is one."""
        table = np.full(self.mask.shape, empty, bool if isinstance(empty, bool) else np.float32)
        table[self.own] = [*chain.from_iterable(values)]
        return table


def in_batch_negatives(
    lists: Sequence[TrainingList], skill_ids: Sequence[str], context: ScoreContext
) -> Bool[np.ndarray, "query skill"]:
    """Which skills of other lists count against each query: all but known answers and their twins (`groups`)."""
    answers = [context.answers[one.query] for one in lists]
    known = _share_a_group(answers, [context.groups[skill_id] for skill_id in skill_ids])
    return ~(known | _Cells.among(lists, skill_ids).mask)


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

    Vectors are unit vectors; `all_queries` are those of `batch`, given where the loss needs sides. For a loss that
    learns from a teacher only the candidates that the teacher scored are valid: no in-batch negatives.
    """
    device = skill_vectors.device
    cells = _Cells.among(own, skill_ids)
    valid = cells.mask
    if context.in_batch:
        valid = valid | in_batch_negatives(own, skill_ids, context)
    sides = _side_negatives(own, batch, skill_ids, context) if all_queries is not None else ()
    negatives = [on_device(part, device) for part in sides]

    def scored(dim: int | None = None) -> ScoredBatch:
        """Score by the whole vectors, or by their first `dim` coordinates, made unit vectors again."""
        queries = _first(query_vectors, dim)
        skills = _first(skill_vectors, dim)
        scores = _cosines(queries, skills)
        result = _labelled(own, cells, valid, scores, context.needs_teacher_scores)
        result = replace(result, truncated=scored)
        if all_queries is None:
            return result
        others = _first(all_queries, dim)
        column, *masks = negatives
        positives = skills[column]
        pairs = (queries, others), (positives, others), (positives, skills)
        terms = [SideTerm(_cosines(*pair), mask) for pair, mask in zip(pairs, masks, strict=True)]
        return replace(result, sides=SideScores(*terms))

    return scored()


def list_scores(
    lists: Sequence[TrainingList], flat: Float[Tensor, "pair"], needs_teacher_scores: bool
) -> ScoredBatch:
    """What the reranker's loss sees: the scores of the lists' pairs, one list after the other, as one table."""
    sizes = [len(one.gains) for one in lists]
    scores = torch.nn.utils.rnn.pad_sequence([*flat.split(sizes)], batch_first=True)
    cells = _Cells([range(size) for size in sizes], max(sizes))
    return _labelled(lists, cells, cells.mask, scores, needs_teacher_scores)


def _labelled(
    lists: Sequence[TrainingList],
    cells: _Cells,
    valid: Bool[np.ndarray, "query skill"],
    scores: Float[Tensor, "query skill"],
    needs_teacher: bool,
) -> ScoredBatch:
    """The scores with what the lists say: gains, positives by their verdicts, and the teacher's scores."""
    gains = on_device(cells.table((one.gains for one in lists), 0.0), scores.device).to(
        scores.dtype
    )
    positive = on_device(cells.table((one.is_positive for one in lists), False), scores.device)
    if not needs_teacher:
        return ScoredBatch(scores, gains, on_device(valid, scores.device), positive=positive)
    teacher = cells.table((one.teacher_scores or () for one in lists), math.nan)
    taught = on_device(valid & ~np.isnan(teacher), scores.device)
    return ScoredBatch(scores, gains, taught, on_device(teacher, scores.device), positive=positive)


def _side_negatives(
    own: Sequence[TrainingList],
    batch: Sequence[TrainingList],
    skill_ids: Sequence[str],
    context: ScoreContext,
) -> tuple[
    Int[np.ndarray, "positive"],
    Bool[np.ndarray, "own all"],
    Bool[np.ndarray, "positive all"],
    Bool[np.ndarray, "positive skill"],
]:
    """(columns of this rank's positives, and who is a negative: query to query, skill to query, skill to skill).

    Queries that share no answer; queries for which a positive is a negative or of lower gain; in-batch negatives.
    """
    cells, of_all = _Cells.among(own, skill_ids), _Cells.among(batch, skill_ids)
    row, column = cells.table((one.is_positive for one in own), False).nonzero()
    gains, all_gains = (
        part.table((one.gains for one in some), 0.0)
        for part, some in ((cells, own), (of_all, batch))
    )
    counts = in_batch_negatives(batch, skill_ids, context) | of_all.mask
    is_lower = gains[row, column][:, None] > all_gains[:, column].T
    answers, all_answers = ([context.answers[one.query] for one in lists] for lists in (own, batch))
    to_skills = in_batch_negatives(own, skill_ids, context)[row]
    return column, ~_share_a_group(answers, all_answers), counts[:, column].T & is_lower, to_skills


def _cosines(
    left: Float[Tensor, "left dim"], right: Float[Tensor, "right dim"]
) -> Float[Tensor, "left right"]:
    with torch.autocast(left.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
        return at_least_float32(left) @ at_least_float32(right).T


def _first(vectors: Float[Tensor, "text dim"], dim: int | None) -> Float[Tensor, "text cut"]:
    """The first `dim` coordinates, made unit vectors again; the vectors themselves without `dim`."""
    if dim is None:
        return vectors
    with torch.autocast(vectors.device.type, enabled=False):
        return torch.nn.functional.normalize(at_least_float32(vectors[:, :dim]), dim=1)


def _share_a_group(
    rows: Sequence[Set[str]], columns: Sequence[tuple[str, ...] | Set[str]]
) -> Bool[np.ndarray, "row column"]:
    """Whether a row's groups and a column's groups have one in common."""
    holders: dict[str, list[int]] = {}
    for place, groups in enumerate(columns):
        for group in groups:
            holders.setdefault(group, []).append(place)
    shared = np.zeros((len(rows), len(columns)), bool)
    for row, groups in enumerate(rows):
        shared[row, [place for group in groups for place in holders.get(group, ())]] = True
    return shared
