"""Parameter groups by role, and the description of each parameter that a recipe needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from traces.errors import GradreelError
from traces.views import ROLES, ParamInfo

#: What of a ParamInfo is kept beside the group, in plain values, so that a state_dict holds nothing but them.
LAYOUT_FIELDS = ("layer", "expert", "expert_axis", "num_experts", "matrix_axes")


def role_groups(model: nn.Module, overrides: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """One group per role, in the order of `traces.views.ROLES`: `params` (name, parameter) pairs, `role`, `layouts`.

    Every parameter that requires a gradient is in exactly one group; tied weights once. `overrides` maps parameter
    names to roles. Change a group's `lr` before handing the list over to give a role its own rate.
    """
    from traces.roles import describe_params, named_parameters

    parameters = named_parameters(model)
    groups: dict[str, dict[str, Any]] = {}
    for info in describe_params(model, overrides):
        parameter = parameters[info.name]
        if info.tied_to is not None or not parameter.requires_grad:
            continue
        group = groups.setdefault(info.role, {"params": [], "role": info.role, "layouts": []})
        group["params"].append((info.name, parameter))
        group["layouts"].append({field: getattr(info, field) for field in LAYOUT_FIELDS})
    if not groups:
        raise GradreelError(f"{type(model).__name__} has no parameter that requires a gradient")
    return [groups[role] for role in ROLES if role in groups]


def describe(parameter: Any, name: str, role: str, layout: Mapping[str, Any] | None) -> ParamInfo:
    """The ParamInfo of one parameter of a group; without a layout, the usual one of its role and shape.

    Usual: the last two axes are a matrix, and axis 0 of a routed expert's parameter of three axes or more enumerates
    experts.
    """
    if role not in ROLES:
        raise GradreelError(f"role of {name} is {role!r}; allowed: {', '.join(ROLES)}")
    shape, strides = tuple(parameter.shape), tuple(parameter.stride())
    known = dict(layout) if layout is not None else usual_layout(role, shape)
    experts = known.get("num_experts")
    if known.get("expert_axis") == 0 and experts and len(shape) == 2 and shape[0] > experts and not shape[0] % experts:
        rows = shape[0] // experts  # one expert after another in 2-D weights: stepped as a view [E, F, H]
        shape, strides = (experts, rows, shape[1]), (rows * strides[0], *strides)
    axes = known.get("matrix_axes")
    return ParamInfo(
        name=name,
        role=role,
        shape=shape,
        dtype=str(parameter.dtype).removeprefix("torch."),
        layer=known.get("layer"),
        expert=known.get("expert"),
        expert_axis=known.get("expert_axis"),
        num_experts=known.get("num_experts"),
        matrix_axes=None if axes is None else (int(axes[0]), int(axes[1])),
        strides=strides,
    )


def usual_layout(role: str, shape: Sequence[int]) -> dict[str, Any]:
    """See `describe`."""
    ndim = len(shape)
    stacked = role == "routed_expert" and ndim >= 3
    return {
        "expert_axis": 0 if stacked else None,
        "num_experts": shape[0] if stacked else None,
        "matrix_axes": (ndim - 2, ndim - 1) if ndim >= 2 else None,
    }
