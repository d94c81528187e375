"""The data of a run as they were understood, shown before it trains.

data.json has the descriptions of the sources, see data/description.py, and of
the training and one evaluator 24 images as the model gets them, with labels.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.data.description import Description, copies, names_of, targets_of
from vit_jax.data.images import decoder
from vit_jax.data.pipeline import Data
from vit_jax.data.sources.tables import some
from vit_jax.data.subsets import Unlabelled, View
from vit_jax.io import terminal
from vit_jax.parallel import sharding
from vit_jax.reports import page
from vit_jax.reports.worst import thumbnail
from vit_jax.runs import workdirs
from vit_jax.types import PathLike, UserError

_IMAGES = 24
TRAIN = 'training'


@dataclasses.dataclass(frozen=True)
class Shown:
  """The data of a run: that of the training, and of its evaluators by name."""

  train: Data
  others: Mapping[str, Data]

  @classmethod
  def of(cls, data: Data, evaluators: Mapping[str, Any]) -> 'Shown':
    """Return the data of a run, after it has printed what they are."""
    found = {k: getattr(x, 'data', None) for k, x in evaluators.items()}
    shown = cls(data, {k: x for k, x in found.items() if isinstance(x, Data)})
    own: Any = getattr(data.source, 'groups', frozenset())
    for name, other in shown.others.items():
      if both := own & getattr(other.source, 'groups', frozenset()):
        raise UserError(
          f'evals.{name}: groups of group_key are also in the training '
          f"{some(sorted(both))}. Use slices of all images, such as '[90%:]'."
        )
    if jax.process_index():
      return shown
    for name, each in shown.descriptions.items():
      terminal.say(f'{name}: ' + '\n  '.join(each.lines()))
    if left := data.name_left_out():
      terminal.say(left)
    return shown

  @functools.cached_property
  def descriptions(self) -> dict[str, Description]:
    """Descriptions by name, first of the training."""
    train = Description.of(self.train.source)
    found = {TRAIN: train}
    for name, data in self.others.items():
      each = Description.of(data.source, train)
      same = copies(data.source, self.train.source)
      found[name] = dataclasses.replace(each, look=[*each.look, *same])
    return found

  def write(self, step: int, workdir: PathLike, *of_step: Any) -> None:
    """Write data.json and the page in step 1, with images of its batch.

    Args:
      of_step: the objective, batch, rng and mesh.
    """
    if step > 1:
      return
    objective, batch, rng, mesh = of_step

    def first(batch, rng):
      rng = jax.random.fold_in(jax.random.fold_in(rng, 0), 2**32 - 1)
      shown = objective.shown(batch, rng)
      return {k: shown[k][:_IMAGES] for k in ('image', 'label')}

    everywhere = sharding.replicated(mesh)
    with jax.transfer_guard('allow'):
      made = jax.jit(first, out_shardings=everywhere)(batch, rng)
      batches = {TRAIN: (self.train, jax.device_get(made))}
    for name, data in itertools.islice(self.others.items(), 1):
      count = min(_IMAGES, len(data.source))
      few = View(data.source, np.linspace(0, len(data.source) - 1, count))
      small = dataclasses.replace(
        data, source=few, batch_size=count, num_workers=0
      )
      batches[name] = small, next(iter(small.eval_batches()))
    if jax.process_index():
      return
    found = {
      name: dataclasses.asdict(each) | {'lines': each.lines()}
      for name, each in self.descriptions.items()
    }
    for name, (data, batch) in batches.items():
      found[name]['images'] = _images(batch, data.source)
    workdirs.write(workdir, 'data.json', found)
    page.write_at_end(workdir)


def _images(batch, source):
  """Return [(thumbnail, label in words)]; of several views the first."""
  kept = batch.get('mask', np.ones(len(batch['label']), bool))
  images = [x.reshape(-1, *x.shape[-3:])[0] for x in batch['image'][kept]]
  captions = _captions(source, batch['label'][kept])
  show = decoder(source).show
  return [*zip((thumbnail(show(x)) for x in images), captions)]


def _captions(source, labels):
  """Return labels in words; '' of a source without labels."""
  if isinstance(source, Unlabelled) or not len(labels):
    return [''] * len(labels)
  kind, names = targets_of(source, labels.ndim > 1), names_of(source, labels)
  return [kind.caption(names, x) for x in labels]
