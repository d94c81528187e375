"""Input pipeline of this project: images per second.

  python benchmarks/input_ours.py --images=imagenet --threads=2

From JPEGs in memory to batches: random crops (InceptionCrop), flips, no worker
processes, and the order of as many examples as ImageNet has.
"""

import jpegs
import numpy as np

from vit_jax.data import pipeline, subsets, transforms


def main():
  args = jpegs.arguments(__doc__)
  crops = (transforms.InceptionCrop(args.image_size), transforms.FlipLR())
  files = [{'image': x, 'label': 0} for x in jpegs.make(args.images)]
  data = pipeline.Data(
    subsets.View(files, np.arange(1_281_167) % len(files)),
    args.batch_size,
    crops,
    num_workers=0,
    num_threads=args.threads,
  )
  jpegs.report(args, data.train_batches())


if __name__ == '__main__':
  main()
