"""The path convention, and the two layouts of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import tree
from vit_jax.train import TrainState

PARAMS = {'a': {'kernel': np.ones((2, 3)), 'bias': np.ones(3)}, 'b': np.ones(1)}


def test_paths_of_any_pytree():
  state = TrainState(step=0, params=PARAMS, opt_state=(1, [2]), rng=3)
  assert list(tree.flatten(state)) == [
    'step',
    'params/a/bias',
    'params/a/kernel',
    'params/b',
    'opt_state/0',
    'opt_state/1/0',
    'rng',
  ]
  back = tree.unflatten(tree.flatten(PARAMS))
  assert jax.tree.structure(back) == jax.tree.structure(PARAMS)


def test_rules_match_whole_paths_and_the_first_counts():
  assert tree.first_match(['a', '.*/kernel', 'a/.*'], 'a/kernel') == 1
  assert tree.first_match(['kernel', 'a'], 'a/kernel') is None
  assert tree.mask(['a/.*'], PARAMS) == {
    'a': {'kernel': True, 'bias': True},
    'b': False,
  }


def test_rules_that_match_nothing_are_errors():
  tree.check_rules_match(['b', '.*/bias'], PARAMS, what='freeze')
  with pytest.raises(
    ValueError, match=r"(?s)freeze: \['kernel'\] match no.*a/b"
  ):
    tree.check_rules_match(['b', 'kernel'], PARAMS, what='freeze')


def test_diff_shows_only_differences():
  expected = {'same': jnp.ones(2), 'shape': jnp.ones(3), 'gone': jnp.ones(())}
  actual = {'same': jnp.ones(2), 'shape': jnp.ones((3, 1)), 'new': jnp.ones(1)}
  assert tree.diff(expected, actual).split('\n') == [
    '- gone ()',
    '+ new (1,)',
    '- shape (3,)',
    '+ shape (3, 1)',
  ]


def test_stacking_and_back_with_more_than_ten_layers():
  layers = {f'block_{i}/mlp/kernel': np.full((2, 3), i) for i in range(12)}
  flat = {'head/kernel': np.ones(1), **layers}
  stacked = tree.stack_blocks(flat)
  assert set(stacked) == {'head/kernel', 'blocks/mlp/kernel'}
  # In the order of numbers, not of text: block_10 comes after block_9.
  np.testing.assert_array_equal(
    stacked['blocks/mlp/kernel'][:, 0, 0], np.arange(12)
  )
  assert tree.is_stacked(stacked) and not tree.is_stacked(flat)
  back = tree.unstack_blocks(stacked)
  assert back.keys() == flat.keys()
  for path in flat:
    np.testing.assert_array_equal(back[path], flat[path])


def test_stacking_needs_every_layer():
  flat = {f'block_{i}/{name}': np.ones(1) for i in range(3) for name in 'ab'}
  del flat['block_1/a']
  with pytest.raises(ValueError, match=r'blocks/a: 3 layers.*found \[0, 2\]'):
    tree.stack_blocks(flat)
