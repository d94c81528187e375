"""Embed a folder of JPEGs of any size by vit_jax.tools.predict at 224 px.

python benchmarks/embed_ours.py WEIGHTS FOLDER FILE.npz
"""

import sys

from vit_jax.tools import predict

weights, folder, file = sys.argv[1:]
options = '--image_size=224', f'--weights={weights}', f'--features={file}'
predict.main([*options, folder])
