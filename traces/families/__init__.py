"""Model families whose MoE layers general detection cannot read; one file each, found by its name."""

from __future__ import annotations

from torch import nn

from traces.families._family import Family
from traces.registry import Registry

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: Registry[Family] = Registry("traces.families", "FAMILY", "model family")


def family_of(*modules: nn.Module | None) -> Family | None:
    """The family that knows the class, or a base class, of one of `modules`; None for all others."""
    names = {base.__name__ for module in modules if module is not None for base in type(module).__mro__}
    return next((family for family in FAMILIES.all() if names.intersection(family.classes)), None)
