"""The choice of attention='auto' where there is no device to measure on.

A run measures (vit_jax/models/autotune.py). Here each candidate is compiled for
the described device, and the estimates of cycles are compared.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from vit_jax.models import autotune
from vit_jax.models.attention import Implementation
from vit_jax.models.autotune import Local
from vit_jax.tools.compile import report
from vit_jax.tools.compile.costs import costs
from vit_jax.types import Model


@dataclasses.dataclass(frozen=True)
class Estimate:
  """The compiler's estimate for a candidate, or why there is none.

  Attributes:
    name: of the candidate.
    megacycles: of a forward and backward pass on a device, or None.
    problem: why it is left out, or None.
  """

  name: str
  megacycles: float | None = None
  problem: str | None = None

  def __str__(self) -> str:
    if self.megacycles is None:
      return f'{self.name} is left out ({self.problem})'
    return f'{self.name} {self.megacycles:.3g} Mcycles'


def choose(
  model: Model,
  images: jax.ShapeDtypeStruct,
  *,
  batch_size: int,
  mesh: jax.sharding.Mesh,
  setting: bool | autotune.Autotuner = True,
  backward: bool = True,
) -> tuple[Model, dict[str, Any]]:
  """Return the model with an implementation of attention, and columns.

  Devices that are present measure, as in a run, and described ones compare
  estimates. On CPUs, and if the model or the setting leaves no choice, the
  model stays as it is.

  Args:
    model: Flax module.
    images: ShapeDtypeStruct of a batch of images.
    batch_size: examples that all devices process at a time.
    mesh: of the devices.
    setting: `attention_autotune` of train().
    backward: whether the model is trained, or only computes its outputs.
  """
  tuner, device = autotune.find(setting), mesh.devices.flat[0]
  if device in jax.devices():
    choice = tuner.choose(
      model, images, batch_size=batch_size, mesh=mesh, backward=backward
    )
    return choice.apply(model), _columns(choice)
  if device.platform not in tuner.platforms:
    return model, {}
  candidates = tuner.candidates or autotune.candidates_of(device.platform)
  by_case, words = [], []
  for case in autotune.cases(model, images, train=backward):
    local = Local.of(case, batch_size, mesh, backward)
    found = [estimate(each, local, device) for each in candidates]
    if best := fastest(found):
      by_case += [(case, x) for x in candidates if x.name == best.name]
    words.append(f'{local.batch} x {case}: {"; ".join(map(str, found))}')
  choice = autotune.Choice(tuple(by_case))
  return choice.apply(model), _columns(choice, words)


def _columns(choice, words=()):
  """Return the columns of a row: the choice, and the estimates in words."""
  if not choice.by_case:
    return {}
  names = dict.fromkeys(each.name for _, each in choice.by_case)
  found = {'attention': ', '.join(names)}
  return found | {'attention_estimates': list(words)} if words else found


def fastest(estimates: Sequence[Estimate]) -> Estimate | None:
  """Return the Estimate with the fewest cycles, None if there is none."""
  known = [each for each in estimates if each.megacycles is not None]
  return min(known, key=lambda each: each.megacycles or 0.0, default=None)


@functools.cache
def estimate(candidate: Implementation, local: Local, device: Any) -> Estimate:
  """Return the Estimate of a candidate's pass.

  Args:
    candidate: an implementation.
    local: the case, as one device computes it.
    device: described by the compiler.
  """
  try:
    compiled = autotune.compile_pass(candidate, local, device)
  except Exception as error:  # Each compiler has its own errors.
    return Estimate(candidate.name, problem=autotune.first_line(error))
  counted = costs(compiled.as_text() or '')
  if counted.unknown_kernels:
    problem = (
      f'{counted.cycles / 1e6:.3g} Mcycles without its kernels, which do not '
      'state their cost'
    )
    return Estimate(candidate.name, problem=problem)
  kind, head_dim = local.device_kind, local.case.head_dim
  kernels = report.kernel_cycles(counted, kind, head_dim)
  return Estimate(candidate.name, (counted.cycles + kernels) / 1e6)
