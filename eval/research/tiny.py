"""Stable Diffusion's architectures at tiny widths, to try here what is to run on a GPU."""

from ..cost.architectures import SD15, SDXL


def make_tiny() -> None:
    """Let both architectures be of tiny widths from here on."""
    SD15.update(block_out_channels=(32, 32, 32, 32), cross_attention_dim=32, sample_size=16)
    SDXL.update(block_out_channels=(32, 32, 32), transformer_layers_per_block=(1, 1, 1))
    SDXL.update(cross_attention_dim=32, attention_head_dim=(2, 2, 2), sample_size=16)
