"""All faults: importing a module of faults registers them."""

from . import hosts, kills, long_runs, states, weights  # noqa: F401
from .harness import FAULTS as FAULTS
