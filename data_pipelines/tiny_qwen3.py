"""Qwen3's two models in miniature, with random weights: what the recipes in recipes/tiny/ train.

python data_pipelines/tiny_qwen3.py OUT [tokenizer=FOLDER]

OUT/encoder and OUT/reranker take the same paths through the code as Qwen3-Embedding and Qwen3-Reranker. The tokenizer
is a byte-level BPE learnt from the sample library, or, with `tokenizer`, the tokenizer.json of a Qwen3 model.
"""

from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.utils import logging

from skilltrain.config import Config
from skilltrain.recipe import run_pipeline

END = "<|endoftext|>"
LIBRARY = Path(__file__).parents[1] / "examples" / "skill_library" / "skills"


class Pipeline(Config):
    """What this pipeline can be told."""

    out: Path
    tokenizer: Path | None = Field(default=None, description="folder with a tokenizer.json")
    vocabulary: int = 4096
    sizes: dict[str, int] = Field(
        default={
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
        }
    )


def learn_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE with Qwen3's special tokens; `yes` and `no` are one token each."""
    raw = Tokenizer(models.BPE())
    raw.normalizer, raw.decoder = normalizers.NFC(), decoders.ByteLevel()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([*texts, *["yes", "no"] * 1000], trainer)
    raw.add_special_tokens([END, "<|im_start|>", "<|im_end|>"])
    raw.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return raw


def run(pipeline: Pipeline) -> None:
    """The two folders; only the encoder's tokenizer ends every text with <|endoftext|>, as Qwen3-Embedding's does."""
    logging.disable_progress_bar()
    texts = [file.read_text(encoding="utf-8") for file in sorted(LIBRARY.rglob("SKILL.md"))]
    given = pipeline.tokenizer
    raw = (
        Tokenizer.from_file(str(given / "tokenizer.json"))
        if given
        else learn_tokenizer(texts, pipeline.vocabulary)
    )
    end = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, raw.token_to_id(END))]
    )
    parts: dict[str, Any] = {
        "encoder": (Qwen3Model, end),
        "reranker": (Qwen3ForCausalLM, processors.ByteLevel()),
    }
    for name, (network, processor) in parts.items():
        torch.manual_seed(0)
        raw.post_processor = processor
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=raw, pad_token=END, eos_token="<|im_end|>"
        )
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            initializer_range=0.1,
            tie_word_embeddings=True,
            **pipeline.sizes,
        )
        network(config).save_pretrained(pipeline.out / name)
        tokenizer.save_pretrained(pipeline.out / name)


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
