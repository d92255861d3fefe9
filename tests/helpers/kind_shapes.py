"""Shapes of every kind of drafter, and the marks that take a test through them."""

import pytest
from tiny_models import ATTENTION

from redrafter_jax import MedusaConfig, RecurrentConfig
from redrafter_jax.config import LinearScaling, Llama3Scaling
from redrafter_jax.config.drafter import HeadConfig
from redrafter_jax.drafters.block_head import BlockConfig
from redrafter_jax.drafters.eagle_head import EagleConfig
from redrafter_jax.drafters.hydra_head import HydraConfig, PrefixLayer
from redrafter_jax.drafters.kinds import KINDS

V, D = 13, 8
# Of every kind a plain shape first, then its variants.
SHAPES: dict[str, list[HeadConfig]] = {
    "recurrent": [
        RecurrentConfig(V, D, D, 1),
        RecurrentConfig(V, D, 2 * D, 0, cell="sum"),
        RecurrentConfig(V, D, 5, 0, cell="gru", head="low_rank", head_rank=3),
        RecurrentConfig(V, D, 5, 0, head="target", draft_tokens=(1, 2)),
        RecurrentConfig(V, D, 5, 2, context_layers=(0, 2), draft_tokens=(0, 3, 4)),
        RecurrentConfig(V, D, 5, 1, cell="gru", context_layers=(1,), **ATTENTION),
    ],
    "medusa": [
        MedusaConfig(V, D, 3, 1),
        MedusaConfig(V, D, 3, 0, draft_tokens=(0, 5, 12)),
        MedusaConfig(V, D, 1, 2, head="target", draft_tokens=(1, 2)),
    ],
    "eagle3": [
        EagleConfig(V, D, "3", D, 12, 2, 1, 4),
        EagleConfig(V, D, "1", D, 12, 2, 2, 4, head="target", fc_bias=True, attention_bias=True),
        EagleConfig(
            *(V, D, "3", 6, 12, 3, 1, 2),
            draft_tokens=(0, 3, 4),
            context_layers=(0, 2, 3, 5),
            own_embedding=True,
            attention_bias=True,
            attention_output_bias=True,
            qk_norm=True,
            norm_before_residual=True,
            norm_before_fc=True,
        ),
        EagleConfig(
            *(V, D, "3", D, 12, 2, 1, 4),
            head="target",
            draft_tokens=(1, 2),
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64),
            fc_norm=True,
            norm_output=True,
        ),
    ],
    "hydra": [
        HydraConfig(V, D, 2, 1),
        HydraConfig(V, D, 3, 3, draft_tokens=(0, 5, 12), hidden_state_offset=1),
        HydraConfig(V, D, 2, 2, grounded=False, head="target", draft_tokens=(1, 2)),
        HydraConfig(
            *(V, D, 2, 4),
            prefix=PrefixLayer(12, 4, 2, 2, rms_norm_eps=1e-5, rope_scaling=LinearScaling(2.0)),
        ),
    ],
    "block": [
        BlockConfig(V, D, 1, 12, 2, 1, 4, 4, 5, context_layers=(0,)),
        BlockConfig(
            *(V, D, 2, 12, 2, 2, 2, 4, 12),
            context_layers=(0, 2),
            sample_from_anchor=True,
            draft_tokens=(0, 3, 4),
            markov_rank=3,
            markov_head_type="gated",
            confidence=True,
            confidence_with_markov=True,
            attention_bias=True,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64),
        ),
        BlockConfig(
            *(V, D, 1, 12, 2, 1, 4, 5, 0),
            context_layers=(1,),
            markov_rank=2,
            markov_head_type="rnn",
            confidence=True,
            sample_from_anchor=True,
            head="own",
            draft_tokens=(1, 2),
        ),
    ],
}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
every_shape = pytest.mark.parametrize(
    ("kind", "config"),
    [(kind, one) for kind in KINDS for one in SHAPES[kind.name]],
    ids=lambda value: getattr(value, "name", str(value)),
)
