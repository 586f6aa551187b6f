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
OTHER_DIRECTIONS = "other directions"  # of a loss, such as from skill to query
_TINY = 1e-300  # smallest divisor
_ROUNDING_ERROR = 1e-9  # largest relative error of a norm
Vectors = Float[Tensor, "row dim"]
Part = tuple[str, str]
"""Location of a gradient (`scores`, `queries` or `skills`), and verdict or kind of candidate."""
Statistics = Float[Tensor, "row 5"]
"""The columns norm, share, cosine, product and slope, for each query or skill.

Cosine and product are those of the part's gradient and the whole gradient. See `PartOfGradient`.
"""
StatisticsOfParts = Iterator[tuple[Part, Statistics]]


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

    A part is the gradient that comes from one kind of candidates, such as rejected skills. Nothing
    is trained.

    Args:
        config: Settings of the training run. The model is the one that training starts from.
        num_batches: Number of batches.

    Raises:
        SkilltrainError: The encoder uses late interaction, the loss needs an encoder (such as
            `matryoshka`), or no list holds a rejected skill.
    """
    # The gradient can be split by candidate only if a candidate has one score, the product of two
    # vectors. Late interaction compares many token vectors. A reranker gives one score, so a loss
    # that fits no reranker reads several scores, for example one for each length of the vectors.
    is_late = isinstance(config, TrainEncoder) and config.late_interaction is not None
    reads_one_score = config.loss.fits_reranker  # for each candidate
    if is_late or not reads_one_score:
        problem = "gradients are taken apart for a plain loss without late interaction only"
        fix = "name a plain loss, such as infonce"
        raise SkilltrainError("conflicting-settings", problem, where="loss", fix=fix)
    data = load_data(config)
    # A rejected skill is a candidate that a judge found not to fit the query.
    if not any(Verdict.REJECTED in training_list.verdicts for training_list in data.lists):
        problem = "no list holds a rejected skill"
        fix = "make lists with quotas={judged: 4}, for example"
        raise SkilltrainError("no-list", problem, where="data.lists", fix=fix)

    # Open the model, and take the first batches.
    step = open_step(config, data, default_device()).eval()
    all_batches = chain.from_iterable(step_batches(step.data.lists, config.training))
    batches = list(islice(all_batches, num_batches))

    # Measure each part in each batch.
    measure_batch = _encoder_statistics if isinstance(step, EncoderStep) else _reranker_statistics
    statistics_by_part: dict[Part, list[Statistics]] = defaultdict(list)
    for batch in track(batches, "taking gradients apart", len(batches)):
        for part, statistics in measure_batch(step, batch):
            statistics_by_part[part].append(statistics)

    # Average each part over all batches.
    means = []
    for (location, name), batch_statistics in statistics_by_part.items():
        statistics = torch.cat(batch_statistics)  # [row of all batches, 5]
        if len(statistics):  # a kind of candidates may not occur in any batch
            means.append(mean_of(location, name, statistics))
    return means


def mean_of(location: str, part: str, statistics: Statistics) -> PartOfGradient:
    """Average the statistics of one part of the gradient over all queries or skills.

    Survival is mean product / mean squared norm, because a single row may have a norm near 0.
    """
    norm, share, cosine, product, slope = statistics.mean(0).tolist()
    mean_square = float((statistics[:, 0] ** 2).mean())  # column 0 is the norm
    survival = product / mean_square if mean_square else 1.0
    return PartOfGradient(location, part, len(statistics), norm, share, cosine, survival, slope)


def write_gradients(gradients: Sequence[PartOfGradient], config: Train, num_batches: int) -> None:
    """Write gradients.json, gradients.md and gradients.html (with bars) to `config.out`.

    Args:
        gradients: The parts of the gradient at all locations.
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
    # The report has a section for each location: the scores, and for an encoder also the queries
    # and the skills.
    locations = list(dict.fromkeys(gradient.at for gradient in gradients))
    values = {"about": about, "locations": locations, "rows": gradients}
    with staged_folder(config.out) as folder:
        rows = [asdict(gradient) for gradient in gradients]
        write_json(folder / "gradients.json", about | {"parts": rows})
        write_text(folder / "gradients.md", markdown("gradients", **values))
        write_text(folder / "gradients.html", html_page("gradients", **values))


def _encoder_statistics(step: Any, batch: Sequence[TrainingList]) -> StatisticsOfParts:
    """Measure how much each kind of candidate contributes to the gradient of an encoder's loss.

    The kinds are the verdicts of the training lists, and the in-batch negatives.

    Yields:
        Statistics of each kind's gradient: first of the scores, then of the query vectors, then of
        the skill vectors.
    """
    # Encode the queries and the distinct skills of the batch.
    skill_ids = sorted(set(chain.from_iterable(each.skill_ids for each in batch)))
    texts = [step.query_token_ids[each.query] for each in batch]
    texts += [step.skill_token_ids[skill_id] for skill_id in skill_ids]
    with torch.no_grad():
        vectors = step(TextsToEncode(texts)).double().cpu()  # [text, dim]
    queries = vectors[: len(batch)].clone().requires_grad_()  # [query, dim]
    skills = vectors[len(batch) :].clone().requires_grad_()  # [skill, dim]

    # Compute the gradient of the whole loss. There is one process, so its lists are the batch.
    scored = encoder_scores(
        local_lists=batch,
        batch=batch,
        query_vectors=queries,
        all_queries=queries,
        skill_ids=skill_ids,
        skill_vectors=skills,
        context=step.context,
    )
    inputs = (scored.scores, queries, skills)
    score_gradients, query_gradients, skill_gradients = torch.autograd.grad(
        step.loss(scored), inputs
    )

    is_counted = scored.valid  # [query, skill], whether the loss counts the score
    part_names = _encoder_part_names(batch, skill_ids, is_counted)
    yield from score_statistics(score_gradients, part_names)

    # A score is the product of two vectors, so d loss / d query = (d loss / d score) @ skills.
    queries = queries.detach()
    skills = skills.detach()
    by_query = {}
    by_skill = {}
    for part, mask in _masks(part_names).items():
        part_gradients = torch.where(mask, score_gradients, 0.0)  # [query, skill]
        by_query[part] = part_gradients @ skills  # [query, dim]
        by_skill[part] = part_gradients.T @ queries  # [skill, dim]
    yield from vector_statistics("queries", by_query, query_gradients, queries)
    yield from vector_statistics("skills", by_skill, skill_gradients, skills)


def _encoder_part_names(
    batch: Sequence[TrainingList], skill_ids: Sequence[str], valid: Bool[Tensor, "query skill"]
) -> list[list[str]]:
    """Return the part of each score [query][skill]: the verdict on the skill, or IN_BATCH.

    Args:
        batch: The list of each query.
        skill_ids: The distinct skills of all lists.
        valid: Whether the loss counts the score. A score that it does not count has the part "",
            unless its skill is in the list.
    """
    # At first, every counted skill is an in-batch negative. Then put in the verdicts of each list.
    part_names = np.where(valid, IN_BATCH, "").tolist()
    for names, training_list in zip(part_names, batch, strict=True):
        for skill_id, verdict in zip(training_list.skill_ids, training_list.verdicts, strict=True):
            names[skill_ids.index(skill_id)] = str(verdict)
    return part_names


def _reranker_statistics(step: Any, batch: Sequence[TrainingList]) -> StatisticsOfParts:
    """Measure the gradient of a reranker's loss with respect to its scores, for one batch.

    The gradient is split by verdict: one part for each verdict.

    Yields:
        Each part with its statistics.
    """
    # Score all candidates of all lists.
    pairs = PairsToScore([step.make_pairs(training_list) for training_list in batch])
    with torch.no_grad():
        pair_scores = step(pairs).double().cpu()  # [pair]

    # Measure the gradient at the scores. None flows back into the model.
    pair_scores.requires_grad_()
    scored = list_scores(batch, pair_scores, needs_teacher_scores=step.loss.needs.teacher_scores)
    [score_gradients] = torch.autograd.grad(step.loss(scored), scored.scores)  # [query, candidate]

    # The part of each score is the verdict on the candidate. Short lists are padded.
    num_columns = score_gradients.shape[1]
    part_names = []
    for training_list in batch:
        names = [str(verdict) for verdict in training_list.verdicts]
        names += [""] * (num_columns - len(names))
        part_names.append(names)
    yield from score_statistics(score_gradients, part_names)


def _masks(part_names: Sequence[Sequence[str]]) -> dict[str, Bool[Tensor, "query skill"]]:
    """Return a mask for each part, which is True at the scores of the part.

    Args:
        part_names: The part of each score [query][skill]; "" for no part.
    """
    names = np.array(part_names)  # [query, skill]
    return {part: torch.tensor(names == part) for part in np.unique(names).tolist() if part}


def score_statistics(
    gradients: Float[Tensor, "query skill"], part_names: Sequence[Sequence[str]]
) -> StatisticsOfParts:
    """Measure each part of the gradient with respect to the scores.

    A part is the gradient of all scores with the same part name, such as a verdict. Its statistics
    have these columns:

    - norm: sum of the absolute gradients (L1 norm),
    - share of the norms of all parts,
    - cosine to the whole gradient: always 1,
    - product with the whole gradient: always norm^2,
    - slope: mean gradient.

    Args:
        gradients: d loss / d score.
        part_names: The part of each score [query][skill]; "" for no part.

    Yields:
        Each part with its statistics: a row for each query that has a score of the part.
    """
    sizes = gradients.abs()  # [query, skill]
    has_part = torch.tensor(np.array(part_names) != "")  # [query, skill]
    totals = (sizes * has_part).sum(1).clamp(min=_TINY)  # [query]
    for part, mask in _masks(part_names).items():
        norm = (sizes * mask).sum(1)  # [query]
        share = norm / totals  # [query]
        slope = (gradients * mask).sum(1) / mask.sum(1)  # [query]
        # Each score has one part only, so no part weakens another. These two values are defined to
        # say so.
        cosine = torch.ones_like(norm)  # [query]
        product = norm**2  # [query]
        statistics = torch.stack([norm, share, cosine, product, slope], 1)  # [query, 5]
        yield ("scores", part), statistics[mask.any(1)]


def vector_statistics(
    location: str, gradients: Mapping[str, Vectors], whole: Vectors, vectors: Vectors
) -> StatisticsOfParts:
    """Measure each part of the gradient with respect to the vectors of queries or skills.

    A gradient is first projected onto the tangents of the unit sphere, because only this component
    turns a unit vector. The statistics of a part have these columns:

    - norm,
    - share of the norms of all parts,
    - cosine to the whole gradient,
    - product with the whole gradient,
    - slope: always 0, because only scores have a slope.

    Args:
        location: `queries` or `skills`.
        gradients: Gradient by part.
        whole: Gradient of the whole loss. The parts may not add up to it, for example if the loss
            also compares from skill to query. The rest becomes the part OTHER_DIRECTIONS.
        vectors: The unit vectors.

    Yields:
        Each part with its statistics: a row for each vector that has a gradient of the part.
    """

    def project(gradient: Vectors) -> Vectors:
        """Remove the component along the vectors."""
        return gradient - (gradient * vectors).sum(1, keepdim=True) * vectors

    projected = {part: project(gradient) for part, gradient in gradients.items()}  # [row, dim] each
    rest = whole - sum(gradients.values())  # [row, dim]
    projected[OTHER_DIRECTIONS] = project(rest)
    whole = project(whole)  # [row, dim]
    norms = {part: gradient.norm(dim=1) for part, gradient in projected.items()}  # [row] each
    totals = torch.stack(list(norms.values())).sum(0)  # [row]
    for part, norm in norms.items():
        share = norm / totals  # [row]
        product = (projected[part] * whole).sum(1)  # [row]
        cosine = product / (norm * whole.norm(dim=1)).clamp(min=_TINY)  # [row]
        slope = torch.zeros_like(norm)  # [row]
        statistics = torch.stack([norm, share, cosine, product, slope], 1)  # [row, 5]
        # Leave out the vectors whose gradient is a rounding error.
        max_error = _ROUNDING_ERROR * totals.max()
        has_gradient = norm > max_error  # [row]
        yield (location, part), statistics[has_gradient]
