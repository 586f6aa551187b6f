"""Reranking: the candidates of each query, ordered by the reranker."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import Field

from skilltrain.config import Config
from skilltrain.models.loading import Precision, default_device
from skilltrain.models.micro_batches import run_micro_batches
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker
from skilltrain.records import Skill
from skilltrain.templates import RerankerTemplate, SkillFields
from skilltrain.terminal import track


class RerankerSource(Config):
    """A reranker to order candidates with."""

    source: str = Field(description="folder, Hub id owner/name, or package:NAME (a package that ships a model)")
    max_tokens: int | None = Field(default=None, ge=32, description="token limit of a (query, skill) pair")
    query_max_tokens: int | None = Field(default=None, ge=8, description="token limit of the query inside a pair")
    template: RerankerTemplate | None = Field(default=None, description="the texts the model sees")
    fields: SkillFields | None = Field(
        default=None, description="full, or nd (skills without bodies), whatever the template says; null: as it says"
    )
    precision: Precision = Field(default="auto", description="auto: bfloat16 where the hardware has it")
    token_budget: int = Field(default=4096, ge=64, description="tokens a micro-batch, padding included")


def open_reranker(source: RerankerSource) -> Reranker:
    """The reranker ready to score, on the GPU where there is one."""
    config = RerankerConfig(**source.model_dump(exclude={"token_budget"}))
    return load_reranker(config, default_device())


@torch.inference_mode()
def rerank(
    reranker: Reranker,
    queries: Mapping[str, str],
    candidates: Mapping[str, Sequence[str]],
    skills: Mapping[str, Skill],
    token_budget: int,
) -> dict[str, list[tuple[str, float]]]:
    """query_id → [(skill_id, score)], best first; ties keep the candidates' order."""
    result: dict[str, list[tuple[str, float]]] = {}
    skill_ids_of: dict[str, np.ndarray] = {}
    for query_id, skill_ids in track(candidates.items(), "reranking", len(candidates)):
        new = [skill_id for skill_id in dict.fromkeys(skill_ids) if skill_id not in skill_ids_of]
        tokens = reranker.tokenize_skills([skills[skill_id] for skill_id in new])
        skill_ids_of |= {skill_id: np.array(ids, np.int32) for skill_id, ids in zip(new, tokens, strict=True)}
        query_ids = reranker.tokenize_query(queries[query_id])
        pairs = [reranker.join(query_ids, skill_ids_of[skill_id]) for skill_id in skill_ids]
        groups = reranker.micro_batches([pairs], token_budget)
        scores = run_micro_batches(reranker, pairs, groups, recompute=False).tolist() if pairs else []
        scored = zip(skill_ids, scores, strict=True)
        result[query_id] = sorted(scored, key=lambda pair: -pair[1])
    return result
