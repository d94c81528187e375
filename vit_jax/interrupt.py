"""Old name of a part of vit_jax.distributed."""

from vit_jax.distributed import Stopped as Stopped
from vit_jax.distributed import StopSignal as StopSignal
