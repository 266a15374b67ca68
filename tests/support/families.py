"""Models of diffusers at small random configs, with inputs of sizes that are not square."""

import diffusers
import torch


def flux():
    m = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    h, w = 6, 10
    ids = torch.zeros(h, w, 3)
    ids[..., 1] += torch.arange(h)[:, None]
    ids[..., 2] += torch.arange(w)
    return m, {
        "hidden_states": torch.randn(1, h * w, 4),
        "encoder_hidden_states": torch.randn(1, 7, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(7, 3),
    }


def sd3():
    m = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return m, {
        "hidden_states": torch.randn(1, 4, 12, 20),
        "encoder_hidden_states": torch.randn(1, 7, 32),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.tensor([1.0]),
    }


def pixart():
    m = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        use_additional_conditions=False,
    )
    return m, {
        "hidden_states": torch.randn(2, 4, 12, 20),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "timestep": torch.tensor([1, 1]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def wan():
    m = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return m, {
        "hidden_states": torch.randn(1, 4, 3, 8, 12),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "timestep": torch.tensor([1]),
    }


def hunyuan():
    m = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    mask = torch.ones(2, 8)
    mask[0, 5:] = 0
    return m, {
        "hidden_states": torch.randn(2, 4, 3, 5, 6),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "timestep": torch.tensor([1, 1]),
        "pooled_projections": torch.randn(2, 8),
        "encoder_attention_mask": mask,
        "guidance": torch.tensor([6.0, 6.0]),
    }


def cog():
    m = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=32,
        num_layers=2,
        sample_width=16,
        sample_height=12,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
    )
    return m, {
        "hidden_states": torch.randn(1, 3, 4, 12, 16),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "timestep": torch.tensor([1]),
    }


def ltx():
    m = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
    )
    return m, {
        "hidden_states": torch.randn(1, 3 * 6 * 8, 4),
        "encoder_hidden_states": torch.randn(1, 9, 16),
        "timestep": torch.tensor([1]),
        "encoder_attention_mask": torch.ones(1, 9).bool(),
        "num_frames": 3,
        "height": 6,
        "width": 8,
    }


def unet():
    m = diffusers.UNet2DConditionModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    return m, {
        "sample": torch.randn(1, 4, 16, 24),
        "timestep": torch.tensor(1),
        "encoder_hidden_states": torch.randn(1, 77, 16),
    }


def vae():
    m = diffusers.AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
    )
    return m, {"sample": torch.randn(1, 3, 32, 48)}


# What stands on the grid: extents, tokens before it and after it, by the shape of the layers' queries.
FAMILIES = {
    "Flux": (flux, {(6, 10): (7, 0)}),
    "SD3": (sd3, {(6, 10): (0, 7)}),
    "PixArt": (pixart, {(6, 10): (0, 0)}),
    "Wan": (wan, {(3, 4, 6): (0, 0)}),
    "HunyuanVideo": (hunyuan, {(3, 5, 6): (0, 8)}),
    "CogVideoX": (cog, {(3, 6, 8): (8, 0)}),
    "LTX": (ltx, {(3, 6, 8): (0, 0)}),
    "UNet": (unet, {(16, 24): (0, 0), (8, 12): (0, 0)}),
    "AutoencoderKL": (vae, {(16, 24): (0, 0)}),
}
BY_BACK_END = ("Flux", "Wan", "HunyuanVideo", "LTX")  # the others do not ask for one
