"""Models of transformers at small random configs, with pictures that are not square where the model takes them."""

import torch
import transformers
from transformers.models.sam.modeling_sam import SamVisionModel

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
NARROW = {name: value for name, value in SMALL.items() if name != "intermediate_size"}


def vit():
    return transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=32, patch_size=4)), {
        "pixel_values": torch.randn(1, 3, 48, 32),
        "interpolate_pos_encoding": True,
    }


def dinov2():
    return transformers.Dinov2Model(transformers.Dinov2Config(**NARROW, image_size=28, patch_size=7)), {
        "pixel_values": torch.randn(1, 3, 56, 42)
    }


def dinov2r():
    return transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**NARROW, image_size=28, patch_size=7)
    ), {"pixel_values": torch.randn(1, 3, 56, 42)}


def dinov3():
    return transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**SMALL, image_size=32, patch_size=4, num_register_tokens=4)
    ), {"pixel_values": torch.randn(1, 3, 48, 32)}


def siglip(side=32):
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL, image_size=side, patch_size=4)), {
        "pixel_values": torch.randn(1, 3, side, side)
    }


def segformer(ratios=(8, 4, 2, 1)):
    return transformers.SegformerModel(
        transformers.SegformerConfig(
            depths=[1] * 4,
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=8,
            sr_ratios=list(ratios),
        )
    ), {"pixel_values": torch.randn(1, 3, 128, 192)}


def swin():
    return transformers.SwinModel(
        transformers.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4)
    ), {"pixel_values": torch.randn(1, 3, 32, 32)}


def beit(side=32):
    return transformers.BeitModel(
        transformers.BeitConfig(**SMALL, image_size=side, patch_size=4, use_relative_position_bias=True)
    ), {"pixel_values": torch.randn(1, 3, side, side)}


def sam(side=64):
    c = transformers.SamVisionConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_dim=32,
        image_size=side,
        patch_size=4,
        window_size=7,
        global_attn_indexes=[1],
        initializer_range=0.2,  # its own is 1e-10: nothing would be seen
        output_channels=8,
    )
    return SamVisionModel(c), {"pixel_values": torch.randn(1, 3, side, side)}


def detr():
    b = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, out_features=["stage4"])
    return transformers.DetrModel(
        transformers.DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=b,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_queries=20,
        )
    ), {"pixel_values": torch.randn(1, 3, 128, 192)}


def depth():
    b = transformers.Dinov2Config(
        **NARROW | {"num_hidden_layers": 4},
        image_size=28,
        patch_size=7,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
        apply_layernorm=True,
    )
    return transformers.DepthAnythingForDepthEstimation(
        transformers.DepthAnythingConfig(
            backbone_config=b,
            reassemble_hidden_size=16,
            neck_hidden_sizes=[8, 8, 8, 8],
            fusion_hidden_size=8,
            head_hidden_size=8,
            patch_size=7,
        )
    ), {"pixel_values": torch.randn(1, 3, 56, 42)}


def videomae(side=32):
    return transformers.VideoMAEModel(
        transformers.VideoMAEConfig(**SMALL, image_size=side, patch_size=8, num_frames=4, tubelet_size=2)
    ), {"pixel_values": torch.randn(1, 4, 3, side, side)}


WINDOW = "16 tokens, and no picture is known"
# What stands on grids (extents, tokens before, extents of reduced keys), and what starts the reasons of the others.
VISION = {
    "ViT": (vit, [((12, 8), 1, ())], []),
    "DINOv2": (dinov2, [((8, 6), 1, ())], []),
    "DINOv2 with registers": (dinov2r, [((8, 6), 5, ())], []),
    "DINOv3": (dinov3, [((12, 8), 5, ())], []),
    "SigLIP": (siglip, [((8, 8), 0, ())], []),
    "SegFormer": (
        segformer,
        [((32, 48), 0, (4, 6)), ((16, 24), 0, (4, 6)), ((8, 12), 0, (4, 6)), ((4, 6), 0, ())],
        [],
    ),
    "Swin": (swin, [], [WINDOW, WINDOW]),
    "BEiT": (beit, [((8, 8), 1, ())], []),
    "SAM": (sam, [((7, 7), 0, ()), ((16, 16), 0, ())], []),
    "DETR": (detr, [((4, 6), 0, ())], ["20 tokens", "20 queries and 24 keys"]),
    "Depth Anything": (depth, [((8, 6), 1, ())] * 4, []),
    "VideoMAE": (videomae, [((2, 4, 4), 0, ())], []),
}
PATCH_ONLY = ("SAM",)  # its attention does not look for an implementation by name
