"""Input pipeline of this project: images per second.

  python benchmarks/input_ours.py --images=imagenet --threads=2

From JPEGs in memory to batches: random crops (InceptionCrop), flips, no worker
processes, and the order of as many examples as ImageNet has.
"""

import jpegs

from vit_jax.data import pipeline, transforms


class Source:
  """Source of JPEGs that are held in memory."""

  class_names = None
  num_classes = 1000
  channels = 3

  def __init__(self, kind):
    self._files = jpegs.make(kind)

  def __len__(self):
    return 1_281_167

  def __getitem__(self, index):
    file = self._files[index % len(self._files)]
    return {'image': file, 'label': index % self.num_classes}


def main():
  args = jpegs.arguments(__doc__)
  crops = (transforms.InceptionCrop(args.image_size), transforms.FlipLR())
  data = pipeline.Data(
    Source(args.images),
    args.batch_size,
    crops,
    num_workers=0,
    num_threads=args.threads,
  )
  jpegs.report(args, data.train_batches())


if __name__ == '__main__':
  main()
