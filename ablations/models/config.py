"""The shape and the switches of the language model in `moe.py`. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from traces.errors import GradreelError

RouterWeights = Literal["softmax_topk_renormalised", "softmax_topk", "topk_softmax"]
_CHOICES = {
    "positions": ("learned", "rope"),
    "norm": ("layernorm", "rmsnorm"),
    "router_weights": ("softmax_topk_renormalised", "softmax_topk", "topk_softmax"),
    "dtype": ("float32", "bfloat16", "float64"),
    "expert_compute": ("loop", "grouped"),
}


@dataclass(frozen=True)
class MoEConfig:
    """A decoder of `num_layers` pre-norm blocks, of which those in `moe_layers` route their tokens.

    Sizes: `hidden_size` D, `expert_hidden` F of one routed expert, `dense_hidden` of a dense block, `shared_hidden` of
    the expert every token passes (0: none). `num_heads` query heads share `num_kv_heads` heads of keys and values, each
    `head_dim` wide. `router_weights` says how the K executed experts are weighted: softmax over all E, then the top K
    with or without renormalisation, or softmax over the top K logits (equal to renormalising, up to rounding).
    `router_noise` is the standard deviation of the Gaussian noise on the logits in training. `aux_coefficient` and
    `z_coefficient` weight the two losses of the router. `dtype` is that of all weights except norms and routers, which
    stay in float32 (float64 in a float64 model). `expert_compute` is how experts are run:
    each on its own ("loop"), or by one product with all of them ("grouped": the faster on a CPU with many experts of
    few tokens).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    dense_hidden: int
    expert_hidden: int
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]
    shared_hidden: int = 0
    positions: Literal["learned", "rope"] = "rope"
    rope_theta: float = 10_000.0
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    tied_head: bool = True
    router_weights: RouterWeights = "softmax_topk_renormalised"
    router_noise: float = 0.0
    router_zero_init: bool = False
    aux_coefficient: float = 0.01
    z_coefficient: float = 0.0
    init_std: float = 0.02
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    expert_compute: Literal["loop", "grouped"] = "loop"

    def __post_init__(self) -> None:
        positive = "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim max_positions num_experts top_k"
        for name in (*positive.split(), "dense_hidden", "expert_hidden"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "an integer of at least 1")
        for name in ("shared_hidden", "router_noise", "aux_coefficient", "z_coefficient", "init_std"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "[0, inf)")
        for name, choices in _CHOICES.items():
            _require(getattr(self, name) in choices, name, repr(getattr(self, name)), ", ".join(choices))
        _require(self.top_k <= self.num_experts, "top_k", self.top_k, f"[1, num_experts = {self.num_experts}]")
        divides = self.num_heads % self.num_kv_heads == 0
        _require(divides, "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}")
        even = self.positions != "rope" or self.head_dim % 2 == 0
        _require(even, "head_dim", self.head_dim, "an even number with positions='rope'")
        _require(self.norm_eps > 0, "norm_eps", self.norm_eps, "(0, inf)")
        _require(self.rope_theta > 0, "rope_theta", self.rope_theta, "(0, inf)")
        sound = len(set(self.moe_layers)) == len(self.moe_layers) and all(
            0 <= layer < self.num_layers for layer in self.moe_layers
        )
        _require(sound, "moe_layers", self.moe_layers, f"distinct layers in [0, {self.num_layers - 1}]")

    def to_dict(self) -> dict[str, Any]:
        """The config as plain values for JSON."""
        return {**asdict(self), "moe_layers": list(self.moe_layers)}

    @classmethod
    def skewadam_study(cls) -> MoEConfig:
        """The 6.78B-parameter model of the SkewAdam study (arXiv 2607.19058): one dense block, one of 128 experts."""
        return cls(
            vocab_size=50_304,
            hidden_size=4096,
            num_layers=2,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_positions=256,
            dense_hidden=4096,
            expert_hidden=4096,
            num_experts=128,
            top_k=2,
            moe_layers=(1,),
            positions="learned",
            norm="layernorm",
            tied_head=True,
            router_noise=0.5,
            router_zero_init=True,
            aux_coefficient=0.05,
            z_coefficient=1e-4,
            dtype="bfloat16",
        )


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise GradreelError(f"MoEConfig.{name} is {value}; allowed: {allowed}")
