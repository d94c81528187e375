"""Embed a folder of JPEGs by onnxruntime and Pillow, as tools.predict does.

  python benchmarks/embed_onnxruntime.py MODEL.onnx FOLDER FILE.npz

The model converts floats [B, 3, 224, 224] to tokens [B, N, D].
"""

import concurrent.futures
import itertools
import pathlib
import sys

import numpy as np
import onnxruntime
from PIL import Image

MEAN, STD = np.float32([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])


def load(path):
  """Return the centre of an image whose smaller side has 256 pixels."""
  with Image.open(path) as image:
    image = image.convert('RGB')
  size = [256 * side // min(image.size) for side in image.size]
  left, top = (round((side - 224) / 2) for side in size)
  image = image.resize(size, Image.Resampling.BICUBIC)
  image = image.crop((left, top, left + 224, top + 224))
  pixels = np.asarray(image, np.float32) / 255
  return ((pixels - MEAN) / STD).transpose(2, 0, 1)


model, folder, file = sys.argv[1:]
with concurrent.futures.ThreadPoolExecutor() as pool:
  loaded = pool.map(load, sorted(pathlib.Path(folder).glob('*.jpg')))
  session = onnxruntime.InferenceSession(model)
  name, found = session.get_inputs()[0].name, []
  while group := list(itertools.islice(loaded, 8)):
    found += [session.run(None, {name: np.stack(group)})[0][:, 0]]
np.savez(file, features=np.concatenate(found))
