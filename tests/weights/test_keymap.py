"""Key maps: rows of one form or the other, and back."""

import numpy as np
import pytest
from small import equal

from vit_jax.weights.keymap import Key, KeyMap, linear

KEYS = KeyMap(
  *linear('{i}.qkv', 'block_{i}/query|key|value'),
  Key('{i}.q_bias', 'block_{i}/query/bias'),
  Key('{i}.v_bias', 'block_{i}/value/bias'),
  Key('{i}.ls.gamma', 'block_{i}/ls'),
  Key('{i}.gamma', 'block_{i}/ls'),
  Key('class', 'cls', 'token'),
  Key('freqs', 'block_{i}/freqs', 'layers1'),
)
SHAPES = {
  **{f'block_0/{x}/kernel': (4, 2) for x in ('query', 'key', 'value')},
  **{f'block_0/{x}/bias': (2,) for x in ('query', 'key', 'value')},
  **{'block_0/ls': (2,), 'block_0/freqs': (2, 3), 'cls': (1, 1, 4)},
}


@pytest.mark.parametrize(
  'names, absent',
  [
    (['0.qkv.bias', '0.ls.gamma'], []),
    (['0.gamma'], ['query', 'key', 'value']),
    (['0.q_bias', '0.v_bias', '0.gamma'], ['key']),
  ],
)
def test_what_a_file_has_is_read_and_written(names, absent):
  rng = np.random.default_rng(0)
  sizes = {'0.qkv.weight': (6, 4), '0.qkv.bias': (6,), 'class': (4,)}
  file = {
    name: np.float32(rng.standard_normal(sizes.get(name, (2,))))
    for name in ['0.qkv.weight', 'class', *names]
  }
  file['freqs'] = np.float32(rng.standard_normal((2, 1, 3)))
  keys = KEYS.having(file)
  params = keys.to_ours(file)
  shapes = {path: np.zeros(shape) for path, shape in SHAPES.items()}
  for name in absent:
    del shapes[f'block_0/{name}/bias']
  params = keys.fit(file, params, shapes)
  assert equal(keys.to_theirs(params), file)
