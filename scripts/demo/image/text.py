"""The prompt's tokens, and CLIP's text encoder in plain torch with the names of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

from demo.image.scenes import train_prompt

START, END, PADDING = "<|startoftext|>", "<|endoftext|>", "<|pad|>"
VOCABULARY = 768
LENGTH = 48
"""Tokens of a prompt; the longest of the generator has 33, what is beyond is cut off."""
EXAMPLES = 20_000


def learn_tokens(seed: int, examples: int = EXAMPLES) -> Tokenizer:
    """Byte-level BPE of lower-case words without their blanks; Chinese characters are cut one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "removed"),
            pre_tokenizers.Split(Regex(r"\p{Han}|(?:(?!\p{Han})\p{L})+|\p{N}|[^\p{L}\p{N}]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=5,
        special_tokens=[PADDING, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((train_prompt(seed, index).text for index in range(examples)), trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ends)
    return tokenizer


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Rows of LENGTH tokens, cut and padded as a pipeline does it."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.enable_truncation(LENGTH)
    copy.enable_padding(length=LENGTH, pad_id=copy.token_to_id(PADDING), pad_token=PADDING)
    return torch.tensor([one.ids for one in copy.encode_batch(list(texts))], dtype=torch.long)


@dataclass(frozen=True)
class TextShape:
    vocab_size: int = VOCABULARY
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    max_position_embeddings: int = LENGTH


class ClipText(nn.Module):
    """ids [n, LENGTH] -> [n, LENGTH, hidden]. Causal, padding is seen like any other token."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.shape = shape
        self.text_model = _TextModel(shape)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.text_model(ids)
        return seen


class _TextModel(nn.Module):
    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "token_embedding": nn.Embedding(shape.vocab_size, shape.hidden_size),
                "position_embedding": nn.Embedding(shape.max_position_embeddings, shape.hidden_size),
            }
        )
        layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layers": layers})
        self.final_layer_norm = nn.LayerNorm(shape.hidden_size)
        for table in self.embeddings.values():
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.embeddings["token_embedding"](ids) + self.embeddings["position_embedding"](places)
        for layer in self.encoder["layers"]:
            x = layer(x)
        normed: torch.Tensor = self.final_layer_norm(x)
        return normed


class _Layer(nn.Module):
    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        wide = shape.hidden_size
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(wide, wide) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        )
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(wide, shape.intermediate_size), "fc2": nn.Linear(shape.intermediate_size, wide)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.layer_norm1(x)
        q, k, v = (
            self.self_attn[name](normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.self_attn["out_proj"](seen)
        out: torch.Tensor = x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.layer_norm2(x))))
        return out
