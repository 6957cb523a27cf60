"""What models are trained on. See `corpus.py` for the text that every machine has."""

from ablations.data._open import SOURCES, Text, open_data

__all__ = ["SOURCES", "Text", "open_data"]
