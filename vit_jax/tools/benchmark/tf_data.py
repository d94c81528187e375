"""Worker that makes the batches of the input benchmark with tf.data.

The pipeline that the code of the ViT papers uses: a crop sampled by TensorFlow,
decode_and_crop_jpeg, which decodes only the crop, bilinear resizing, flipping.
Of this project it needs the images and `serve`:

  PEER_PYTHON -m vit_jax.tools.benchmark.tf_data
"""

import os
from typing import Any

from vit_jax.tools.benchmark import workers
from vit_jax.tools.benchmark.input import (
  NUM_EXAMPLES,
  Jpegs,
  time_batches,
  use_cores,
)


class TfData:
  """Batches of one process, by tf.data.

  Args:
    settings: as of `input.Input`, but without worker processes.
  """

  def __init__(self, settings: Any) -> None:
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    os.environ.setdefault('CUDA_VISIBLE_DEVICES', '')
    threads = settings.get('num_threads') or None
    use_cores(threads)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(threads or 0)
    source = Jpegs(settings.get('images', 'imagenet'))
    files, classes = tf.constant(source.files), source.num_classes
    count = settings.get('num_examples', NUM_EXAMPLES)
    size = settings['image_size']

    def example(index):
      data = files[index % len(source.files)]
      box, shape, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(data),
        tf.zeros([0, 0, 4]),
        area_range=(0.05, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        min_object_covered=0,
        use_image_if_no_bounding_boxes=True,
      )
      window = tf.concat([box[:2], shape[:2]], 0)
      image = tf.image.decode_and_crop_jpeg(data, window, channels=3)
      image = tf.cast(tf.image.resize(image, (size, size)), tf.uint8)
      image = tf.image.random_flip_left_right(image)
      return {'image': image, 'label': tf.cast(index % classes, tf.int32)}

    options = tf.data.Options()
    options.deterministic = True
    if threads:
      options.threading.private_threadpool_size = threads
      options.threading.max_intra_op_parallelism = 1
    batches = (
      tf.data.Dataset.range(count)
      .repeat()
      .map(example, num_parallel_calls=threads or tf.data.AUTOTUNE)
      .batch(settings['batch_size'], drop_remainder=True)
      .prefetch(2)
      .with_options(options)
    )
    self._batches = batches
    self.round(settings.get('warmup', 0))
    self.started = {'versions': {'tensorflow': tf.__version__}}

  def round(self, steps: int) -> dict[str, float]:
    """Return the 'seconds' and 'cpu_seconds' that some batches take."""
    return time_batches(self._batches.as_numpy_iterator(), steps)


if __name__ == '__main__':
  workers.serve(TfData)
