"""Tiny random models in the real diffusers layout: built offline in a second, loaded like the real ones."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

_SENTENCES = (
    "a photo of a cat sitting on a wooden table",
    "the quick brown fox jumps over the lazy dog",
    "a video of waves crashing on the beach at sunset, camera panning slowly",
    "portrait of an old man with a grey beard, studio lighting, 85mm",
)


def make_flux_pipeline(folder: Path, seed: int = 0) -> Path:
    """A FLUX.1 of a few thousand weights: ``make_flux_pipeline(tmp_path / "flux")``."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    clip_tokenizer, t5_tokenizer = _clip_tokenizer(), _t5_tokenizer()
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokenizer),
            bos_token_id=len(clip_tokenizer) - 2,
            eos_token_id=len(clip_tokenizer) - 1,
            pad_token_id=1,
            hidden_size=32,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            projection_dim=32,
        )
    )
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tokenizer),
            d_model=32,
            d_kv=8,
            d_ff=37,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            relative_attention_num_buckets=8,
        )
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=256,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1159,
        scaling_factor=0.3611,
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=clip,
        tokenizer=clip_tokenizer,
        text_encoder_2=t5,
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder


def _clip_tokenizer() -> Any:
    """All bytes, each also as the end of a word, and a few merges; the end mark has the largest number."""
    from transformers import CLIPTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = list(bytes_to_unicode().values())
    vocabulary = {piece: i for i, piece in enumerate([*characters, *(f"{c}</w>" for c in characters)])}
    merges: list[tuple[str, str]] = []
    for word in ("cat", "dog", "photo", "video", "the", "of"):
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            if (parts[0], parts[1]) not in merges:
                merges.append((parts[0], parts[1]))
            parts = [parts[0] + parts[1], *parts[2:]]
            vocabulary.setdefault(parts[0], len(vocabulary))
    for mark in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[mark] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


def _t5_tokenizer() -> Any:
    """A SentencePiece model of 200 pieces, trained on the spot."""
    import sentencepiece
    from transformers import T5Tokenizer

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_SENTENCES * 50),
        model_writer=model,
        vocab_size=200,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocabulary = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(pieces.get_piece_size())]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)
