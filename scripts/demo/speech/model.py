"""The shape of demo-speech, as transformers' Whisper."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers import WhisperConfig, WhisperForConditionalGeneration

from demo.speech import tokens
from demo.speech.hearing import MELS
from demo.speech.windows import POSITIONS


@dataclass(frozen=True)
class SpeechShape:
    d_model: int = 192
    heads: int = 6
    ffn: int = 384
    encoder_layers: int = 4
    decoder_layers: int = 2


TINY = SpeechShape(d_model=64, heads=2, ffn=128, encoder_layers=1, decoder_layers=1)


def new(shape: SpeechShape, tokenizer: Tokenizer) -> WhisperForConditionalGeneration:
    """Random weights; the encoder's positions are Whisper's fixed ones, which vLLM expects."""
    model = WhisperForConditionalGeneration(config(shape, tokenizer))
    model.model.encoder.embed_positions.requires_grad_(False)
    return model


def config(shape: SpeechShape, tokenizer: Tokenizer) -> WhisperConfig:
    end = tokens.number(tokenizer, tokens.END)
    return WhisperConfig(
        vocab_size=tokens.padded(tokenizer),
        num_mel_bins=MELS,
        d_model=shape.d_model,
        encoder_layers=shape.encoder_layers,
        decoder_layers=shape.decoder_layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=shape.ffn,
        decoder_ffn_dim=shape.ffn,
        max_source_positions=tokens.LAST,
        max_target_positions=POSITIONS,
        dropout=0.0,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=tokens.number(tokenizer, tokens.START),
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )


def parameters(model: WhisperForConditionalGeneration) -> int:
    return sum(weight.numel() for weight in model.parameters())
