"""The drafter in training: a transformers causal LM whose attention follows a packed layout (paper, 3.2).

Owns loading it and the two calls on a packed batch: the losses, and what it would draft. The network is the
one that is served; nothing is added to its parameters, and `lm` is what is exported.

Legend: N rows, S context columns, K blocks of a row, B block size, W = S + K*B columns, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from train import attention as training_attention
from train.attention import AttentionName
from train.losses import DEFAULT_CHUNK, ChunkedHead, TopTokens, WeightedCrossEntropy, loss_and_gradient
from train.packing import PackedBatch

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Losses:
    """fp32 scalars, means over the rows of a batch; total = diff + ar_weight * ar (equation 7).

    Only `total` has a gradient.
    """

    total: torch.Tensor
    diff: torch.Tensor
    ar: torch.Tensor


def load_lm(
    path: str | Path,
    *,
    dtype: torch.dtype,
    attention: AttentionName,
    random_init: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """The causal LM of a drafter folder, on the CPU, with training attention.

    Args:
        random_init: same network, weights drawn from `seed` as the config says.

    Raises:
        ValueError: its rotary frequencies depend on the length of a sequence, which packed rows do not have.
    """
    training_attention.register()
    implementation = training_attention.implementation(attention)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    rope_type = (config.rope_parameters or {}).get("rope_type")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise ValueError(
            f"{path}: rope_type is {rope_type!r}, whose frequencies follow the sequence length: it cannot be "
            "trained on packed rows, start from a model with another one"
        )
    if not random_init:
        return AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=implementation
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)


class TrainModel(torch.nn.Module):
    """A drafter in training; `lm` is the Hugging Face model that is exported.

    Args:
        lm: a causal LM of a family that drafters may have.
        mask_token_id: the reserved id; its logit is -inf in losses and drafts.
        attention: which attention computes the passes.
        ar_weight: lambda of equation 7.
        head_chunk: positions whose logits exist at once.
        compile_loss: fuse the loss's elementwise work with torch.compile; compiles on the first batch.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        mask_token_id: int,
        attention: AttentionName,
        ar_weight: float = 1.0,
        head_chunk: int = DEFAULT_CHUNK,
        compile_loss: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= mask_token_id < lm.config.vocab_size:
            raise ValueError(
                f"mask_token_id is {mask_token_id}, it must be from 0 to {lm.config.vocab_size - 1}: the "
                "embedding rows of the model"
            )
        if not 0 <= ar_weight < float("inf"):
            raise ValueError(f"ar_weight is {ar_weight}, it must be 0 or more")
        if head_chunk < 1:
            raise ValueError(f"head_chunk is {head_chunk}, it must be at least 1")
        training_attention.register()
        lm.set_attn_implementation(training_attention.implementation(attention))
        lm.set_output_embeddings(ChunkedHead.around(lm.get_output_embeddings()))
        self.lm = lm
        self.mask_token_id = mask_token_id
        self.attention: AttentionName = attention
        self.ar_weight = ar_weight
        self.head_chunk = head_chunk
        self._compute = torch.compile(loss_and_gradient) if compile_loss else loss_and_gradient

    def forward(self, batch: PackedBatch) -> Losses:
        """Losses of a batch: per example, then averaged over its rows."""
        diff, ar = batch.diff, batch.ar
        hidden = self._hidden(batch).flatten(0, 1)  # [N*W, E]
        work = WeightedCrossEntropy(
            labels=torch.cat([diff.labels, ar.labels]),
            weights=torch.cat([diff.weights, self.ar_weight * ar.weights]) / batch.num_rows,
            mask_token_id=self.mask_token_id,
            chunk=self.head_chunk,
            compute=self._compute,
        )
        predicting = hidden.index_select(0, torch.cat([diff.index, ar.index]))
        total, per_position = self.lm.get_output_embeddings()(predicting, work)
        of_diff, of_ar = per_position.split([len(diff.labels), len(ar.labels)])
        return Losses(
            total=total,
            diff=(diff.weights * of_diff).sum() / batch.num_rows,
            ar=(ar.weights * of_ar).sum() / batch.num_rows,
        )

    @torch.no_grad()
    def drafts(self, batch: PackedBatch, *, top: int = 1) -> torch.Tensor:
        """The `top` most likely ids at every masked position, best first: `[N, K, B-1, top]` int64.

        Blocks a row does not have are drafted as well and mean nothing.
        """
        blocks = self._hidden(batch)[:, batch.layout.num_known :].unflatten(1, (-1, batch.block_size))
        masked = blocks[:, :, 1:]  # [N, K, B-1, E]
        work = TopTokens(top=top, mask_token_id=self.mask_token_id, chunk=self.head_chunk)
        ids: torch.Tensor = self.lm.get_output_embeddings()(masked.flatten(0, 2), work)
        return ids.view(*masked.shape[:3], top)

    def _hidden(self, batch: PackedBatch) -> torch.Tensor:
        config = self.lm.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        plan = training_attention.make_plan(
            self.attention,
            batch.layout,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            dtype=self.lm.dtype,
        )
        # No cache and no mask: transformers then builds neither of its own.
        output = self.lm.get_decoder()(
            input_ids=batch.token_ids,
            position_ids=batch.layout.position_ids,
            use_cache=False,
            attention_plan=plan,
        )
        return cast(torch.Tensor, output.last_hidden_state)
