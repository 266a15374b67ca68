"""Models of diffusers at small random configs, with inputs of sizes that are not square."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

LATENT = {"in_channels": 4, "out_channels": 4}
TWO_HEADS = {**LATENT, "num_attention_heads": 2}


@dataclass(frozen=True)
class Family:
    """A model and its inputs, made when it is called."""

    model: Callable[..., torch.nn.Module]
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]  # of inputs that are drawn
    timestep: list[float] | int | None = None
    others: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> tuple[torch.nn.Module, dict[str, Any]]:
        model = self.model(**self.config)
        inputs = {name: torch.randn(shape) for name, shape in self.shapes.items()}
        timestep = {} if self.timestep is None else {"timestep": torch.tensor(self.timestep)}
        return model, {**inputs, **timestep, **self.others}


def latents(latent: tuple[int, ...], text: tuple[int, ...], **others: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs that most transformers have."""
    return {"hidden_states": latent, "encoder_hidden_states": text, **others}


def places(height: int, width: int) -> torch.Tensor:
    """Flux's names of the places of a picture, [height * width, 3]."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).float()


def masked(batch: int, length: int, shown: int) -> torch.Tensor:
    """A mask of text tokens, of which the first entry of the batch shows only some."""
    mask = torch.ones(batch, length)
    mask[0, shown:] = 0
    return mask


FLUX = Family(
    diffusers.FluxTransformer2DModel,
    {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    },
    latents((1, 60, 4), (1, 7, 32), pooled_projections=(1, 32)),
    [1.0],
    {"img_ids": places(6, 10), "txt_ids": torch.zeros(7, 3)},
)
SD3 = Family(
    diffusers.SD3Transformer2DModel,
    {
        **LATENT,
        "sample_size": 32,
        "patch_size": 2,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 64,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    },
    latents((1, 4, 12, 20), (1, 7, 32), pooled_projections=(1, 64)),
    [1.0],
)
PIXART = Family(
    diffusers.PixArtTransformer2DModel,
    {
        "sample_size": 8,
        "num_layers": 2,
        "patch_size": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "caption_channels": 32,
        "in_channels": 4,
        "cross_attention_dim": 24,
        "out_channels": 8,
        "attention_bias": True,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "use_additional_conditions": False,
    },
    latents((2, 4, 12, 20), (2, 8, 32)),
    [1, 1],
    {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
)
WAN = Family(
    diffusers.WanTransformer3DModel,
    {
        **TWO_HEADS,
        "patch_size": (1, 2, 2),
        "attention_head_dim": 12,
        "text_dim": 16,
        "freq_dim": 256,
        "ffn_dim": 32,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    },
    latents((1, 4, 3, 8, 12), (1, 12, 16)),
    [1],
)
HUNYUAN = Family(
    diffusers.HunyuanVideoTransformer3DModel,
    {
        **TWO_HEADS,
        "attention_head_dim": 10,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "patch_size": 1,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4),
    },
    latents((2, 4, 3, 5, 6), (2, 8, 16), pooled_projections=(2, 8)),
    [1, 1],
    {"encoder_attention_mask": masked(2, 8, 5), "guidance": torch.tensor([6.0, 6.0])},
)
COG = Family(
    diffusers.CogVideoXTransformer3DModel,
    {
        **TWO_HEADS,
        "attention_head_dim": 16,
        "time_embed_dim": 2,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 16,
        "sample_height": 12,
        "sample_frames": 9,
        "patch_size": 2,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": 8,
    },
    latents((1, 3, 4, 12, 16), (1, 8, 32)),
    [1],
)
LTX = Family(
    diffusers.LTXVideoTransformer3DModel,
    {**TWO_HEADS, "attention_head_dim": 8, "cross_attention_dim": 16, "num_layers": 2, "caption_channels": 16},
    latents((1, 144, 4), (1, 9, 16)),
    [1],
    {"encoder_attention_mask": torch.ones(1, 9).bool(), "num_frames": 3, "height": 6, "width": 8},
)
UNET = Family(
    diffusers.UNet2DConditionModel,
    {
        **LATENT,
        "sample_size": 32,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
        "norm_num_groups": 8,
    },
    {"sample": (1, 4, 16, 24), "encoder_hidden_states": (1, 77, 16)},
    1,
)
VAE = Family(
    diffusers.AutoencoderKL,
    {
        "block_out_channels": (16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "latent_channels": 4,
    },
    {"sample": (1, 3, 32, 48)},
)

# What stands on the grid: extents, tokens before it and after it, by the shape of the layers' queries.
FAMILIES = {
    "Flux": (FLUX, {(6, 10): (7, 0)}),
    "SD3": (SD3, {(6, 10): (0, 7)}),
    "PixArt": (PIXART, {(6, 10): (0, 0)}),
    "Wan": (WAN, {(3, 4, 6): (0, 0)}),
    "HunyuanVideo": (HUNYUAN, {(3, 5, 6): (0, 8)}),
    "CogVideoX": (COG, {(3, 6, 8): (8, 0)}),
    "LTX": (LTX, {(3, 6, 8): (0, 0)}),
    "UNet": (UNET, {(16, 24): (0, 0), (8, 12): (0, 0)}),
    "AutoencoderKL": (VAE, {(16, 24): (0, 0)}),
}
BY_BACK_END = ("Flux", "Wan", "HunyuanVideo", "LTX")  # the others do not ask for one


# Of 384 tokens on a grid and more: the input that is larger, its latents [B, C, *G], the grid, and what goes with it.
LARGE: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "Flux": ("hidden_states", (1, 4, 16, 24), (16, 24), {"img_ids": places(16, 24)}),
    "SD3": ("hidden_states", (1, 4, 32, 48), (16, 24), {}),
    "PixArt": ("hidden_states", (2, 4, 32, 48), (16, 24), {}),
    "Wan": ("hidden_states", (1, 4, 4, 16, 24), (4, 8, 12), {}),
    "HunyuanVideo": ("hidden_states", (2, 4, 4, 8, 12), (4, 8, 12), {}),
    "CogVideoX": ("hidden_states", (1, 4, 4, 16, 24), (4, 8, 12), {}),
    "LTX": ("hidden_states", (1, 4, 4, 8, 12), (4, 8, 12), {"num_frames": 4, "height": 8, "width": 12}),
    "UNet": ("sample", (1, 4, 16, 24), (16, 24), {}),
    "AutoencoderKL": ("sample", (1, 3, 32, 48), (16, 24), {}),
}
GAIN, NORMED_GAIN = 4.0, 2.0  # of queries, so that random weights attend some keys more than others


def sharp(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model whose attention is not even, and latents that vary slowly: what clusters can sum up."""
    model, inputs = FAMILIES[name][0]()
    argument, shape, _, others = LARGE[name]
    rank = len(shape) - 2
    coarse = torch.randn(*shape[:2], *(max(2, n // 4) for n in shape[2:]))
    latents = torch.nn.functional.interpolate(coarse, shape[2:], mode=("bilinear", "trilinear")[rank - 2])
    inputs[argument] = latents if inputs[argument].ndim == latents.ndim else latents.flatten(2).mT
    for module in model.modules():
        norm = getattr(module, "norm_q", None)
        if norm is not None and norm.weight is not None:
            norm.weight.data.mul_(NORMED_GAIN)
        elif hasattr(module, "to_q"):
            module.to_q.weight.data.mul_(GAIN)
    return model.eval().requires_grad_(False), {**inputs, **others}
