"""Measure how much other candidates weaken the gradient of rejected skills.

R3 reports that "bilateral balancing" dilutes the push away from rejected skills in a bi-encoder,
and that a cross-encoder loses nothing of it. R3's measurement is not public; the measures here are
ours.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.page import html_page, markdown
from skilltrain.files import staged_folder, write_json, write_text
from skilltrain.models.loading import default_device
from skilltrain.records import Verdict
from skilltrain.terminal import track
from skilltrain.training.loop import step_batches
from skilltrain.training.scores import encoder_scores, list_scores
from skilltrain.training.steps import EncoderStep, PairsToScore, TextsToEncode
from skilltrain.training.train import Train, TrainEncoder, load_data, open_step
from skilltrain.training.training_set import TrainingList

IN_BATCH = "in-batch"
DIRECTIONS = "other directions"
_TINY = 1e-300  # smallest divisor
_MIN_SHARE = 1e-9  # of the largest norm; smaller gradients are rounding errors
Vectors = Float[Tensor, "row dim"]
Part = tuple[str, str]
"""`scores`, `queries` or `skills` (where a gradient is taken); verdict or kind of candidate."""
Rows = Float[Tensor, "row 5"]
"""The columns norm, share, cosine, product and slope, for each query or skill.

Cosine and product are those of the part's gradient and the whole gradient. See `PartOfGradient`.
"""


@dataclass(frozen=True)
class PartOfGradient:
    """Gradient of one part of a loss, at the scores or at the vectors of queries or skills.

    Attributes:
        at: `scores`, `queries` or `skills`.
        part: Verdict or kind of candidate.
        num: Number of rows (queries or skills). The other values are means over them.
        norm: Norm of the part's gradient.
        share: Share of the sum of the norms of all parts.
        cosine: Cosine to the gradient of the whole loss.
        survival: <whole, part> / |part|^2. At 1 the other parts do not weaken the part's gradient;
            below 0 they outweigh it.
        slope: d loss / d score.
    """

    at: str
    part: str
    num: int
    norm: float
    share: float
    cosine: float
    survival: float
    slope: float


def measure_gradients(config: Train, num_batches: int) -> list[PartOfGradient]:
    """Measure the parts of a loss's gradient over the first batches of a training run.

    Nothing is trained.

    Args:
        config: Settings of the training run. The model is the one that training starts from.
        num_batches: Number of batches.

    Raises:
        SkilltrainError: The loss does not see one table of scores, or no list holds a rejected
            skill.
    """
    # An encoder's loss that fits a reranker uses nothing but scores.
    is_late = isinstance(config, TrainEncoder) and config.late_interaction is not None
    if is_late or not config.loss.fits_reranker:
        problem = "gradients are taken apart for a plain loss alone"
        raise SkilltrainError("conflicting-settings", problem, where="loss", fix="name one")
    data = load_data(config)
    if not any(Verdict.REJECTED in row.verdicts for row in data.lists):
        problem = "no list holds a rejected skill"
        fix = "give a quota judged"
        raise SkilltrainError("no-list", problem, where="data.lists", fix=fix)

    # Collect the rows of each part over the first batches.
    step = open_step(config, data, default_device()).eval()
    all_batches = chain.from_iterable(step_batches(step.data.lists, config.training))
    batches = list(islice(all_batches, num_batches))
    measure_batch = _encoder_parts if isinstance(step, EncoderStep) else _reranker_parts
    rows_by_part: dict[Part, list[Rows]] = defaultdict(list)
    for batch in track(batches, "taking gradients apart", len(batches)):
        for part, rows in measure_batch(step, batch):
            rows_by_part[part].append(rows)

    # Average them.
    joined = {part: torch.cat(rows) for part, rows in rows_by_part.items()}
    return [mean_of(at, name, rows) for (at, name), rows in joined.items() if len(rows)]


def mean_of(at: str, part: str, rows: Rows) -> PartOfGradient:
    """Average the rows of one part of the gradient.

    Survival is mean product / mean squared norm, because a single row may have a norm near 0.
    """
    norm, share, cosine, product, slope = rows.mean(0).tolist()
    mean_square = float((rows[:, 0] ** 2).mean())
    survival = product / mean_square if mean_square else 1.0
    return PartOfGradient(at, part, len(rows), norm, share, cosine, survival, slope)


def write_gradients(rows: Sequence[PartOfGradient], config: Train, num_batches: int) -> None:
    """Write gradients.json, gradients.md and gradients.html (with bars) to `config.out`.

    Args:
        rows: Parts of the gradient.
        config: Settings of the training run.
        num_batches: Number of batches that were measured.
    """
    about = {
        "stage": config.stage,
        "model": config.model.source,
        "loss": config.loss.model_dump(mode="json"),
        "gains": {str(verdict): gain for verdict, gain in config.data.gains.items()},
        "num_batches": num_batches,
    }
    # Scores, queries and skills, as far as gradients were taken there.
    locations = list(dict.fromkeys(row.at for row in rows))
    values = {"about": about, "locations": locations, "rows": rows}
    with staged_folder(config.out) as folder:
        write_json(folder / "gradients.json", about | {"parts": [asdict(row) for row in rows]})
        write_text(folder / "gradients.md", markdown("gradients", **values))
        write_text(folder / "gradients.html", html_page("gradients", **values))


def _encoder_parts(step: Any, batch: Sequence[TrainingList]) -> Iterator[tuple[Part, Rows]]:
    """Yield the rows of each part of an encoder's gradient for one batch.

    Gradients are taken at the scores, at the query vectors and at the skill vectors.
    """
    skill_ids = sorted(set(chain.from_iterable(row.skill_ids for row in batch)))
    texts = [step.query_ids[row.query] for row in batch]
    texts += [step.skill_ids[skill_id] for skill_id in skill_ids]
    with torch.no_grad():
        vectors = step(TextsToEncode(texts)).double().cpu()  # [text, dim]
    queries = vectors[: len(batch)].clone().requires_grad_()  # [query, dim]
    skills = vectors[len(batch) :].clone().requires_grad_()  # [skill, dim]

    # One process: the batch and its queries are also those of all ranks.
    scored = encoder_scores(batch, batch, queries, queries, skill_ids, skills, step.context)
    inputs = (scored.scores, queries, skills)
    slopes, query_gradients, skill_gradients = torch.autograd.grad(step.loss(scored), inputs)

    # The part of each cell: a verdict, or an in-batch negative.
    cell_parts = np.where(scored.valid, IN_BATCH, "").tolist()  # [query][skill]
    for query, row in enumerate(batch):
        for skill_id, verdict in zip(row.skill_ids, row.verdicts, strict=True):
            cell_parts[query][skill_ids.index(skill_id)] = str(verdict)
    yield from at_scores(slopes, cell_parts)

    # A score is the product of two vectors: d loss / d query = slopes @ skills.
    queries = queries.detach()
    skills = skills.detach()
    masks = _masks(cell_parts)
    slopes_by_part = {part: torch.where(mask, slopes, 0.0) for part, mask in masks.items()}
    by_query = {part: part_slopes @ skills for part, part_slopes in slopes_by_part.items()}
    by_skill = {part: part_slopes.T @ queries for part, part_slopes in slopes_by_part.items()}
    yield from at_vectors("queries", by_query, query_gradients, queries)
    yield from at_vectors("skills", by_skill, skill_gradients, skills)


def _reranker_parts(step: Any, batch: Sequence[TrainingList]) -> Iterator[tuple[Part, Rows]]:
    """Yield the rows of each part of a reranker's gradient for one batch, at the scores."""
    with torch.no_grad():
        scores = step(PairsToScore([step.make_pairs(row) for row in batch])).double().cpu()
    scored = list_scores(batch, scores.requires_grad_(), step.loss.needs.teacher_scores)
    (slopes,) = torch.autograd.grad(step.loss(scored), scored.scores)  # [query, skill]
    cell_parts = []
    for row in batch:
        padding = [""] * (slopes.shape[1] - len(row.verdicts))
        cell_parts.append([*map(str, row.verdicts), *padding])
    yield from at_scores(slopes, cell_parts)


def _masks(cell_parts: Sequence[Sequence[str]]) -> dict[str, Bool[Tensor, "query skill"]]:
    """Return a mask for each part, which is True at its cells."""
    cells = np.array(cell_parts)  # [query, skill]
    return {part: torch.tensor(cells == part) for part in np.unique(cells).tolist() if part}


def at_scores(
    slopes: Float[Tensor, "query skill"], cell_parts: Sequence[Sequence[str]]
) -> Iterator[tuple[Part, Rows]]:
    """Yield the rows of each part at the scores, one for each query that has the part.

    Args:
        slopes: d loss / d score.
        cell_parts: The part of each cell [query, skill]; "" for no part.
    """
    masks = _masks(cell_parts)
    totals = (slopes.abs() * sum(masks.values())).sum(1).clamp(min=_TINY)  # [query]
    for part, mask in masks.items():
        norm = (slopes.abs() * mask).sum(1)  # [query]
        slope = (slopes * mask).sum(1) / mask.sum(1)  # [query]
        # Columns: norm, share, cosine, product, slope. At the scores no part weakens another, so
        # the cosine is 1, and the product is norm^2.
        rows = torch.stack([norm, norm / totals, torch.ones_like(norm), norm**2, slope], 1)
        yield ("scores", part), rows[mask.any(1)]


def at_vectors(
    at: str, gradients: Mapping[str, Vectors], whole: Vectors, vectors: Vectors
) -> Iterator[tuple[Part, Rows]]:
    """Yield the rows of each part at the vectors, one for each vector that the part reaches.

    The part DIRECTIONS is the difference between the whole gradient and the sum of the parts: it
    comes from other directions of a loss, such as from skill to query.

    Args:
        at: `queries` or `skills`.
        gradients: Gradient by part.
        whole: Gradient of the whole loss.
        vectors: Unit vectors. Gradients are projected onto the tangents of the unit sphere, because
            only these components turn a unit vector.
    """

    def project(gradient: Vectors) -> Vectors:
        """Remove the component along the vectors."""
        return gradient - (gradient * vectors).sum(1, keepdim=True) * vectors

    rest = whole - sum(gradients.values())
    projected = {part: project(rows) for part, rows in {**gradients, DIRECTIONS: rest}.items()}
    whole = project(whole)
    norms = {part: gradient.norm(dim=1) for part, gradient in projected.items()}  # [row]
    totals = torch.stack(list(norms.values())).sum(0)  # [row]
    for part, norm in norms.items():
        product = (projected[part] * whole).sum(1)  # [row]
        cosine = product / (norm * whole.norm(dim=1)).clamp(min=_TINY)
        # Columns: norm, share, cosine, product, slope. A part at vectors has no slope.
        rows = torch.stack([norm, norm / totals, cosine, product, torch.zeros_like(norm)], 1)
        is_reached = norm > _MIN_SHARE * totals.max()
        yield (at, part), rows[is_reached]
