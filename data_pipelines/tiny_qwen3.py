"""Write Qwen3's two models in miniature, with random weights.

The recipes in recipes/tiny/ train them.

python data_pipelines/tiny_qwen3.py OUT [tokenizer=FOLDER]

OUT/encoder and OUT/reranker take the same paths through the code as Qwen3-Embedding and
Qwen3-Reranker. The tokenizer is a byte-level BPE that is learnt from the sample library. With
`tokenizer` it is the tokenizer.json of a Qwen3 model.
"""

from pathlib import Path

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
_REPEATS = 1000  # of "yes" and "no" in the training texts, so that each becomes one token


class Pipeline(Config):
    """Settings of this pipeline."""

    out: Path
    tokenizer: Path | None = Field(default=None, description="folder with a tokenizer.json")
    vocabulary: int = Field(default=4096, description="tokens of a learnt tokenizer")
    sizes: dict[str, int] = Field(
        default={
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
        },
        description="settings of Qwen3Config",
    )


def learn_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Learn a byte-level BPE with Qwen3's special tokens. `yes` and `no` are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *["yes", "no"] * _REPEATS], trainer)
    tokenizer.add_special_tokens([END, "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return tokenizer


def save_model(folder: Path, network_class: type, tokenizer: Tokenizer, sizes: dict) -> None:
    """Save a network with random weights and its tokenizer in `folder`."""
    torch.manual_seed(0)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=END, eos_token="<|im_end|>"
    )
    config = Qwen3Config(
        vocab_size=len(wrapped), initializer_range=0.1, tie_word_embeddings=True, **sizes
    )
    network_class(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)


def run(pipeline: Pipeline) -> None:
    """Write both models. As in Qwen3-Embedding, the encoder's texts end with <|endoftext|>."""
    logging.disable_progress_bar()
    if pipeline.tokenizer is None:
        texts = [file.read_text(encoding="utf-8") for file in sorted(LIBRARY.rglob("SKILL.md"))]
        tokenizer = learn_tokenizer(texts, pipeline.vocabulary)
    else:
        tokenizer = Tokenizer.from_file(str(pipeline.tokenizer / "tokenizer.json"))

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    save_model(pipeline.out / "encoder", Qwen3Model, tokenizer, pipeline.sizes)

    tokenizer.post_processor = processors.ByteLevel()
    save_model(pipeline.out / "reranker", Qwen3ForCausalLM, tokenizer, pipeline.sizes)


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
