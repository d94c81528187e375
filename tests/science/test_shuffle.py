"""Patches of all images in other places."""

import numpy as np

from vit_jax.science.shuffle import ShufflePatches


def test_patches_are_shuffled_alike_in_all_images():
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (2, 12, 20, 3), dtype=np.uint8)

  def patches(x):
    found = x.reshape(3, 4, 5, 4, 3).swapaxes(1, 2).reshape(15, -1)
    return [row.tobytes() for row in found]

  for fraction, moved in ((0.0, 0), (0.4, 6), (1.0, 15)):
    shuffled = [ShufflePatches(4, fraction)(x, rng) for x in images]
    before, after = patches(images[0]), patches(shuffled[0])
    assert sorted(before) == sorted(after)
    places = [before.index(x) for x in after]
    assert sum(i != place for i, place in enumerate(places)) == moved
    other = patches(images[1])
    assert patches(shuffled[1]) == [other[place] for place in places]
  found, other = (ShufflePatches(4, seed=i)(images[0], rng) for i in (0, 1))
  assert not np.array_equal(found, other)
