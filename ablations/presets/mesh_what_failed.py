"""Which repairs of stateless Sinkhorn work on routed experts: smoothing, or what the MESH paper says did not help."""

from ablations.models.config import MoEConfig
from ablations.presets._ablation import Ablation, Arm, Size

ABLATION = Ablation(
    name="mesh_what_failed",
    question="On routed experts, does smoothing over time repair stateless Sinkhorn where signs, smaller steps and regrouping do not?",
    decides=(
        "Smoothing repairs it if mesh is better than sinkgd, each at its own best rate, and none of sign_only, "
        "smaller_steps, regrouped and one_sweep is; a difference at the shared rate alone is one of effective rate."
    ),
    baseline="sinkgd",
    threshold=0.005,
    arms={
        "sinkgd": Arm("sinkgd", "stateless Sinkhorn, five sweeps"),
        "sign_only": Arm("sinkgd+sign_only", "the gradient's signs"),
        "smaller_steps": Arm("sinkgd+smaller_steps(0.3)", "0.3 of the step"),
        "regrouped": Arm("sinkgd+regrouped(stacked)", "all experts as one tall matrix"),
        "one_sweep": Arm("sinkgd(sweeps=1)", "one sweep"),
        "mesh": Arm("mesh", "momentum, then Sinkhorn; idle experts are skipped"),
        "mesh_as_zero": Arm("mesh(idle=as_zero)", "the same, with idle experts moving on, as in the paper"),
        "normalise_first": Arm("normalise_then_momentum", "Sinkhorn, then momentum"),
        "adamw": Arm("adamw", "two moments"),
    },
    sizes={
        "cpu": Size(
            # 64 experts, of which a token sees one: about 4 tokens per expert and step, with matrices of width 64.
            model=MoEConfig(
                vocab_size=256,
                hidden_size=64,
                num_layers=2,
                num_heads=4,
                num_kv_heads=2,
                head_dim=16,
                max_positions=128,
                dense_hidden=128,
                expert_hidden=64,
                num_experts=64,
                top_k=1,
                moe_layers=(1,),
                aux_coefficient=0.01,
                expert_compute="grouped",
            ),
            steps=600,
            batch=2,
            length=128,
            warmup=30,
            grid=(3e-4, 1e-3, 3e-3),
            shared_lr=3e-4,
            rest_lr=2e-3,
            eval_batches=32,
            eval_batch=16,
        ),
    },
)
