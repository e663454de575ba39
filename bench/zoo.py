"""Models that use layer norms, with random weights: for tests in small, for the benchmark in their usual size.

The first two need torch alone. GPT-2, BERT and a vision transformer come from ``transformers``, another from ``timm``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastln


@dataclass(frozen=True)
class Size:
    """How large a transformer is, and what it is fed."""

    width: int
    depth: int
    heads: int
    vocabulary: int
    tokens: int
    batch: int
    image: int = 224
    patch: int = 16
    images: int = 64
    classes: int = 1000


SMALL = Size(32, 2, 2, vocabulary=97, tokens=16, batch=3, image=32, patch=8, images=3, classes=10)
BASE = Size(768, 12, 12, vocabulary=50257, tokens=1024, batch=8)


@dataclass(frozen=True)
class Entry:
    """One model."""

    name: str
    make: Callable[[Size], nn.Module]
    sees: str  # "vectors", "tokens" or "images"
    needs: str | None = None  # package

    def is_installed(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def inputs(self, size: Size, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        if self.sees == "tokens":
            return torch.randint(size.vocabulary, (size.batch, size.tokens), generator=draw).to(device)
        if self.sees == "images":
            shape = size.images, 3, size.image, size.image
        else:
            shape = size.batch, size.tokens, size.width
        return torch.randn(shape, generator=draw).to(device, dtype)

    def convert(self, model: nn.Module) -> fastln.Conversion:
        if self.needs != "timm":
            return fastln.convert(model)
        from timm.layers import LayerNorm

        return fastln.convert(model, also=[LayerNorm])


def logits(model: nn.Module, x: Tensor) -> Tensor:
    """What the model says, whichever way it wraps that."""
    y = model(x)
    return getattr(y, "logits", y)


# ------------------------------------------------------------------------------------------ torch alone


class Block(nn.Module):
    """A pre-norm block of a decoder."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.project = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder in plain torch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def encoder(size: Size) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, size.depth, nn.LayerNorm(size.width), enable_nested_tensor=False)


# ------------------------------------------------------------------------------------ transformers, timm


def gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.tokens,
        n_embd=size.width,
        n_layer=size.depth,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _encoder(size: Size) -> dict[str, int | float]:
    """What transformers calls the sizes of an encoder, without dropout."""
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=size.vocabulary,
        **_encoder(size),
        max_position_embeddings=size.tokens,
    )
    return BertForMaskedLM(config)


def vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        **_encoder(size),
        image_size=size.image,
        patch_size=size.patch,
        num_labels=size.classes,
    )
    return ViTForImageClassification(config)


def timm_vit(size: Size) -> nn.Module:
    from timm.models import VisionTransformer

    return VisionTransformer(
        img_size=size.image,
        patch_size=size.patch,
        num_classes=size.classes,
        embed_dim=size.width,
        depth=size.depth,
        num_heads=size.heads,
    )


ENTRIES = (
    Entry("nn.TransformerEncoder", encoder, "vectors"),
    Entry("GPT in plain torch", GPT, "tokens"),
    Entry("GPT-2 (transformers)", gpt2, "tokens", "transformers"),
    Entry("BERT (transformers)", bert, "tokens", "transformers"),
    Entry("ViT (transformers)", vit, "images", "transformers"),
    Entry("ViT (timm)", timm_vit, "images", "timm"),
)
