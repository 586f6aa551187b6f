"""BERT to answer with, read without transformers: importing that takes longer than opening everything else together."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from skilltrain.files import read_json

_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
_AS_COMPUTED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
_UNUSED = ("pooler.", "embeddings.position_ids")
PROBE = "a b c d e"
"""Letters that any tokenizer knows whose files are whole."""


class Bert(nn.Module):
    """The network of a BERT model without its pooler and without dropout; its parameters have transformers' names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        dim, rows = (
            self.config.hidden_size,
            ("vocab_size", "max_position_embeddings", "type_vocab_size"),
        )
        tables = zip(
            ("word_embeddings", "position_embeddings", "token_type_embeddings"), rows, strict=True
        )
        self.embeddings = nn.ModuleDict({name: _table(config[num], dim) for name, num in tables})
        self.embeddings["LayerNorm"] = self._norm()
        layers = nn.ModuleList(self._layer() for _ in range(self.config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})

    def _norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)

    def _layer(self) -> nn.ModuleDict:
        dim, inner = self.config.hidden_size, self.config.intermediate_size
        own = nn.ModuleDict({name: nn.Linear(dim, dim) for name in ("query", "key", "value")})
        joined, narrowed = (
            nn.ModuleDict({"dense": nn.Linear(width, dim), "LayerNorm": self._norm()})
            for width in (dim, inner)
        )
        attention = nn.ModuleDict({"self": own, "output": joined})
        widened = nn.ModuleDict({"dense": nn.Linear(dim, inner)})
        return nn.ModuleDict({"attention": attention, "intermediate": widened, "output": narrowed})

    def forward(
        self,
        input_ids: Int[Tensor, "text token"],
        attention_mask: Int[Tensor, "text token"] | None = None,
    ) -> SimpleNamespace:
        """`last_hidden_state` [text, token, dim] as transformers' BertModel gives it."""
        tables: Any = self.embeddings
        positions, layers = torch.arange(input_ids.shape[1]), cast(Any, self.encoder["layer"])
        hidden = tables["word_embeddings"](input_ids) + tables["token_type_embeddings"].weight[0]
        hidden = tables["LayerNorm"](hidden + tables["position_embeddings"](positions))
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        for layer in layers:
            hidden = self._attended(layer["attention"], hidden, mask)
            widened = gelu(layer["intermediate"]["dense"](hidden))
            hidden = layer["output"]["LayerNorm"](layer["output"]["dense"](widened) + hidden)
        return SimpleNamespace(last_hidden_state=hidden)

    def _attended(
        self,
        attention: Any,
        hidden: Float[Tensor, "text token dim"],
        mask: Bool[Tensor, "text 1 1 token"] | None,
    ) -> Float[Tensor, "text token dim"]:
        heads = (self.config.num_attention_heads, -1)
        parts = (
            attention["self"][name](hidden).unflatten(-1, heads)
            for name in ("query", "key", "value")
        )
        query, key, value = (part.transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
        return attention["output"]["LayerNorm"](attention["output"]["dense"](seen) + hidden)


class BertTokenizer:
    """As much of transformers' tokenizer of this name as an encoder asks for."""

    is_fast = True

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer: Any = Tokenizer.from_file(str(file))
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        self.pad_token_id = self.backend_tokenizer.token_to_id("[PAD]")
        self.unk_token_id = self.backend_tokenizer.token_to_id("[UNK]")


def _table(rows: int, dim: int) -> nn.Embedding:
    """An embedding that is not filled at random: on the device meta that imports a compiler, which takes a second."""
    return nn.Embedding(rows, dim, _weight=torch.empty(rows, dim))


def read_bert(folder: Path) -> tuple[Bert, BertTokenizer] | None:
    """The model of a folder; None where it is not plain, whole BERT: transformers reads it, or says what is wrong."""
    if not all((folder / name).is_file() for name in _FILES):
        return None
    from safetensors.torch import load_file

    try:
        config, spelling, tokens = (read_json(folder / name) for name in _FILES[:3])
        as_computed = all(config.get(name, usual) == usual for name, usual in _AS_COMPUTED.items())
        is_plain = (
            as_computed
            and "model_type" in config
            and spelling.get("tokenizer_class") == "BertTokenizer"
        )
        if not is_plain or not _is_spelt(spelling, tokens["normalizer"]):
            return None
        with torch.device("meta"):  # a config.json may ask for more than there is memory
            network = Bert({**config, "name_or_path": str(folder)})
        weights = {
            name.removeprefix("bert."): value
            for name, value in load_file(folder / _FILES[3]).items()
        }
        shapes = {name: value.shape for name, value in network.state_dict().items()}
        used = {name: value for name, value in weights.items() if not name.startswith(_UNUSED)}
        tokenizer = BertTokenizer(folder / _FILES[2])
        backend = tokenizer.backend_tokenizer
        read = {*backend.encode(PROBE, add_special_tokens=False).ids} - {tokenizer.unk_token_id}
        is_whole = {name: value.shape for name, value in used.items()} == shapes
        if not is_whole or not read or backend.get_vocab_size() > config["vocab_size"]:
            return None
        network.load_state_dict(used, assign=True)
    except Exception:  # a damaged file makes its reader raise anything
        return None
    return network, tokenizer


def _is_spelt(told: Mapping[str, Any], normalizer: Mapping[str, Any] | None) -> bool:
    """Whether the tokenizer's two files agree on case, accents and Chinese characters; transformers follows `told`."""
    names = (
        ("lowercase", "do_lower_case", True),
        ("strip_accents", "strip_accents", None),
        ("handle_chinese_chars", "tokenize_chinese_chars", True),
    )
    return normalizer is not None and all(
        normalizer.get(own) == told.get(name, usual) for own, name, usual in names
    )
