r"""Time an embedding script from the start to the end of its process.

  python benchmarks/compare.py --peer_python=PYTHON \
      'embed.py embed_ours.py WEIGHTS FOLDER /tmp/f/ours.npz' \
      'embed.py embed_onnxruntime.py MODEL.onnx FOLDER /tmp/f/onnx.npz'

The number is its wall time in seconds. stderr gets its CPU time, children
included, and the least cosine of its features with those of other files there.
"""

import pathlib
import resource
import subprocess
import sys
import time

import numpy as np

script, *words = sys.argv[1:]
begin, file = time.perf_counter(), pathlib.Path(words[-1])
script = str(pathlib.Path(__file__).with_name(script))
subprocess.run([sys.executable, script, *words], check=True)
wall, used = time.perf_counter() - begin, resource.RUSAGE_CHILDREN
print(f'CPU seconds: {sum(resource.getrusage(used)[:2]):.2f}', file=sys.stderr)
for path in {*file.parent.glob('*.npz')} - {file}:
  found = (np.load(x)['features'] for x in (file, path))
  a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in found)
  cosine = (a * b).sum(axis=1).min()
  print(f'least cosine with {path.name}: {cosine:.7f}', file=sys.stderr)
print(wall)
