"""Fixtures of all tests; shapes are checked, and there are tiny models with random weights."""

import errno
import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# The user's own cache stays untouched.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="skilltrain-tests-")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.fsync = lambda fd: None  # no test cuts the power

# No test is timed: the machine may be busy. Fifty examples, for speed.
settings.register_profile("untimed", deadline=None, max_examples=50)
settings.load_profile("untimed")

# Check the annotated shapes of these packages at every call; this precedes their first import.
install_import_hook(
    ["skilltrain.losses", "skilltrain.models", "skilltrain.training"], "beartype.beartype"
)


def pytest_collection_modifyitems(items):
    """Put files with slow tests first in both halves, which pytest-xdist gives to two processes.

    So no process is left with a slow test when the other has finished.
    """
    slow_files = dict.fromkeys(item.path for item in items if item.get_closest_marker("slow"))
    first_files = [*slow_files][::2]
    fast = [item for item in items if item.path not in slow_files]
    first = [item for item in items if item.path in first_files]
    second = [item for item in items if item.path in slow_files and item.path not in first_files]
    num_first = len(items) // 2 - len(first)
    items[:] = [*first, *fast[:num_first], *second, *fast[num_first:]]


def pytest_collection_finish():
    """Exclude all imported objects from garbage collection, which takes .3 s with them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """The folders of saved tiny models, by name."""
    from tiny_models import save_bert, save_qwen3

    root = tmp_path_factory.mktemp("models")
    return {
        "bert": save_bert(root / "bert", reranker=False),
        "bert_dropout": save_bert(root / "bert_dropout", reranker=False, dropout=0.1),
        "bert_reranker": save_bert(root / "bert_reranker", reranker=True),
        "qwen3": save_qwen3(root / "qwen3", reranker=False),
        "qwen3_base_tokenizer": save_qwen3(
            root / "qwen3_base_tokenizer", reranker=False, appends_end=False
        ),
        "qwen3_wide": save_qwen3(root / "qwen3_wide", reranker=False, width=64),  # for 4 bits
        "qwen3_reranker": save_qwen3(root / "qwen3_reranker", reranker=True),
    }


def opener(folders, config_class, load):
    """Return a function that loads the model of a name on the CPU, anew each time."""
    import torch

    def open_model(name, **settings):
        config = config_class(source=str(folders[name]), **settings)
        return load(config, torch.device("cpu"))

    return open_model


@pytest.fixture(scope="session")
def open_encoder_of(model_folders):
    """Return a function that opens an encoder by name, with settings of `EncoderConfig`."""
    from skilltrain.models.encoder import EncoderConfig, load_encoder

    return opener(model_folders, EncoderConfig, load_encoder)


@pytest.fixture(scope="session")
def open_reranker_of(model_folders):
    """Return a function that opens a reranker by name, with settings of `RerankerConfig`."""
    from skilltrain.models.reranker import RerankerConfig, load_reranker

    return opener(model_folders, RerankerConfig, load_reranker)


@pytest.fixture
def locked_folders(monkeypatch):
    """Make the contents of folders called "locked" unreadable.

    The tests may run as root, whom file modes do not stop.
    """
    stat = Path.stat

    def refuse_locked(path, **options):
        if path.parent.name == "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse_locked)


@pytest.fixture
def fresh_accelerate():
    """Reset accelerate as in a new process, before and after a test, and float32 without TF32."""
    import torch
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The folder of a small library: twenty SKILL.md files and sixteen queries."""
    from small_library import write_library

    return write_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory, model_folders):
    """The folder of all runs of a small library: from the pool to both trained models."""
    from small_library import trained

    return trained(tmp_path_factory.getbasetemp() / "trained", model_folders["bert"])[0]


@pytest.fixture(scope="session")
def general_requests(tmp_path_factory):
    """A file with every tenth general request, for calibrations that take a tenth of the time."""
    from skilltrain.serving.calibrate import GENERAL_REQUESTS

    lines = GENERAL_REQUESTS.read_text(encoding="utf-8").splitlines(keepends=True)
    file = tmp_path_factory.mktemp("requests") / "general_requests.jsonl"
    file.write_text("".join(lines[::10]), encoding="utf-8")
    return file


@pytest.fixture
def few_general_requests(general_requests, monkeypatch):
    """Calibrate routers of this test with few general requests."""
    monkeypatch.setattr("skilltrain.serving.calibrate.GENERAL_REQUESTS", general_requests)


@pytest.fixture
def server(monkeypatch):
    """A chat server whose answers name the seed of their request; the environment holds a key."""
    from llm_server import KEY, llm_server

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with llm_server() as running:
        yield running
