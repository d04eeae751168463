"""Adaptive heads as a transformer: streams through attention blocks, then a gate that the context computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from valueformer.heads import Mix
from valueformer.mixing import gate
from valueformer.prompt import Layout
from valueformer.streams import StreamPrompt
from valueformer.transformer import Transformer

__all__ = ["GatedOutput", "GatedTransformer"]


@dataclass(frozen=True, eq=False)
class GatedOutput:
    """What a gated forward pass read."""

    query_values: Tensor
    """``(m,)`` the mixture's values at the queries after the last layer."""
    td_error: Tensor
    """``(L,)`` the mixture's mean squared TD error on the whole context after each layer."""
    weights: Tensor
    """``(h + 1,)`` mixing weights; the last is the constant's."""


class GatedTransformer(nn.Module):
    """All heads and folds in one stack; the last tokens' own TD errors decide how much each head counts.

    A transition's token carries, per head, the value slots of the column that left its episode out: those TD errors are
    what the gate reads (:func:`valueformer.mixing.gate`). No weight depends on the context.
    """

    def __init__(self, transformer: Transformer, mix: Mix) -> None:
        super().__init__()
        self.transformer = transformer
        self.mix: Mix = mix

    @property
    def layout(self) -> Layout:
        """Layout of the prompts that it takes."""
        return cast(Layout, self.transformer.layout)

    def forward(self, prompt: StreamPrompt) -> GatedOutput:
        """Run all layers on a prompt, then the gate."""
        output = self.transformer(prompt)
        constant = prompt.constant()  # (b, n)
        td = output.td_errors  # (L, h, b, n)
        whole = torch.cat([td[:, :, 0], constant[0].expand(len(td), 1, -1)], dim=1)  # (L, h + 1, n)
        if prompt.fold is None:
            weights = gate(whole[-1].mT, None, "equal" if self.mix == "context" else self.mix)
        else:
            column, rows = 1 + prompt.fold, torch.arange(len(prompt.fold), device=td.device)
            left_out = torch.cat([td[-1][:, column, rows], constant[column, rows][None]])  # (h + 1, n)
            first = prompt.columns[0]
            weights = gate(left_out.mT, first.key_weight[0].gather(-1, first.state_token), self.mix)
        mixed = torch.einsum("lhn,h->ln", whole.double(), weights)
        values = torch.einsum("hm,h->m", output.query_values[:, 0].double(), weights[:-1])
        return GatedOutput(values, prompt.columns[0].mean_square(mixed), weights)
