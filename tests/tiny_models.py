"""Models with random weights, small enough to build in a test: a BERT and a Qwen3."""

import copy
import functools
import os
from pathlib import Path

import pytest
import torch
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
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.utils import logging

logging.disable_progress_bar()


TEXT = (
    "yes no deploy pods kubernetes chart table spreadsheet extract pdf text translate review "
    "merge commit audio video clip query skill agent task document find the a an of and to in "
    "with for from that files data report"
)
WORDS = TEXT.split()


def bert_tokenizer():
    """Return a lower-casing WordPiece tokenizer over WORDS and single characters."""
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *WORDS,
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    raw = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=True)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return BertTokenizerFast(tokenizer_object=raw, model_max_length=512)


def qwen3_tokenizer(appends_end: bool):
    """Return a byte-level BPE tokenizer with Qwen3's special tokens.

    With `appends_end` it appends `<|endoftext|>` as Qwen3-Embedding's tokenizer does.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator([f"{word} {word}" for word in WORDS] * 3, trainer)
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    raw.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    if appends_end:
        end = ("<|endoftext|>", raw.token_to_id("<|endoftext|>"))
        raw.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", pair="$A $B <|endoftext|>", special_tokens=[end]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )


def _bert_config(vocabulary: int, dropout: float) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
        num_labels=1,
    )


def _qwen3_config(vocabulary: int, width: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=width // 2,
        intermediate_size=2 * width,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )


def save_bert(folder: Path, reranker: bool, dropout: float = 0.0) -> Path:
    """Save a BERT encoder, or a BERT with a one-output classification head."""
    torch.manual_seed(0)
    tokenizer = bert_tokenizer()
    model_class = BertForSequenceClassification if reranker else BertModel
    model_class(_bert_config(len(tokenizer), dropout)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_qwen3(folder: Path, reranker: bool, appends_end: bool = True, width: int = 32) -> Path:
    """Save a Qwen3 base model, or a Qwen3 causal language model."""
    torch.manual_seed(0)
    tokenizer = qwen3_tokenizer(appends_end and not reranker)
    model_class = Qwen3ForCausalLM if reranker else Qwen3Model
    model_class(_qwen3_config(len(tokenizer), width)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@functools.cache
def real_qwen3_tokenizer():
    """Load Qwen3's own tokenizer, or skip the test where there is none.

    It is not part of the project. Its folder is qwen3-tokenizer in SKILLTRAIN_SHARED_DATA, or in
    ../shared/data beside the repository.
    """
    default = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SKILLTRAIN_SHARED_DATA", default)) / "qwen3-tokenizer"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("no Qwen3 tokenizer: set SKILLTRAIN_SHARED_DATA to the folder with its folder")
    return AutoTokenizer.from_pretrained(folder)


def as_embedding_tokenizer(tokenizer):
    """Return a copy that appends `<|endoftext|>` to every text, as Qwen3-Embedding's does."""
    tokenizer = copy.deepcopy(tokenizer)
    end = ("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
            processors.TemplateProcessing(
                single="$A <|endoftext|>",
                pair="$A <|endoftext|> $B:1 <|endoftext|>:1",
                special_tokens=[end],
            ),
        ]
    )
    return tokenizer
