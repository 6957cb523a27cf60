"""How much memory an optimizer keeps, from declared slots and shapes alone."""

from toolkit.memory._account import account

__all__ = ["account"]
