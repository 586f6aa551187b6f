"""What becomes of the rejections' gradient beside that of positives, of other negatives and of in-batch negatives.

R3 reports that "bilateral balancing" dilutes the push away from rejected skills in a bi-encoder, and that a
cross-encoder loses nothing of it; how that was measured is not public. The measures here are ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.files import staged_folder, write_json, write_text
from skilltrain.losses import Matryoshka
from skilltrain.models.loading import default_device
from skilltrain.records import Verdict
from skilltrain.report.page import html_page, markdown
from skilltrain.terminal import track
from skilltrain.training.loop import step_batches
from skilltrain.training.scores import encoder_scores, list_scores
from skilltrain.training.settings import TrainConfig, TrainEncoderConfig
from skilltrain.training.stages import load_data, open_step
from skilltrain.training.steps import EncoderStep, Pairs, Texts
from skilltrain.training.training_set import TrainingList

IN_BATCH, DIRECTIONS = "in-batch", "other directions"
Vectors = Float[Tensor, "row dim"]
Rows = tuple[tuple[str, str], Float[Tensor, "row figure"]]
"""Where and which part; of each query or skill norm, share, cosine, product with the whole, and slope."""


@dataclass(frozen=True)
class PartOfGradient:
    """What one part of a loss does at the scores, the queries' vectors or the skills' vectors: means over `num` rows.

    `norm` is that of its gradient, `share` its part of all parts' norms, `cosine` that to the whole loss's gradient.
    `survival` is how far the whole goes along this part's own gradient, in lengths of it: 1 is all of it, below 0 the
    reverse. `slope` is d loss / d score.
    """

    at: str
    part: str
    num: int
    norm: float
    share: float
    cosine: float
    survival: float
    slope: float


def measure_gradients(config: TrainConfig, num_batches: int) -> list[PartOfGradient]:
    """The parts over the first batches of a training, by the model that it starts from; nothing is trained.

    Raises SkilltrainError for a loss that does not see one table of scores, and lists without a rejected skill.
    """
    is_late = isinstance(config, TrainEncoderConfig) and config.late_interaction is not None
    if is_late or isinstance(config.loss, Matryoshka):
        raise SkilltrainError(
            "gradients are taken apart for a plain loss alone", where="loss", fix="name one"
        )
    data = load_data(config)
    if not any(Verdict.REJECTED in one.verdicts for one in data.lists):
        raise SkilltrainError(
            "no list holds a rejected skill", where="data.lists", fix="give a quota judged"
        )
    step = open_step(config, data, default_device()).eval()
    batches = [
        *islice(chain.from_iterable(step_batches(step.data.lists, config.training)), num_batches)
    ]
    of_batch = _of_encoder if isinstance(step, EncoderStep) else _of_reranker
    found: dict[tuple[str, str], list[Tensor]] = {}
    for batch in track(batches, "taking gradients apart", len(batches)):
        for key, rows in of_batch(step, batch):
            found.setdefault(key, []).append(rows)
    return [mean_of(*key, torch.cat(rows)) for key, rows in found.items() if any(map(len, rows))]


def mean_of(at: str, part: str, rows: Float[Tensor, "row figure"]) -> PartOfGradient:
    """The means of a part's rows; survival is that of all rows together, for a single one may have next to no norm."""
    norm, share, cosine, along, slope = rows.mean(0).tolist()
    squares = float((rows[:, 0] ** 2).mean())
    return PartOfGradient(
        at, part, len(rows), norm, share, cosine, along / squares if squares else 1.0, slope
    )


def write_gradients(found: Sequence[PartOfGradient], config: TrainConfig, num_batches: int) -> None:
    """gradients.json, gradients.md and gradients.html with the bars, in the folder `config.out`."""
    about = {
        "stage": config.stage,
        "model": config.model.source,
        "loss": config.loss.model_dump(mode="json"),
    }
    about |= {
        "gains": {str(v): gain for v, gain in config.data.gains.items()},
        "num_batches": num_batches,
    }
    values = {
        "about": about,
        "places": list(dict.fromkeys(row.at for row in found)),
        "found": found,
    }
    with staged_folder(config.out) as folder:
        write_json(folder / "gradients.json", about | {"parts": [asdict(row) for row in found]})
        write_text(folder / "gradients.md", markdown("gradients", **values))
        write_text(folder / "gradients.html", html_page("gradients", **values))


def _of_encoder(step: Any, batch: Sequence[TrainingList]) -> Iterator[Rows]:
    skill_ids = sorted({skill_id for one in batch for skill_id in one.skill_ids})
    texts = [step.query_ids[one.query] for one in batch] + [
        step.skill_ids[skill_id] for skill_id in skill_ids
    ]
    with torch.no_grad():
        vectors = step(Texts(texts)).double().cpu()
    queries, skills = (
        part.clone().requires_grad_() for part in vectors.split([len(batch), len(skill_ids)])
    )
    scored = encoder_scores(batch, batch, queries, queries, skill_ids, skills, step.context)
    slopes, *wholes = torch.autograd.grad(step.loss(scored), (scored.scores, queries, skills))
    names = [[IN_BATCH if counts else "" for counts in row] for row in scored.valid.tolist()]
    for row, one in zip(names, batch, strict=True):
        for skill_id, verdict in zip(one.skill_ids, one.verdicts, strict=True):
            row[skill_ids.index(skill_id)] = str(verdict)
    yield from at_scores(slopes, names)
    queries, skills = queries.detach(), skills.detach()
    cells = {part: torch.where(mask, slopes, 0.0) for part, mask in _masks(names).items()}
    yield from at_vectors(
        "queries", {part: cell @ skills for part, cell in cells.items()}, wholes[0], queries
    )
    yield from at_vectors(
        "skills", {part: cell.T @ queries for part, cell in cells.items()}, wholes[1], skills
    )


def _of_reranker(step: Any, batch: Sequence[TrainingList]) -> Iterator[Rows]:
    with torch.no_grad():
        flat = step(Pairs([step.pairs(one) for one in batch])).double().cpu()
    scored = list_scores(batch, flat.requires_grad_(), step.loss.needs_teacher_scores)
    (slopes,) = torch.autograd.grad(step.loss(scored), scored.scores)
    width = slopes.shape[1]
    yield from at_scores(
        slopes, [[*map(str, one.verdicts), *[""] * (width - len(one.verdicts))] for one in batch]
    )


def _masks(names: Sequence[Sequence[str]]) -> dict[str, Bool[Tensor, "query skill"]]:
    """Part → the cells of that name."""
    parts = sorted({name for row in names for name in row} - {""})
    return {part: torch.tensor([[name == part for name in row] for row in names]) for part in parts}


def at_scores(
    slopes: Float[Tensor, "query skill"], names: Sequence[Sequence[str]]
) -> Iterator[Rows]:
    """For each part and query that has any: the sum of its slopes' amounts, their share, and the mean slope.

    `names` has the part that each cell is of, "" for none.
    """
    masks = _masks(names)
    amounts = {part: (slopes.abs() * mask).sum(1) for part, mask in masks.items()}
    in_all = sum(amounts.values(), torch.zeros(len(slopes))).clamp(min=1e-300)
    for part, mask in masks.items():
        amount, slope = amounts[part], (slopes * mask).sum(1) / mask.sum(1)
        figures = torch.stack(
            [amount, amount / in_all, torch.ones_like(amount), amount**2, slope], 1
        )
        yield ("scores", part), figures[mask.any(1)]


def at_vectors(
    at: str, parts: Mapping[str, Vectors], whole: Vectors, vectors: Vectors
) -> Iterator[Rows]:
    """For each part and row that it reaches: its gradient's norm and share, its cosine and product with the `whole`.

    What the parts do not add up to comes from a loss's other directions. All are cut to what turns the unit `vectors`.
    """
    every = {**parts, DIRECTIONS: whole - sum(parts.values(), torch.zeros_like(whole)), "": whole}
    turning = {
        part: rows - (rows * vectors).sum(1, keepdim=True) * vectors for part, rows in every.items()
    }
    whole = turning.pop("")
    in_all = sum((rows.norm(dim=1) for rows in turning.values()), torch.zeros(len(whole)))
    for part, rows in turning.items():
        norm, along = rows.norm(dim=1), (rows * whole).sum(1)
        cosine = along / (norm * whole.norm(dim=1)).clamp(min=1e-300)
        figures = torch.stack([norm, norm / in_all, cosine, along, torch.zeros_like(norm)], 1)
        yield (at, part), figures[norm > 1e-9 * in_all.max()]
