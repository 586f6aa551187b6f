"""Measure how much of the gradient of rejected skills survives beside that of all other candidates.

R3 reports that "bilateral balancing" dilutes the push away from rejected skills in a bi-encoder,
and that a cross-encoder loses nothing of it. How that was measured is not public; the measures here
are ours.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

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
Vectors = Float[Tensor, "row dim"]
Part = tuple[str, str]
"""Where a gradient is taken (scores, queries, skills); its verdict or kind of candidate."""
Rows = Float[Tensor, "row 5"]
"""For each query or skill: norm, share, cosine to the whole, product with the whole, and slope."""


@dataclass(frozen=True)
class PartOfGradient:
    """What one part of a loss does at the scores, or at the vectors of queries or skills.

    Attributes:
        num: Number of rows (queries or skills); the other values are means over them.
        norm: Norm of the part's gradient.
        share: Its share of the norms of all parts.
        cosine: Its cosine to the gradient of the whole loss.
        survival: How far the whole goes along the part's gradient, in lengths of it. 1: all of it
            survives; below 0: the reverse.
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
    """Measure the parts over the first batches of a training run, with the model it starts from.

    Nothing is trained.

    Raises:
        SkilltrainError: The loss does not see one table of scores, or no list holds a rejected
            skill.
    """
    is_late = isinstance(config, TrainEncoder) and config.late_interaction is not None
    if is_late or not config.loss.fits_reranker:
        raise SkilltrainError(
            "conflicting-settings",
            "gradients are taken apart for a plain loss alone",
            where="loss",
            fix="name one",
        )
    data = load_data(config)
    if not any(Verdict.REJECTED in row.verdicts for row in data.lists):
        raise SkilltrainError(
            "no-list",
            "no list holds a rejected skill",
            where="data.lists",
            fix="give a quota judged",
        )
    step = open_step(config, data, default_device()).eval()
    lists = chain.from_iterable(step_batches(step.data.lists, config.training))
    batches = [*islice(lists, num_batches)]
    take_apart = _encoder_parts if isinstance(step, EncoderStep) else _reranker_parts
    rows_by_part: dict[Part, list[Rows]] = defaultdict(list)
    for batch in track(batches, "taking gradients apart", len(batches)):
        for part, rows in take_apart(step, batch):
            rows_by_part[part].append(rows)
    joined = {part: torch.cat(rows) for part, rows in rows_by_part.items()}
    return [mean_of(*part, rows) for part, rows in joined.items() if len(rows)]


def mean_of(at: str, part: str, rows: Rows) -> PartOfGradient:
    """Return the means of a part's rows.

    Survival is that of all rows together, because a single row may have next to no norm.
    """
    norm, share, cosine, product, slope = rows.mean(0).tolist()
    mean_square = float((rows[:, 0] ** 2).mean())
    survival = product / mean_square if mean_square else 1.0
    return PartOfGradient(at, part, len(rows), norm, share, cosine, survival, slope)


def write_gradients(parts: Sequence[PartOfGradient], config: Train, num_batches: int) -> None:
    """Write gradients.json, gradients.md and gradients.html (with bars) to `config.out`."""
    about = {
        "stage": config.stage,
        "model": config.model.source,
        "loss": config.loss.model_dump(mode="json"),
        "gains": {str(verdict): gain for verdict, gain in config.data.gains.items()},
        "num_batches": num_batches,
    }
    places = [*dict.fromkeys(part.at for part in parts)]
    values = {"about": about, "places": places, "found": parts}
    with staged_folder(config.out) as folder:
        write_json(folder / "gradients.json", about | {"parts": [asdict(part) for part in parts]})
        write_text(folder / "gradients.md", markdown("gradients", **values))
        write_text(folder / "gradients.html", html_page("gradients", **values))


def _encoder_parts(step: Any, batch: Sequence[TrainingList]) -> Iterator[tuple[Part, Rows]]:
    skill_ids = sorted({*chain.from_iterable(row.skill_ids for row in batch)})
    texts = [step.query_ids[row.query] for row in batch]
    texts += [step.skill_ids[skill_id] for skill_id in skill_ids]
    with torch.no_grad():
        vectors = step(TextsToEncode(texts)).double().cpu()
    queries = vectors[: len(batch)].clone().requires_grad_()
    skills = vectors[len(batch) :].clone().requires_grad_()
    scored = encoder_scores(batch, batch, queries, queries, skill_ids, skills, step.context)
    inputs = (scored.scores, queries, skills)
    slopes, query_gradients, skill_gradients = torch.autograd.grad(step.loss(scored), inputs)

    names = [[IN_BATCH if counts else "" for counts in row] for row in scored.valid.tolist()]
    for cells, row in zip(names, batch, strict=True):
        for skill_id, verdict in zip(row.skill_ids, row.verdicts, strict=True):
            cells[skill_ids.index(skill_id)] = str(verdict)
    yield from at_scores(slopes, names)

    queries = queries.detach()
    skills = skills.detach()
    slopes_by_part = {part: torch.where(mask, slopes, 0.0) for part, mask in _masks(names).items()}
    by_query = {part: cells @ skills for part, cells in slopes_by_part.items()}
    by_skill = {part: cells.T @ queries for part, cells in slopes_by_part.items()}
    yield from at_vectors("queries", by_query, query_gradients, queries)
    yield from at_vectors("skills", by_skill, skill_gradients, skills)


def _reranker_parts(step: Any, batch: Sequence[TrainingList]) -> Iterator[tuple[Part, Rows]]:
    with torch.no_grad():
        scores = step(PairsToScore([step.make_pairs(row) for row in batch])).double().cpu()
    scored = list_scores(batch, scores.requires_grad_(), step.loss.needs.teacher_scores)
    (slopes,) = torch.autograd.grad(step.loss(scored), scored.scores)
    width = slopes.shape[1]
    names = [[*map(str, row.verdicts)] + [""] * (width - len(row.verdicts)) for row in batch]
    yield from at_scores(slopes, names)


def _masks(names: Sequence[Sequence[str]]) -> dict[str, Bool[Tensor, "query skill"]]:
    """Return the cells of each name."""
    parts = sorted({*chain.from_iterable(names)} - {""})
    return {part: torch.tensor([[name == part for name in row] for row in names]) for part in parts}


def at_scores(
    slopes: Float[Tensor, "query skill"], names: Sequence[Sequence[str]]
) -> Iterator[tuple[Part, Rows]]:
    """Yield the rows of each part at the scores, one for each query that has the part.

    Args:
        slopes: d loss / d score.
        names: The part of each cell, "" for none.
    """
    masks = _masks(names)
    totals = (slopes.abs() * sum(masks.values())).sum(1).clamp(min=1e-300)  # [query]
    for part, mask in masks.items():
        norm = (slopes.abs() * mask).sum(1)  # [query]
        slope = (slopes * mask).sum(1) / mask.sum(1)  # [query]
        rows = torch.stack([norm, norm / totals, torch.ones_like(norm), norm**2, slope], 1)
        yield ("scores", part), rows[mask.any(1)]


def at_vectors(
    at: str, gradients: Mapping[str, Vectors], whole: Vectors, vectors: Vectors
) -> Iterator[tuple[Part, Rows]]:
    """Yield the rows of each part at the vectors, one for each vector that the part reaches.

    The rest of the `whole` that the parts' `gradients` do not add up to comes from a loss's other
    directions. Of all gradients only what turns the unit `vectors` counts.
    """

    def turning(gradient: Vectors) -> Vectors:
        return gradient - (gradient * vectors).sum(1, keepdim=True) * vectors

    rest = whole - sum(gradients.values())
    parts = {part: turning(rows) for part, rows in {**gradients, DIRECTIONS: rest}.items()}
    whole = turning(whole)
    norms = {part: rows.norm(dim=1) for part, rows in parts.items()}  # [row]
    totals = torch.stack([*norms.values()]).sum(0)  # [row]
    for part, norm in norms.items():
        product = (parts[part] * whole).sum(1)  # [row]
        cosine = product / (norm * whole.norm(dim=1)).clamp(min=1e-300)
        rows = torch.stack([norm, norm / totals, cosine, product, torch.zeros_like(norm)], 1)
        yield (at, part), rows[norm > 1e-9 * totals.max()]
