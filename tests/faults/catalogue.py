"""All faults; importing their modules registers them."""

from . import (  # noqa: F401
  changes,
  checkpoints,
  damaged_metrics,
  data,
  goodput,
  hosts,
  kills,
  long_runs,
  mutated_configs,
  states,
)
from .harness import FAULTS as FAULTS
