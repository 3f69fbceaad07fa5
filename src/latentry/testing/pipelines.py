"""Tiny random models in the diffusers layout: built offline in a second, loaded like the real ones."""

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


_T5_SHAPE: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 3,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 8,
}


def make_flux_pipeline(folder: Path, seed: int = 0) -> Path:
    """Save a FLUX.1 of a few thousand weights: ``make_flux_pipeline(tmp_path / "flux")``.

    Args:
        folder: The folder of the model, created if missing.
        seed: Decides the weights.

    Returns:
        The folder.
    """
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    clip_tokens, t5_tokens = clip_tokenizer(), t5_tokenizer()
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokens),
            bos_token_id=len(clip_tokens) - 2,
            eos_token_id=len(clip_tokens) - 1,
            pad_token_id=1,
            hidden_size=32,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            projection_dim=32,
        )
    )
    t5 = T5EncoderModel(T5Config(vocab_size=len(t5_tokens), **_T5_SHAPE))
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
        tokenizer=clip_tokens,
        text_encoder_2=t5,
        tokenizer_2=t5_tokens,
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder


def make_wan_pipeline(folder: Path, seed: int = 0) -> Path:
    """Save a Wan 2.1 of a few thousand weights: ``make_wan_pipeline(tmp_path / "wan")``.

    Args:
        folder: The folder of the model, created if missing.
        seed: Decides the weights.

    Returns:
        The folder.
    """
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(seed)
    tokenizer = t5_tokenizer()
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **_T5_SHAPE)),
        vae=AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder


def make_hunyuan_pipeline(folder: Path, *, image_to_video: bool = True, seed: int = 0) -> Path:
    """Save a HunyuanVideo 1.5 of a few thousand weights: ``make_hunyuan_pipeline(tmp_path / "hunyuan")``.

    Args:
        folder: The folder of the model, created if missing.
        image_to_video: Whether it is the image-to-video model, which has SigLIP.
        seed: Decides the weights.

    Returns:
        The folder.
    """
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15ImageToVideoPipeline,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from diffusers.guiders import ClassifierFreeGuidance
    from transformers import (
        ByT5Tokenizer,
        Qwen2_5_VLTextConfig,
        Qwen2_5_VLTextModel,
        SiglipImageProcessorPil,
        SiglipVisionConfig,
        SiglipVisionModel,
        T5Config,
        T5EncoderModel,
    )

    torch.manual_seed(seed)
    tokenizer, glyph_tokenizer = qwen_tokenizer(), ByT5Tokenizer()
    parts: dict[str, Any] = {
        "text_encoder": Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=2,
                rope_scaling={"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
            )
        ),
        "tokenizer": tokenizer,
        "text_encoder_2": T5EncoderModel(
            T5Config(vocab_size=len(glyph_tokenizer), **{**_T5_SHAPE, "num_layers": 2})
        ),
        "tokenizer_2": glyph_tokenizer,
        "vae": AutoencoderKLHunyuanVideo15(
            latent_channels=32,
            block_out_channels=(16, 16, 16, 32, 64),
            layers_per_block=1,
            downsample_match_channel=True,
            upsample_match_channel=True,
        ),
        "transformer": HunyuanVideo15Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=16,
            text_embed_2_dim=32,
            image_embed_dim=12,
            rope_axes_dim=(2, 2, 4),
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
        "guider": ClassifierFreeGuidance(guidance_scale=1.0),
    }
    if image_to_video:
        vision = SiglipVisionConfig(
            hidden_size=12,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=378,
            patch_size=14,
        )
        parts["image_encoder"] = SiglipVisionModel(vision)
        parts["feature_extractor"] = SiglipImageProcessorPil(size={"height": 378, "width": 378})
    family = HunyuanVideo15ImageToVideoPipeline if image_to_video else HunyuanVideo15Pipeline
    family(**parts).save_pretrained(folder)
    return folder


def qwen_tokenizer() -> Any:
    """A byte-level BPE tokenizer with a chat template, trained on a few sentences."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        _SENTENCES * 50, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.padding_side = "right"
    return tokenizer


def clip_tokenizer() -> Any:
    """A CLIP tokenizer: all bytes, each also as the end of a word, and a few merges. The end token comes last."""
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


def t5_tokenizer() -> Any:
    """A T5 tokenizer: a SentencePiece model of 200 pieces, trained on a few sentences."""
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
