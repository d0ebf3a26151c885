"""U-Nets with quantised linear layers: those of torchao and bitsandbytes, and a stand-in of this file."""

import torch
from tiny import make_unet
from torch import nn

BLOCK = 64  # bitsandbytes' 4 bit kernel on a CPU takes layers of so many inputs or a multiple


def wide_unet(**changes):
    """A U-Net whose self-attention has so many inputs."""
    return make_unet(block_out_channels=(BLOCK,) * 3, **changes)


class PackedLinear(nn.Module):
    """A linear layer of 4 bit integers, two in a byte, in one column, which torch's counter does not see."""

    agentsd_may_skip = True

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scale = weight.abs().amax() / 7
        whole = (weight / scale).round().add(8).to(torch.uint8).view(-1, 2)
        self.weight = nn.Parameter((16 * whole[:, :1] + whole[:, 1:]), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        whole = torch.cat([self.weight // 16, self.weight % 16], dim=1).float() - 8
        weight = self.scale * whole.view(self.out_features, self.in_features)
        out = torch.from_numpy(x.detach().numpy() @ weight.T.numpy())
        return out if self.bias is None else out + self.bias


def replaced(unet, make):
    """A U-Net whose linear layers of enough inputs are others."""
    for name, layer in list(unet.named_modules()):
        if type(layer) is nn.Linear and layer.in_features % BLOCK == 0:
            parent, _, own = name.rpartition(".")
            setattr(unet.get_submodule(parent), own, make(layer))
    return unet.to("cpu").eval()  # where bitsandbytes quantises


def bitsandbytes(kind, **settings):
    """Layers as diffusers' BitsAndBytesConfig puts them in, which asks for a GPU."""

    def make(linear):
        from bitsandbytes import nn as layers

        sizes = linear.in_features, linear.out_features, linear.bias is not None
        layer = getattr(layers, kind)(*sizes, **settings)
        layer.load_state_dict(linear.state_dict())
        return layer

    return lambda unet: replaced(unet, make)


def torchao(config, **settings):

    def quantize(unet):
        from torchao import quantization

        quantization.quantize_(unet, getattr(quantization, config)(**settings))
        return unet

    return quantize


def by_group(unet):
    """torchao's 4 bits of weights, a scale for each 16 of them."""
    from torchao.quantization import PerGroup

    return torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(16))(unet)


STAND_IN = {"packed": lambda unet: replaced(unet, PackedLinear)}
PACKAGES = {
    "torchao, 8 bit weights": torchao("Int8WeightOnlyConfig"),
    "torchao, 8 bit weights and activations": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao, 4 bit weights": by_group,
    "bitsandbytes, 8 bit": bitsandbytes("Linear8bitLt", has_fp16_weights=False, threshold=6.0),
    "bitsandbytes, 4 bit (nf4)": bitsandbytes("Linear4bit", quant_type="nf4"),
}
"""Ways to quantise a U-Net in place; each returns it."""


def dequantized(unet):
    """A U-Net of plain layers with the weights that a quantised one computes with.

    Where a quantised layer rounds its input too, this one does not.
    """
    plain = wide_unet()
    with torch.no_grad():
        for name, layer in plain.named_modules():
            if type(layer) is nn.Linear:
                quantized = unet.get_submodule(name)
                nothing = quantized(torch.zeros(1, layer.in_features))
                layer.weight.copy_((quantized(torch.eye(layer.in_features)) - nothing).T)
    return plain
