#!/usr/bin/env python
"""Encoding speed of skilltrain beside SentenceTransformer.encode: same weights, skills, caps and threads, on the CPU.

python benchmarks/encode_speed.py --data DIR [--num 512] [--threads 2] [--rounds 5] [--only CASE ...] [--json OUT]

DIR holds pool/*.parquet (skill_id, name, description, body) and, for Qwen3, qwen3-tokenizer/tokenizer.json. Every mode
has a process of its own; in a round each encodes all skills, one after the other, on an idle machine. The first round
is a warm-up, after which the float32 vectors must agree to 1e-5. Progress goes to stderr, Markdown tables to stdout.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from measuring import (
    SEED,
    Gemm,
    Meter,
    forward_flops,
    own_process,
    pairs_seen,
    ratio,
    say,
    set_environment,
)
from train_speed_cases import CASES, Case, write_model

from skilltrain.records import Skill

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Mode:
    """A way to encode. `packed` is skilltrain's own linear layers; `batch_size` is sentence-transformers'."""

    name: str
    library: Literal["skilltrain", "sentence-transformers"] = "skilltrain"
    precision: Literal["float32", "auto"] = "float32"
    packed: bool = True
    batch_size: int = 32


MODES = (
    Mode("skilltrain"),
    Mode("skilltrain, PyTorch's linear layers", packed=False),
    Mode("skilltrain, precision auto", precision="auto"),
    Mode("sentence-transformers, default (batch 32)", "sentence-transformers"),
    Mode("sentence-transformers, batch 8", "sentence-transformers", batch_size=8),
)
_OF = {case.name: case for case in CASES}
ENCODING = {
    "minilm-512": replace(_OF["encoder-short"], title="MiniLM, 300+2500 characters, 512 tokens"),
    "minilm-256": replace(
        _OF["encoder-short"],
        max_tokens=256,
        title="MiniLM, 300+2500 characters, 256 tokens (its default)",
    ),
    "qwen3": replace(
        _OF["encoder-short-qwen3"], title="small Qwen3, 300+2500 characters, 2048 tokens"
    ),
    "qwen3-long": replace(
        _OF["encoder-long-qwen3"], title="small Qwen3, 500+8000 characters, 4096 tokens"
    ),
}


@dataclass(frozen=True)
class Round:
    """What a mode says of having encoded all skills once; `slots` are tokens with padding."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    slots: int


class Encoding:
    """The process of a mode: all skills, encoded on each demand."""

    running: "Encoding"

    def __init__(self, mode: Mode, skills: tuple[Skill, ...], folder: Path, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.slots: list[int] = []
        self.encode = (_ours if mode.library == "skilltrain" else _peer)(
            mode, skills, folder, self.slots
        )
        self.meter = Meter()

    @classmethod
    def begin(cls, *arguments: Any) -> None:
        """Make this process's one."""
        cls.running = cls(*arguments)

    @classmethod
    def round(cls, out: Path) -> Round:
        """Encode all skills; the vectors go to `out`."""
        own = cls.running
        own.slots.clear()
        own.meter.start()
        vectors = own.encode()
        seconds, cpu_seconds, peak = own.meter.read()
        np.save(out, vectors)
        return Round(seconds, cpu_seconds, peak, sum(own.slots))


def _ours(
    mode: Mode, skills: tuple[Skill, ...], folder: Path, slots: list[int]
) -> Callable[[], np.ndarray]:
    from skilltrain.retrieval import dense

    if not mode.packed:
        dense.pack_linear_layers = lambda network, num_rows: None
    encoder = dense.open_encoder(dense.EncoderSource(source=str(folder), precision=mode.precision))
    encoder.model.backbone.register_forward_pre_hook(
        lambda _module, _inputs, given: slots.append(given["input_ids"].numel()), with_kwargs=True
    )
    return lambda: encoder.encode_skills(skills)


def _peer(
    mode: Mode, skills: tuple[Skill, ...], folder: Path, slots: list[int]
) -> Callable[[], np.ndarray]:
    from sentence_transformers import SentenceTransformer

    settings, model = (
        _plain_encoder(folder).settings,
        SentenceTransformer(str(folder), device="cpu"),
    )
    model.max_seq_length = settings.max_tokens
    texts = [settings.template.skill.render(skill) for skill in skills]
    first: Any = model[0]
    first.register_forward_pre_hook(
        lambda _module, inputs: slots.append(inputs[0]["input_ids"].numel())
    )
    return lambda: model.encode(texts, batch_size=mode.batch_size, show_progress_bar=False)


def _plain_encoder(folder: Path) -> Any:
    import torch

    from skilltrain.models.encoder import EncoderConfig, load_encoder

    return load_encoder(EncoderConfig(source=str(folder)), torch.device("cpu"))


def tokens_and_flops(folder: Path, skills: tuple[Skill, ...]) -> tuple[int, float]:
    """(tokens of all skills without padding, FLOP of a forward pass over them)."""
    encoder = _plain_encoder(folder)
    texts = [encoder.settings.template.skill.render(skill) for skill in skills]
    lengths = [len(ids) for ids in encoder.tokenize(texts, encoder.settings.max_tokens)]
    seen = sum(pairs_seen(encoder.backbone, length) for length in lengths)
    return sum(lengths), forward_flops(encoder.backbone, sum(lengths), seen)


@dataclass(frozen=True)
class CaseResult:
    """What was measured of a case: per mode its rounds in order (no warm-up), GEMM rates (MKL, oneDNN) a round, and
    the largest difference of each mode's vectors to sentence-transformers'.
    """

    title: str
    num_tokens: int
    flops: float
    rounds: dict[str, list[Round]]
    gemm_flops: list[list[float]]
    differences: dict[str, float]


def measure(
    case: Case, skills: tuple[Skill, ...], data: Path, threads: int, num_rounds: int
) -> CaseResult:
    """Every mode in each round, one after the other; the warm-up is left out."""
    with tempfile.TemporaryDirectory(prefix="encode-speed-") as name:
        folder = Path(name)
        with own_process() as writer:
            writer.submit(write_model, case, data, folder / "model").result()
            work = writer.submit(tokens_and_flops, folder / "model", skills).result()
        processes = [
            own_process(Encoding.begin, mode, skills, folder / "model", threads) for mode in MODES
        ]
        rounds: dict[str, list[Round]] = {mode.name: [] for mode in MODES}
        gemm, rates = Gemm(), []
        for number in range(num_rounds + 1):
            rates.append(gemm.rates())
            for place, (mode, process) in enumerate(zip(MODES, processes, strict=True)):
                one = process.submit(Encoding.round, folder / f"{place}.npy").result()
                say(
                    f"  round {number}: {one.seconds:.2f} s ({one.cpu_seconds:.2f} s of CPU time), {mode.name}"
                )
                rounds[mode.name].append(one)
            if not number:
                differences = _differences(folder)
        for process in processes:
            process.shutdown()
    timed = {name: found[1:] for name, found in rounds.items()}
    return CaseResult(case.title, *work, timed, rates[1:], differences)


def _differences(folder: Path) -> dict[str, float]:
    """Largest difference of each mode's vectors to sentence-transformers'; the program ends if it is too large."""
    vectors = {mode: np.load(folder / f"{place}.npy") for place, mode in enumerate(MODES)}
    peer = next(found for mode, found in vectors.items() if mode.library == "sentence-transformers")
    differences = {mode.name: float(np.abs(found - peer).max()) for mode, found in vectors.items()}
    for mode in MODES:
        if mode.precision == "float32" and not differences[mode.name] < TOLERANCE:
            sys.exit(f"encode_speed: vectors of {mode.name} differ by {differences[mode.name]:.1e}")
    return differences


def table(result: CaseResult, num: int, threads: int) -> str:
    """A heading, a sentence on the work, and a row for each mode."""
    base = result.rounds[MODES[0].name]
    mkl, onednn = (float(rate) for rate in np.median(result.gemm_flops, axis=0))
    lines = [
        f"### {result.title}",
        "",
        f"{num} skills, {result.num_tokens:,} tokens, {result.flops / 1e12:.2f} TFLOP of useful work; {threads} "
        f"threads; GEMM peak: MKL {mkl / 1e9:.0f}, oneDNN {onednn / 1e9:.0f} GFLOP/s (the last column is of the "
        "higher).",
        "",
        "| | skills/s | time against ours [95%], n | CPU time against ours | padding | peak MB | vectors differ by "
        "| of GEMM peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, rounds in result.rounds.items():
        wall, cpu = (
            ratio([getattr(one, kind) for one in base], [getattr(one, kind) for one in rounds])
            for kind in ("seconds", "cpu_seconds")
        )
        seconds = float(np.median([one.seconds for one in rounds]))
        lines.append(
            f"| {name} | {num / seconds:.1f} | {wall} | {cpu.split()[0]} "
            f"| {1 - result.num_tokens / rounds[-1].slots:.1%} | {rounds[-1].peak_bytes / 1e6:.0f} "
            f"| {result.differences[name]:.0e} | {result.flops / seconds / max(mkl, onednn):.0%} |"
        )
    return "\n".join([*lines, ""])


def read_skills(data: Path, num: int) -> tuple[Skill, ...]:
    """`num` skills of the pool in `data`, drawn at random."""
    import pyarrow.parquet

    columns = ["skill_id", "name", "description", "body"]
    found = pyarrow.parquet.read_table(data / "pool", columns=columns)
    rows = found.take(sorted(random.Random(SEED).sample(range(found.num_rows), num))).to_pylist()
    return tuple(Skill(*(row[key] or "" for key in columns)) for row in rows)


def main(arguments: Sequence[str]) -> None:
    """Run the cases; print a table for each as soon as it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with pool/ and qwen3-tokenizer/"
    )
    parser.add_argument("--num", type=int, default=512, help="skills to encode")
    parser.add_argument("--threads", type=int, default=2, help="threads of every process")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=ENCODING,
        default=[*ENCODING],
        metavar="CASE",
        help=", ".join(ENCODING),
    )
    parser.add_argument("--json", type=Path, help="file for every single measurement")
    given = parser.parse_args(arguments)
    set_environment(given.threads)
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
