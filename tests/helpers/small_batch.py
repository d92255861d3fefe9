"""Four requests that tests of decoding share, so that they share what is compiled."""

from redrafter_jax.config import SamplingConfig, TreeConfig

DRAFT = TreeConfig(beam_width=4, draft_rounds=3)
PROMPTS = [[3, 1, 4], [9], [2, 6, 5, 3], [11, 0]]
MIXED = [
    SamplingConfig(),
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=1.0, top_k=8, top_p=0.9),
    SamplingConfig(temperature=1.3, min_p=0.05),
]
