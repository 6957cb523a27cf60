"""Where SkewAdam's eps floors the second moment: at 6.78B parameters nearly everywhere, in a small replica nowhere."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import FEW_TOKENS, as_skewadam, few_tokens, on_gpu

# Under a clip of 1 the mean square of a gradient element is about 1 / N, so the same share of columns is floored where
# eps x N is the same.
_PUBLISHED_PARAMETERS = 6_784_327_680
_EXPERTS = FEW_TOKENS.num_experts * 3 * FEW_TOKENS.expert_hidden * FEW_TOKENS.hidden_size
_SCALED = float(f"{1e-8 * _PUBLISHED_PARAMETERS / (1.13 * _EXPERTS):.1e}")

ABLATION = Ablation(
    name="skewadam_eps_regime",
    question="Is what SkewAdam does at 6.78B parameters owed to its eps, which floors the second moment there?",
    decides=(
        "The floor matters if scaled, whose eps floors as many columns here as the published one does at 6.78B, "
        "differs from no_floor, each at its own best rate; published has the paper's eps and no floor at this size."
    ),
    baseline="published",
    experts_only=False,
    arms={
        "published": Arm("skewadam(paper_exact=True)", "eps 1e-8, as in the paper"),
        "scaled": Arm(
            f"skewadam(paper_exact=True, eps={_SCALED!r}, eps_row={_SCALED!r})", "eps scaled as 1 / parameters"
        ),
        "no_floor": Arm("skewadam(paper_exact=True, eps=1e-30, eps_row=1e-30)", "eps 1e-30"),
        "corrected": Arm("skewadam", "the corrected rule: eps is added to the root"),
    },
    sizes={
        "cpu": few_tokens(grid=(1e-3, 2e-3, 4e-3, 8e-3), shared_lr=2e-3, grids={"scaled": (4e-3, 1e-2, 3e-2, 1e-1)}),
        "gpu": on_gpu(),
        "paper": as_skewadam(),
    },
)
