"""What the stream `statistics` holds of each expert and step, in the order in which it is stored."""

from __future__ import annotations

#: Of the gradient alone: its squared norm over finite elements, elements that are not finite, and zeros.
ALONE = ("sum_squares", "nonfinite", "zeros")
#: Of its pair with the gradient of the step before, over elements finite in both: NaN where there is no such pair.
PAIRED = ("dot", "dot_squares", "previous_squares", "sign_flips", "sign_support")
STATISTICS = (*ALONE, *PAIRED)
