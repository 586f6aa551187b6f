"""Shapes are checked in tests, and tiny models with random weights are there for all of them."""

import errno
import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(
    prefix="skilltrain-tests-"
)  # the user's own cache stays untouched
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.fsync = lambda fd: None  # no test cuts the power

# A busy machine is no fault: no test is timed.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Before the first import of these packages: every annotated shape in them is checked at every call.
install_import_hook(
    ["skilltrain.losses", "skilltrain.models", "skilltrain.training"], "beartype.beartype"
)


def pytest_collection_finish():
    """Leave what the imports of all test files have made out of garbage collection: a full one takes 0.3 s with it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """Name → folder of a saved model: bert, bert_reranker, qwen3, qwen3_base_tokenizer, qwen3_reranker."""
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
        "qwen3_reranker": save_qwen3(root / "qwen3_reranker", reranker=True),
    }


def opener(folders, config_class, load):
    """name, settings → what `load` makes of that model's folder on the CPU, anew each time."""
    import torch

    return lambda name, **settings: load(
        config_class(source=str(folders[name]), **settings), torch.device("cpu")
    )


@pytest.fixture
def open_encoder_of(model_folders):
    from skilltrain.models.encoder import EncoderConfig, load_encoder

    return opener(model_folders, EncoderConfig, load_encoder)


@pytest.fixture
def open_reranker_of(model_folders):
    from skilltrain.models.reranker import RerankerConfig, load_reranker

    return opener(model_folders, RerankerConfig, load_reranker)


@pytest.fixture
def locked_folders(monkeypatch):
    """What lies in a folder called "locked" cannot be looked at; the tests may run as root, whom no mode stops."""
    whole_stat = Path.stat

    def stat(path, **options):
        if path.parent.name == "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return whole_stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat)


@pytest.fixture
def fresh_accelerate():
    """accelerate as a new process finds it, before and after a test; and float32 products without TF32."""
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
    """The folder of a small library's stages and of the trainings of both models."""
    from small_library import trained

    return trained(tmp_path_factory.getbasetemp() / "trained", model_folders["bert"])[0]


@pytest.fixture
def server(monkeypatch):
    """A chat server on loopback whose answers name the seed of their request; the environment holds a key."""
    from llm_server import KEY, llm_server

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with llm_server() as running:
        yield running
