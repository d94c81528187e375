"""Records images that TensorFlow resizes with method='area'.

Sides shrink, enlarge, or stay. From 300 to 448 pixels boxes start at edges of
pixels, where floating point decides which pixel is the first of a box.

Record again, in an environment of its own:

  pip install tensorflow-cpu==2.21.0
  python tests/golden/record_tf_area.py
"""

import pathlib

import numpy as np
import tensorflow as tf

SIZES = (  # (height, width, channels), (new height, new width)
  ((9, 7, 3), (14, 14)),
  ((6, 6, 1), (13, 17)),
  ((8, 8, 3), (32, 24)),
  ((12, 31, 3), (20, 20)),
  ((31, 12, 3), (20, 20)),
  ((15, 20, 3), (15, 33)),
  ((15, 20, 3), (11, 20)),
  ((40, 30, 3), (17, 13)),
  ((40, 30, 3), (10, 10)),
  ((300, 2, 1), (448, 2)),
  ((3, 300, 1), (2, 448)),
  ((1, 1, 3), (3, 5)),
)


def main():
  rng, arrays = np.random.default_rng(0), {}
  for case, (shape, size) in enumerate(SIZES):
    image = rng.integers(0, 256, shape, dtype=np.uint8)
    arrays[f'image_{case}'] = image
    arrays[f'area_{case}'] = tf.image.resize(image, size, 'area').numpy()
  np.savez_compressed(pathlib.Path(__file__).parent / 'tf_area.npz', **arrays)


if __name__ == '__main__':
  main()
