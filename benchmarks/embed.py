r"""Time a Python process that embeds images, from its start to its end.

  python benchmarks/compare.py --peer_python=PYTHON \
      'embed.py -m vit_jax.tools.predict --image_size=224 --weights=WEIGHTS \
          FOLDER --features=/tmp/f/ours.npz' \
      'embed.py benchmarks/embed_onnxruntime.py MODEL.onnx FOLDER \
          /tmp/f/onnx.npz'

The number is its wall time in seconds. stderr gets its CPU time, children
included, and the least cosine of its features with those of other files there.
"""

import pathlib
import resource
import subprocess
import sys
import time

import numpy as np

words = sys.argv[1:]
begin, file = time.perf_counter(), pathlib.Path(words[-1].split('=')[-1])
subprocess.run([sys.executable, *words], check=True)
wall, used = time.perf_counter() - begin, resource.RUSAGE_CHILDREN
print(f'CPU seconds: {sum(resource.getrusage(used)[:2]):.2f}', file=sys.stderr)
for path in {*file.parent.glob('*.npz')} - {file}:
  found = (np.load(x)['features'] for x in (file, path))
  a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in found)
  cosine = (a * b).sum(axis=1).min()
  print(f'least cosine with {path.name}: {cosine:.7f}', file=sys.stderr)
print(wall)
