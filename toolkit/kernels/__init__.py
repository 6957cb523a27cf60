"""The heavy arithmetic, one op per file, with a slow truth beside each fast form.

The modules named here import torch only inside their functions.
"""

from toolkit.kernels.sr_sinkhorn import SinkhornResult, sr_sinkhorn, sr_sinkhorn_apply, sr_sinkhorn_run

__all__ = ["SinkhornResult", "sr_sinkhorn", "sr_sinkhorn_apply", "sr_sinkhorn_run"]
