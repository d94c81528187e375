"""Input pipeline of tf.data, as in the code of the ViT papers: images/s.

  python benchmarks/input_tf_data.py --images=imagenet --threads=2

A crop sampled by TensorFlow, decode_and_crop_jpeg, which decodes only the crop,
bilinear resizing and flipping. It needs tensorflow and OpenCV.
"""

import jpegs
import tensorflow as tf


def main():
  args = jpegs.arguments(__doc__)
  tf.config.threading.set_intra_op_parallelism_threads(1)
  tf.config.threading.set_inter_op_parallelism_threads(args.threads)
  files = tf.constant(jpegs.make(args.images))
  size = (args.image_size, args.image_size)

  def example(index):
    data = files[index % len(files)]
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
    image = tf.cast(tf.image.resize(image, size), tf.uint8)
    image = tf.image.random_flip_left_right(image)
    return {'image': image, 'label': tf.cast(index % 1000, tf.int32)}

  options = tf.data.Options()
  options.threading.private_threadpool_size = args.threads
  options.threading.max_intra_op_parallelism = 1
  batches = (
    tf.data.Dataset.range(1_281_167)
    .repeat()
    .map(example, num_parallel_calls=args.threads)
    .batch(args.batch_size, drop_remainder=True)
    .prefetch(2)
    .with_options(options)
  )
  jpegs.report(args, batches.as_numpy_iterator())


if __name__ == '__main__':
  main()
