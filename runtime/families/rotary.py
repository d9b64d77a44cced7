"""Joint attention of Qwen-Image's two streams with a rotary embedding in real numbers, which compilers take.

diffusers' own multiplies complex numbers; compiled, those fall back to eager pieces. In eager mode the complex one is
the faster of the two, so this one is for compiled blocks.
"""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn


def make_real(denoiser: Any) -> None:
    """Angles as pairs of cosine and sine, and attention that takes them, in every block of `denoiser`."""
    denoiser.pos_embed.register_forward_hook(_as_pairs)
    for module in denoiser.modules():
        if hasattr(module, "add_q_proj"):
            module.set_processor(JointAttention())


def _as_pairs(module: nn.Module, given: Any, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Complex [tokens, D / 2] of image and text to real [tokens, 1, D / 2, 2]."""
    image, text = (torch.view_as_real(one).unsqueeze(1) for one in angles)
    return image, text


def rotate(states: Tensor, angles: Tensor) -> Tensor:
    """`states` [B, tokens, heads, D], each neighbouring pair turned by its angle; computed in fp32."""
    real, imaginary = states.float().reshape(*states.shape[:-1], -1, 2).unbind(-1)
    cosine, sine = angles.unbind(-1)
    turned = torch.stack((real * cosine - imaginary * sine, real * sine + imaginary * cosine), dim=-1)
    return turned.flatten(-2).type_as(states)


class JointAttention:
    """An attention processor of diffusers: text and image attend to each other, text first."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Image [B, I, D] and text [B, T, D]; the mask, bool [B, T], is false at padding."""
        if image_rotary_emb is None or attention_mask is not None:
            raise ValueError("expected angles for image and text, and no mask but that of the text")
        image_angles, text_angles = image_rotary_emb
        image, text = hidden_states, encoder_hidden_states
        query = _joined(
            attn,
            (attn.add_q_proj(text), attn.norm_added_q, text_angles),
            (attn.to_q(image), attn.norm_q, image_angles),
        )
        key = _joined(
            attn,
            (attn.add_k_proj(text), attn.norm_added_k, text_angles),
            (attn.to_k(image), attn.norm_k, image_angles),
        )
        value = torch.cat([_heads(attn, attn.add_v_proj(text)), _heads(attn, attn.to_v(image))], dim=1)
        attended = dispatch_attention_fn(
            query, key, value, attn_mask=_joint_mask(encoder_hidden_states_mask, image)
        )
        attended = attended.flatten(2, 3).to(query.dtype)
        length = text.shape[1]
        return _projected(attn, attended[:, length:]), attn.to_add_out(attended[:, :length].contiguous())


def _heads(attn: Any, states: Tensor) -> Tensor:
    return states.reshape(*states.shape[:-1], -1, attn.inner_dim // attn.heads)


def _joined(attn: Any, *streams: tuple[Tensor, Any, Tensor]) -> Tensor:
    """Queries or keys of all streams, normalised, turned, one after another."""
    return torch.cat([rotate(norm(_heads(attn, states)), angles) for states, norm, angles in streams], dim=1)


def _projected(attn: Any, states: Tensor) -> Tensor:
    states = states.contiguous()
    for layer in attn.to_out:
        states = layer(states)
    return states


def _joint_mask(text: Tensor | None, image: Tensor) -> Tensor | None:
    """bool [B, 1, 1, T + I]; None where nothing is padded, for a mask forces attention off its fast path."""
    if text is None:
        return None
    return torch.cat([text, text.new_ones(image.shape[:2])], dim=1)[:, None, None]
