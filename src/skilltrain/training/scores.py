"""What a loss sees of a step: scores from vectors, gains, and who may be a negative of whom."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.losses import EncoderLoss, RerankerLoss, ScoredBatch, SideScores, SideTerm, positive_cells
from skilltrain.texts import name_key
from skilltrain.training.training_set import TrainingList, TrainingSet


@dataclass(frozen=True)
class ScoreContext:
    """What stays the same over a training: what the loss needs, and which skills and queries belong together.

    `groups` are the numbers of a skill's name and, if it is in one, its near-duplicate cluster: skills that share
    one answer the same queries. `answers` are, for a query's text, the groups of every skill known to answer it,
    gathered over all lists with that text.
    """

    in_batch: bool
    needs_sides: bool
    needs_teacher_scores: bool
    groups: Mapping[str, tuple[int, ...]]
    answers: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, data: TrainingSet, loss: EncoderLoss, in_batch: bool) -> "ScoreContext":
        """The context of a training. Raises SkilltrainError as `check_teacher_scores` does."""
        check_teacher_scores(data, loss)
        numbers: dict[tuple[str, str | int], int] = {}

        def groups_of(skill_id: str) -> tuple[int, ...]:
            name = name_key(data.skills[skill_id].name) if skill_id in data.skills else ""
            keys: list[tuple[str, str | int]] = [("name", name) if name else ("id", skill_id)]
            if skill_id in data.clusters:
                keys.append(("cluster", data.clusters[skill_id]))
            return tuple(numbers.setdefault(key, len(numbers)) for key in keys)

        groups = {skill_id: groups_of(skill_id) for skill_id in data.skills}
        answers: dict[str, set[int]] = {}
        for one in data.lists:
            known = answers.setdefault(one.query, set())
            for skill_id in one.positives:
                known.update(groups[skill_id] if skill_id in groups else groups_of(skill_id))
        frozen = {query: frozenset(known) for query, known in answers.items()}
        return cls(in_batch, loss.needs_sides, loss.needs_teacher_scores, groups, frozen)


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
    vectors = _Vectors(query_vectors, skill_vectors, all_queries)
    gains, valid = candidate_labels(own, skill_ids, context)
    teacher = None
    if context.needs_teacher_scores:
        cells = _own_cells(own, skill_ids)
        teacher = torch.full_like(gains, torch.nan)
        teacher[cells] = torch.tensor(_teacher_scores(own), dtype=gains.dtype)
        valid &= ~teacher.isnan()
    negatives = _side_negatives(own, batch, skill_ids, context) if all_queries is not None else None
    labels = _Labels(gains, valid, teacher, negatives).on(skill_vectors.device)
    return _scored(vectors, labels)


def list_scores(lists: Sequence[TrainingList], flat: Float[Tensor, "pair"], needs_teacher_scores: bool) -> ScoredBatch:
    """What the reranker's loss sees: the scores of the lists' pairs, one list after the other, as one table."""
    sizes = torch.tensor([len(one.gains) for one in lists])
    cells = (torch.arange(int(sizes.max())) < sizes[:, None]).to(flat.device)
    scores = flat.new_zeros(cells.shape).masked_scatter(cells, flat)
    gains = torch.zeros_like(scores).masked_scatter(cells, flat.new_tensor([g for one in lists for g in one.gains]))
    if not needs_teacher_scores:
        return ScoredBatch(scores, gains, cells)
    teacher = torch.full_like(scores, torch.nan).masked_scatter(cells, flat.new_tensor(_teacher_scores(lists)))
    return ScoredBatch(scores, gains, cells & ~teacher.isnan(), teacher)


@dataclass(frozen=True)
class _Vectors:
    """Unit vectors of a step."""

    queries: Float[Tensor, "own dim"]
    skills: Float[Tensor, "skill dim"]
    all_queries: Float[Tensor, "all dim"] | None

    def truncated(self, dim: int) -> "_Vectors":
        """The first `dim` coordinates, made unit vectors again."""
        if dim > self.skills.shape[1]:
            raise SkilltrainError(f"{dim} is more than the encoder's {self.skills.shape[1]}", where="loss.dims")
        all_queries = None if self.all_queries is None else _unit(self.all_queries[:, :dim])
        return _Vectors(_unit(self.queries[:, :dim]), _unit(self.skills[:, :dim]), all_queries)


@dataclass(frozen=True)
class _SideNegatives:
    """Which of all queries or skills of a step are negatives of this rank's queries and their positives."""

    column: Int[Tensor, "positive"]
    query_to_query: Bool[Tensor, "own all"]
    skill_to_query: Bool[Tensor, "positive all"]
    skill_to_skill: Bool[Tensor, "positive skill"]


@dataclass(frozen=True)
class _Labels:
    """Everything of a batch that is no score."""

    gains: Float[Tensor, "own skill"]
    valid: Bool[Tensor, "own skill"]
    teacher: Float[Tensor, "own skill"] | None
    negatives: _SideNegatives | None

    def on(self, device: torch.device) -> "_Labels":
        """The same on `device`."""
        teacher = None if self.teacher is None else self.teacher.to(device)
        negatives = None
        if (sides := self.negatives) is not None:
            tensors = (sides.column, sides.query_to_query, sides.skill_to_query, sides.skill_to_skill)
            negatives = _SideNegatives(*(tensor.to(device) for tensor in tensors))
        return _Labels(self.gains.to(device), self.valid.to(device), teacher, negatives)


def _scored(vectors: _Vectors, labels: _Labels) -> ScoredBatch:
    scores = _cosines(vectors.queries, vectors.skills)
    sides = None
    if labels.negatives is not None and vectors.all_queries is not None:
        positives = vectors.skills[labels.negatives.column]
        sides = SideScores(
            SideTerm(_cosines(vectors.queries, vectors.all_queries), labels.negatives.query_to_query),
            SideTerm(_cosines(positives, vectors.all_queries), labels.negatives.skill_to_query),
            SideTerm(_cosines(positives, vectors.skills), labels.negatives.skill_to_skill),
        )
    return ScoredBatch(
        scores, labels.gains.to(scores.dtype), labels.valid, labels.teacher, sides,
        truncated=lambda dim: _scored(vectors.truncated(dim), labels),
    )  # fmt: skip


def _side_negatives(
    own: Sequence[TrainingList], batch: Sequence[TrainingList], skill_ids: Sequence[str], context: ScoreContext
) -> _SideNegatives:
    """A query's negatives among queries share no answer with it; a positive's among queries are those for which it
    is a negative or of lower gain; among skills those of other lists that are no false negatives of its query.
    """
    gains, valid = candidate_labels(own, skill_ids, context)
    row, column = positive_cells(gains, valid)
    all_gains, _ = candidate_labels(batch, skill_ids, context)
    counts = in_batch_negatives(batch, skill_ids, context)
    counts[_own_cells(batch, skill_ids)] = True
    is_lower = gains[row, column].unsqueeze(1) > all_gains[:, column].T
    own_answers, all_answers = ([context.answers[one.query] for one in lists] for lists in (own, batch))
    return _SideNegatives(
        column,
        ~_share_a_group(own_answers, all_answers),
        counts[:, column].T & is_lower,
        in_batch_negatives(own, skill_ids, context)[row],
    )


def _cosines(left: Float[Tensor, "left dim"], right: Float[Tensor, "right dim"]) -> Float[Tensor, "left right"]:
    wide = torch.promote_types(left.dtype, torch.float32)
    with torch.autocast(left.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
        return left.to(wide) @ right.to(wide).T


def _unit(vectors: Float[Tensor, "text dim"]) -> Float[Tensor, "text dim"]:
    wide = torch.promote_types(vectors.dtype, torch.float32)
    with torch.autocast(vectors.device.type, enabled=False):
        return torch.nn.functional.normalize(vectors.to(wide), dim=1)


def _own_cells(
    lists: Sequence[TrainingList], skill_ids: Sequence[str]
) -> tuple[Int[Tensor, "candidate"], Int[Tensor, "candidate"]]:
    """(row, column) of each list's own candidates, list by list."""
    column = {skill_id: position for position, skill_id in enumerate(skill_ids)}
    sizes = torch.tensor([len(one.skill_ids) for one in lists], dtype=torch.long)
    rows = torch.arange(len(lists)).repeat_interleave(sizes)
    return rows, torch.tensor([column[skill_id] for one in lists for skill_id in one.skill_ids], dtype=torch.long)


def _teacher_scores(lists: Sequence[TrainingList]) -> list[float]:
    """One list after the other; `check_teacher_scores` has seen to it that all have some."""
    return [score for one in lists for score in one.teacher_scores or ()]


def _share_a_group(
    rows: Sequence[frozenset[int]], columns: Sequence[tuple[int, ...] | frozenset[int]]
) -> Bool[Tensor, "row column"]:
    """Whether a row's groups and a column's groups have one in common."""
    position = {group: i for i, group in enumerate({group for groups in rows for group in groups})}
    sizes = torch.tensor([len(groups) for groups in rows], dtype=torch.long)
    held = torch.tensor([position[group] for groups in rows for group in groups], dtype=torch.long)
    holds = torch.zeros(len(rows), len(position) + 1, dtype=torch.bool)  # the last stands for groups of no row
    holds[torch.arange(len(rows)).repeat_interleave(sizes), held] = True
    longest = max((len(groups) for groups in columns), default=0)
    slots = [[position.get(group, -1) for group in groups] + [-1] * (longest - len(groups)) for groups in columns]
    shared = torch.zeros(len(rows), len(columns), dtype=torch.bool)
    for slot in torch.tensor(slots, dtype=torch.long).reshape(len(columns), longest).T:
        shared |= holds[:, slot]
    return shared
