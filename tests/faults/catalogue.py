"""All faults: importing a module of faults registers them."""

from . import checkpoints, kills, states, weights  # noqa: F401
from .harness import FAULTS as FAULTS
