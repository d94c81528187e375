"""Which objectives are accepted, and which can be wrapped."""

import numpy as np
import pytest
import tiny

from vit_jax.data.pipeline import Data
from vit_jax.models.dense import Normalize
from vit_jax.objectives.dino import Dino
from vit_jax.objectives.distillation import Distillation, Teacher
from vit_jax.objectives.encode import encode
from vit_jax.objectives.mae import Mae
from vit_jax.objectives.mixing import Mixed, Mixup
from vit_jax.parallel import sharding
from vit_jax.science.gradients import StableRank
from vit_jax.step import Context, Objective, as_objective
from vit_jax.types import UserError

MODEL = tiny.vit()


def test_only_an_objective_with_labels_is_wrapped():
  made = {'preprocess': Normalize(), 'objective': Mae}
  for wrapper, options, message in (
    (Mixed, {'mixer': Mixup(0.2)}, 'Mae has none'),
    (Distillation, {'teacher': Teacher('none')}, 'can only wrap'),
  ):
    with pytest.raises(UserError, match=message):
      wrapper(MODEL, **made, **options)


def test_the_ema_of_a_run_without_one_is_refused():
  with pytest.raises(UserError, match=r'no parameters .* --config\.ema\.decay'):
    encode(MODEL, Context().ema, np.zeros((1, 8, 8, 3)))


def test_what_looks_like_an_objective_is_refused_by_name():
  class Mine:
    def prepare(self, batch, rng):
      return batch

    def __call__(self, params, batch, rng):
      return 0, {}

  with pytest.raises(UserError, match='Mine has prepare, but is no Objective'):
    as_objective(Mine())
  ours = type('Ours', (Mine, Objective), {})()
  assert as_objective(ours) is ours


def test_gradients_of_an_objective_with_a_teacher_are_refused_at_once():
  with pytest.raises(UserError, match='with a teacher'):
    StableRank(
      MODEL,
      preprocess=Normalize(),
      mesh=sharding.make_mesh(),
      data=Data([], 2),
      objective=Dino,
    )
