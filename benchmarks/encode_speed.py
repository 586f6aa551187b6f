#!/usr/bin/env python
"""Compare encoding speed of skilltrain and SentenceTransformer.encode on the CPU.

python benchmarks/encode_speed.py --data DIR [--num 512] [--threads 2] [--rounds 5] [--only CASE]

DIR holds pool/*.parquet (skill_id, name, description, body) and, for Qwen3,
qwen3-tokenizer/tokenizer.json. Both libraries encode the same skills with the same weights, token
limits and number of threads. Each mode has its own process. In a round, all modes encode all skills
one after the other, so use an idle machine. The first round is a warm-up. After it, the float32
vectors of all modes must agree to 1e-5. Progress goes to stderr, Markdown tables go to stdout.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from measuring import (
    GemmPeak,
    Meter,
    Usage,
    format_ratio,
    forward_flops,
    new_parser,
    new_process,
    num_attended_pairs,
    process_environment,
    say,
)
from train_speed_cases import CASES, Case, read_skills, write_model

from skilltrain.records import Skill

TOLERANCE = 1e-5
Skills = tuple[Skill, ...]


@dataclass(frozen=True)
class Mode:
    """A way to encode.

    Attributes:
        name: Name in the tables.
        library: Library that encodes.
        precision: Precision of skilltrain's network.
        packed: Use skilltrain's own linear layers instead of PyTorch's.
        batch_size: Texts per batch of sentence-transformers.
    """

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
_TRAINING_CASES = {case.name: case for case in CASES}
_MINILM = _TRAINING_CASES["encoder-short"]
_QWEN3 = _TRAINING_CASES["encoder-short-qwen3"]
_QWEN3_LONG = _TRAINING_CASES["encoder-long-qwen3"]
ENCODING_CASES = {
    "minilm-512": replace(_MINILM, title="MiniLM, 300+2500 characters, 512 tokens"),
    "minilm-256": replace(
        _MINILM, max_tokens=256, title="MiniLM, 300+2500 characters, 256 tokens (its default)"
    ),
    "qwen3": replace(_QWEN3, title="small Qwen3, 300+2500 characters, 2048 tokens"),
    "qwen3-long": replace(_QWEN3_LONG, title="small Qwen3, 500+8000 characters, 4096 tokens"),
}


@dataclass(frozen=True)
class Round(Usage):
    """Measurements of encoding all skills once.

    Attributes:
        slots: Number of tokens with padding.
    """

    slots: int


class Worker:
    """Encodes the skills in one mode. Each mode has a process with one worker."""

    current: "Worker"
    """The worker of this process."""

    def __init__(self, mode: Mode, skills: Skills, folder: Path, threads: int) -> None:
        """Load the model.

        Args:
            mode: Way to encode.
            skills: Skills to encode in each round.
            folder: Folder of the model.
            threads: Threads of torch.
        """
        import torch

        torch.set_num_threads(threads)
        self.num_slots = 0
        self.meter = Meter()
        load = self._load_ours if mode.library == "skilltrain" else self._load_peer
        self.encode: Callable[[], np.ndarray] = load(mode, skills, folder)

    @classmethod
    def start(cls, *arguments: Any) -> None:
        """Create the worker of this process."""
        cls.current = cls(*arguments)

    @classmethod
    def encode_skills(cls, out: Path) -> Round:
        """Encode all skills, save their vectors in `out`, and return what it took."""
        worker = cls.current
        worker.num_slots = 0
        worker.meter.start()
        vectors = worker.encode()
        usage = worker.meter.read()
        np.save(out, vectors)
        return Round(**asdict(usage), slots=worker.num_slots)

    def _load_ours(self, mode: Mode, skills: Skills, folder: Path) -> Callable[[], np.ndarray]:
        """Load skilltrain's encoder, and return a function that encodes the skills."""
        from skilltrain.retrieval import dense

        def count_slots(_module: Any, _inputs: Any, arguments: dict[str, Any]) -> None:
            self.num_slots += arguments["input_ids"].numel()

        if not mode.packed:
            dense.pack_linear_layers = lambda network, num_rows: None
        source = dense.EncoderSource(source=str(folder), precision=mode.precision)
        encoder = dense.open_encoder(source)
        encoder.model.backbone.register_forward_pre_hook(count_slots, with_kwargs=True)
        return lambda: encoder.encode_skills(skills)

    def _load_peer(self, mode: Mode, skills: Skills, folder: Path) -> Callable[[], np.ndarray]:
        """Load a SentenceTransformer, and return a function that encodes the skills."""
        from sentence_transformers import SentenceTransformer

        def count_slots(_module: Any, inputs: Any) -> None:
            self.num_slots += inputs[0]["input_ids"].numel()

        settings = _load_encoder(folder).settings
        texts = [settings.template.skill.render(skill) for skill in skills]
        model: Any = SentenceTransformer(str(folder), device="cpu")
        model.max_seq_length = settings.max_tokens
        model[0].register_forward_pre_hook(count_slots)
        return lambda: model.encode(texts, batch_size=mode.batch_size, show_progress_bar=False)


def _load_encoder(folder: Path) -> Any:
    """Load skilltrain's encoder in float32, without packed layers."""
    import torch

    from skilltrain.models.encoder import EncoderConfig, load_encoder

    return load_encoder(EncoderConfig(source=str(folder)), torch.device("cpu"))


def count_work(folder: Path, skills: Skills) -> tuple[int, float]:
    """Return the number of tokens of all skills without padding, and the FLOP to encode them."""
    encoder = _load_encoder(folder)
    settings = encoder.settings
    texts = [settings.template.skill.render(skill) for skill in skills]
    lengths = [len(ids) for ids in encoder.tokenize(texts, settings.max_tokens)]
    num_tokens = sum(lengths)
    num_pairs = sum(num_attended_pairs(encoder.backbone, length) for length in lengths)
    return num_tokens, forward_flops(encoder.backbone, num_tokens, num_pairs)


@dataclass(frozen=True)
class CaseResult:
    """Measurements of one case.

    Attributes:
        title: Heading of the table.
        num_tokens: Number of tokens of all skills without padding.
        flops: FLOP to encode all skills once.
        rounds: Timed rounds, by name of the mode.
        gemm_flops: Rates of matrix products with MKL and with oneDNN, before each timed round.
        differences: Largest difference to the vectors of sentence-transformers, by name of the
            mode.
    """

    title: str
    num_tokens: int
    flops: float
    rounds: dict[str, list[Round]]
    gemm_flops: list[list[float]]
    differences: dict[str, float]


def measure(case: Case, skills: Skills, data: Path, threads: int, num_rounds: int) -> CaseResult:
    """Encode the skills in all modes: one round as a warm-up, then `num_rounds` timed rounds.

    Exit if the vectors differ after the warm-up.

    Args:
        case: Model and template.
        skills: Skills to encode.
        data: Folder with the tokenizer of Qwen3.
        threads: Threads of each process.
        num_rounds: Number of timed rounds.
    """
    rounds: dict[str, list[Round]] = {mode.name: [] for mode in MODES}
    gemm = GemmPeak()
    gemm_flops: list[list[float]] = []
    differences: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="encode-speed-") as name:
        folder = Path(name)
        model = folder / "model"
        with new_process() as process:
            process.submit(write_model, case, data, model).result()
            num_tokens, flops = process.submit(count_work, model, skills).result()

        processes = [new_process(Worker.start, mode, skills, model, threads) for mode in MODES]
        for number in range(num_rounds + 1):
            gemm_flops.append(gemm.measure())
            for mode, process in zip(MODES, processes, strict=True):
                file = folder / f"{mode.name}.npy"
                result = process.submit(Worker.encode_skills, file).result()
                rounds[mode.name].append(result)
                times = f"{result.seconds:.2f} s ({result.cpu_seconds:.2f} s of CPU time)"
                say(f"  round {number}: {times}, {mode.name}")
            if number == 0:
                differences = compare_vectors(folder)
        for process in processes:
            process.shutdown()
    timed_rounds = {name: results[1:] for name, results in rounds.items()}
    return CaseResult(case.title, num_tokens, flops, timed_rounds, gemm_flops[1:], differences)


def compare_vectors(folder: Path) -> dict[str, float]:
    """Return the largest difference of each mode's vectors to those of sentence-transformers.

    Exit if a mode in float32 differs by more than the tolerance.
    """
    peer = next(mode for mode in MODES if mode.library == "sentence-transformers")
    peer_vectors = np.load(folder / f"{peer.name}.npy")
    differences: dict[str, float] = {}
    for mode in MODES:
        vectors = np.load(folder / f"{mode.name}.npy")
        difference = float(np.abs(vectors - peer_vectors).max())
        differences[mode.name] = difference
        # NaN is not below the tolerance.
        if mode.precision == "float32" and not difference < TOLERANCE:
            sys.exit(f"encode_speed: vectors of {mode.name} differ by {difference:.1e}")
    return differences


def format_table(result: CaseResult, num_skills: int, threads: int) -> str:
    """Format a heading, one sentence about the work, and a table with one row per mode."""
    mkl, onednn = np.median(result.gemm_flops, axis=0)
    lines = [
        f"### {result.title}",
        "",
        f"{num_skills} skills, {result.num_tokens:,} tokens, {result.flops / 1e12:.2f} TFLOP of "
        f"useful work; {threads} threads; GEMM peak: MKL {mkl / 1e9:.0f}, oneDNN "
        f"{onednn / 1e9:.0f} GFLOP/s (the last column is of the higher).",
        "",
        "| | skills/s | time against ours [95%], n | CPU time against ours | padding | peak MB "
        "| vectors differ by | of GEMM peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    ours = result.rounds[MODES[0].name]
    our_times = np.array([[item.seconds, item.cpu_seconds] for item in ours])
    for name, rounds in result.rounds.items():
        times = np.array([[item.seconds, item.cpu_seconds] for item in rounds])
        seconds = np.median(times[:, 0])
        cpu_ratio = np.median(times[:, 1] / our_times[:, 1])
        padding = 1 - result.num_tokens / rounds[-1].slots
        flops_rate = result.flops / seconds
        lines.append(
            f"| {name} | {num_skills / seconds:.1f} "
            f"| {format_ratio(our_times[:, 0], times[:, 0])} | {cpu_ratio:.2f} "
            f"| {padding:.1%} | {rounds[-1].peak_bytes / 1e6:.0f} "
            f"| {result.differences[name]:.0e} | {flops_rate / max(mkl, onednn):.0%} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> None:
    """Run the cases, and print the table of each case when it is done."""
    parser = new_parser(__doc__, [*ENCODING_CASES], "CASE")
    folders = "folder with pool/ and qwen3-tokenizer/"
    parser.add_argument("--data", type=Path, required=True, help=folders)
    parser.add_argument("--num", type=int, default=512, help="number of skills to encode")
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    options = parser.parse_args(arguments)
    num_skills = options.num
    threads = options.threads
    os.environ |= process_environment(threads)
    skills = tuple(read_skills(options.data, num_skills))
    results = []
    for name in options.only:
        say(f"{name}: {options.rounds} rounds of {num_skills} skills")
        case = ENCODING_CASES[name]
        result = measure(case, skills, options.data.resolve(), threads, options.rounds)
        print(format_table(result, num_skills, threads), flush=True)
        results.append(asdict(result))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
