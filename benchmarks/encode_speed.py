#!/usr/bin/env python
"""Encoding speed of skilltrain beside SentenceTransformer.encode: same weights, skills, caps and threads, on the CPU.

python benchmarks/encode_speed.py --data DIR [--num 512] [--threads 2] [--rounds 5] [--only CASE ...] [--json OUT]

DIR holds pool/*.parquet (skill_id, name, description, body) and, for Qwen3, qwen3-tokenizer/tokenizer.json. Every mode
has a process of its own; in a round each encodes all skills, one after the other, on an idle machine. The first round
is a warm-up, after which the float32 vectors must agree to 1e-5. Progress goes to stderr, Markdown tables to stdout.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from encode_speed_worker import Mode, Round, Work, measure_gemm, run
from train_speed import Worker, say
from train_speed_cases import CASES, Case
from train_speed_data import write_model
from train_speed_report import ratio

from skilltrain.records import Skill

SEED, TOLERANCE = 0, 1e-5
OURS = Mode("skilltrain")
MODES = (
    OURS,
    Mode("skilltrain, PyTorch's linear layers", packed=False),
    Mode("skilltrain, precision auto", precision="auto"),
    Mode("sentence-transformers, default (batch 32)", "sentence-transformers"),
    Mode("sentence-transformers, batch 8", "sentence-transformers", batch_size=8),
)
_OF = {case.name: case for case in CASES}
ENCODING = {
    "minilm-512": replace(_OF["encoder-short"], title="MiniLM, 300+2500 characters, 512 tokens"),
    "minilm-256": replace(
        _OF["encoder-short"], max_tokens=256, title="MiniLM, 300+2500 characters, 256 tokens (its default)"
    ),
    "qwen3": replace(_OF["encoder-short-qwen3"], title="small Qwen3, 300+2500 characters, 2048 tokens"),
    "qwen3-long": replace(_OF["encoder-long-qwen3"], title="small Qwen3, 500+8000 characters, 4096 tokens"),
}


@dataclass(frozen=True)
class CaseResult:
    """What was measured of a case: per mode its rounds in order (no warm-up), GEMM rates (MKL, oneDNN) a round, and
    the largest difference of each mode's vectors to sentence-transformers'.
    """

    title: str
    rounds: dict[str, list[Round]]
    gemm_flops: list[list[float]]
    differences: dict[str, float]


def read_skills(data: Path, num: int) -> tuple[Skill, ...]:
    """`num` skills of the pool in `data`, drawn at random."""
    import pyarrow.parquet

    columns = ["skill_id", "name", "description", "body"]
    table = pyarrow.parquet.read_table(data / "pool", columns=columns)
    rows = table.take(sorted(random.Random(SEED).sample(range(table.num_rows), num))).to_pylist()
    return tuple(Skill(*(row[key] or "" for key in columns)) for row in rows)


def measure(case: Case, skills: tuple[Skill, ...], data: Path, threads: int, rounds: int) -> CaseResult:
    """Every mode in each round, one after the other; the warm-up is left out."""
    with tempfile.TemporaryDirectory(prefix="encode-speed-") as name:
        folder = Path(name)
        writer = multiprocessing.get_context("spawn").Process(target=write_model, args=(case, data, folder / "model"))
        writer.start()
        writer.join()
        if writer.exitcode:
            sys.exit(f"encode_speed: cannot make the model of {case.title}")
        works = [Work(mode, skills, folder / "model", threads, folder / f"{n}.npy") for n, mode in enumerate(MODES)]
        workers = [Worker(run, work) for work in works]
        gemm = Worker(measure_gemm, threads)
        try:
            for worker in [*workers, gemm]:
                worker.answer()
            return _rounds(case, works, workers, gemm, rounds)
        finally:
            for worker in [*workers, gemm]:
                worker.stop()


def _rounds(case: Case, works: Sequence[Work], workers: Sequence[Worker], gemm: Worker, rounds: int) -> CaseResult:
    found: dict[str, list[Round]] = {work.mode.name: [] for work in works}
    rates: list[list[float]] = []
    differences: dict[str, float] = {}
    for number in range(rounds + 1):
        rates.append(gemm.ask())
        for work, worker in zip(works, workers, strict=True):
            one: Round = worker.ask()
            say(f"  round {number}: {one.seconds:.2f} s ({one.cpu_seconds:.2f} s of CPU time), {work.mode.name}")
            if number:
                found[work.mode.name].append(one)
        if not number:
            differences = _differences(works)
    return CaseResult(case.title, found, rates[1:], differences)


def _differences(works: Sequence[Work]) -> dict[str, float]:
    """Largest difference of each mode's vectors to sentence-transformers'; the program ends if it is too large."""
    peer = next(np.load(work.out) for work in works if work.mode.library == "sentence-transformers")
    found = {work.mode.name: float(np.abs(np.load(work.out) - peer).max()) for work in works}
    for work in works:
        if work.mode.precision == "float32" and not found[work.mode.name] < TOLERANCE:
            sys.exit(f"encode_speed: vectors of {work.mode.name} differ by {found[work.mode.name]:.1e}")
    return found


def table(result: CaseResult, num: int, threads: int) -> str:
    """A heading, a sentence on the work, and a row for each mode."""
    base = result.rounds[OURS.name]
    mkl, onednn = (float(rate) for rate in np.median(result.gemm_flops, axis=0))
    lines = [
        f"### {result.title}",
        "",
        f"{num} skills, {base[0].tokens:,} tokens, {base[0].flops / 1e12:.2f} TFLOP of useful work; {threads} threads; "
        f"GEMM peak: MKL {mkl / 1e9:.0f}, oneDNN {onednn / 1e9:.0f} GFLOP/s (the last column is of the higher).",
        "",
        "| | skills/s | time against ours [95%], n | CPU time against ours | padding | peak MB | vectors differ by "
        "| of GEMM peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, rounds in result.rounds.items():
        middle, low, high = ratio([one.seconds for one in base], [one.seconds for one in rounds])
        cpu, _, _ = ratio([one.cpu_seconds for one in base], [one.cpu_seconds for one in rounds])
        seconds = float(np.median([one.seconds for one in rounds]))
        lines.append(
            f"| {name} | {num / seconds:.1f} | {middle:.2f} [{low:.2f}, {high:.2f}], {len(rounds)} | {cpu:.2f} "
            f"| {1 - rounds[-1].tokens / rounds[-1].slots:.1%} | {rounds[-1].peak_bytes / 1e6:.0f} "
            f"| {result.differences[name]:.0e} | {rounds[-1].flops / seconds / max(mkl, onednn):.0%} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> None:
    """Run the cases; print a table for each as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with pool/ and qwen3-tokenizer/")
    parser.add_argument("--num", type=int, default=512, help="skills to encode")
    parser.add_argument("--threads", type=int, default=2, help="threads of every process")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--only", nargs="+", choices=ENCODING, default=[*ENCODING], metavar="CASE",
                        help=", ".join(ENCODING))  # fmt: skip
    parser.add_argument("--json", type=Path, help="file for every single measurement")
    given = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": str(given.threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed, where it is installed, would say on stdout that it had to look
    skills, results = read_skills(given.data, given.num), []
    for name in given.only:
        say(f"{name}: {given.rounds} rounds of {given.num} skills")
        result = measure(ENCODING[name], skills, given.data.resolve(), given.threads, given.rounds)
        print(table(result, given.num, given.threads), flush=True)
        results.append(asdict(result))
        if given.json:
            given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
