"""Every recipe as a `torch.optim.Optimizer`.

optimizer = make_optimizer(model, "skewadam", lr=3e-4)
optimizer = Mesh([{"params": experts, "role": "routed_expert"}, {"params": rest, "role": "attention"}], lr=1e-3)
"""

from toolkit.optim._clip import clip_fresh_gradients
from toolkit.optim._groups import role_groups
from toolkit.optim._optimizer import Mesh, RecipeOptimizer, SinkGD, SkewAdam, make_optimizer

__all__ = ["Mesh", "RecipeOptimizer", "SinkGD", "SkewAdam", "clip_fresh_gradients", "make_optimizer", "role_groups"]
