"""How far logits may be from the float32 reference: one table for every place that checks them."""

from __future__ import annotations

# By the coarsest number format in a bundle (``Artifact.numerics``). max_abs is in units of the
# reference logits' standard deviation, KL in nats per token. The reference of a quantised bundle is
# the model of its rounded weights: what is left for int8 and int4 is that runtimes round activations
# to 8 bits as they run. Their limits are three to four times the worst measured: 0.067 in 20 layers of
# random weights at int4, 2.4e-3 and 0.99977 in two layers of peaked attention; 0.035, 5e-4 and
# 0.99994 in the trained checkpoints with int8, int4 and mixed weights.
THRESHOLDS = {
    "fp32": {"max_abs": 1e-3, "kl": 1e-6, "cosine": 0.99999},
    "fp16": {"max_abs": 5e-2, "kl": 1e-3, "cosine": 0.999},
    "int8": {"max_abs": 0.2, "kl": 1e-2, "cosine": 0.999},
    "int4": {"max_abs": 0.2, "kl": 1e-2, "cosine": 0.999},
}
