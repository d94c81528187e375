"""All faults: importing a module of faults registers them."""

from . import kills, states, weights  # noqa: F401
from .harness import FAULTS as FAULTS
