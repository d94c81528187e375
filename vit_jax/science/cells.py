"""How well predictions of any kind tell defective cells (ELPV) from others."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.pipeline import Data
from vit_jax.evals.collect import Collector
from vit_jax.types import ACCURACY, Batch, Kinds, Params, Preprocess


@dataclasses.dataclass(eq=False)
class Defects:
  """AUC, accuracy and mean over both classes of a score of at least 0.5.

  Attributes:
    data: has the classes of Elpv, 0 and 1.
    values: the score is the mean of these under the probabilities of the
      classes; None: the model's output is the score.
  """

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  mesh: jax.sharding.Mesh
  data: Data
  values: Sequence[float] | None = None

  metrics: ClassVar[Kinds] = dict.fromkeys(
    ('auc', 'accuracy', 'mean_per_class_accuracy'), ACCURACY
  )

  def __post_init__(self) -> None:
    self._collect = Collector(
      self._score, data=self.data, mesh=self.mesh, num_classes=2
    )
    self.check = self._collect.check

  def _score(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    images = self.preprocess(batch['image'])
    out = self.model.apply({'params': params}, images)
    if self.values is None:
      return {'score': out[:, 0]}
    return {'score': jax.nn.softmax(out) @ jnp.array(self.values)}

  def run(self, params: Params) -> dict[str, float]:
    from sklearn import metrics  # takes a second

    columns = self._collect(params)
    true, score = columns['label'] == 1, columns['score']
    hits = true == (score >= 0.5)
    of_both = [hits[true].mean(), hits[~true].mean()]
    return {
      'auc': float(metrics.roc_auc_score(true, score)),
      'accuracy': float(hits.mean()),
      'mean_per_class_accuracy': float(np.mean(of_both)),
    }
