"""The first thing to run: a small real model, recorded live and replayed through eight optimizers in two minutes."""

from ablations.models.config import MoEConfig
from ablations.presets._recording import Recording

ABLATION = Recording(
    name="demo",
    question="On one recorded run, how do the updates of eight optimizers differ on routed experts?",
    decides="Nothing about losses: a replay compares updates. It says whose updates are the steadiest over time.",
    # One dense block and two of 8 experts, 1.1M parameters, of which 0.8M are in routed experts.
    model=MoEConfig(
        vocab_size=256,
        hidden_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=256,
        dense_hidden=256,
        expert_hidden=128,
        num_experts=8,
        top_k=2,
        moe_layers=(1, 2),
        aux_coefficient=0.01,
        z_coefficient=1e-4,
    ),
    arms=(
        "adamw",
        "skewadam",
        "sinkgd",
        "mesh",
        "mesh_b",
        "sinkgd+sign_only",
        "mesh+normalise_first",
        "sinkgd+regrouped(stacked)",
    ),
    metrics=(
        "tokens_per_expert",
        "expert_load",
        "max_vio",
        "dead_expert_fraction",
        "grad_norm",
        "grad_cos",
        "sign_flip_rate",
        "update_rms",
        "update_cos",
        "update_sign_flip_rate",
        "amplification",
        "zombie_displacement",
        "state_bytes",
        "pinned_gradient_bytes",
    ),
    # The verdict rests on experts, and an idle one must not pull a mean of update_rms down.
    per_expert=(
        "expert_load",
        "tokens_per_expert",
        "update_rms",
        "update_cos",
        "update_sign_flip_rate",
        "amplification",
        "zombie_displacement",
    ),
    steps=200,
    warmup=20,
    batch=8,
    length=256,
    lr=2e-3,
)
