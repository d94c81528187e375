"""Record what transformers computes for ViTs, from its own and our files.

formats_hf.json holds no weights: those are made of a seed (seeded.py), of the
names and shapes that are stored. To record again, in a virtual environment
that has vit_jax, torch as record_timm.py says, and transformers==5.23.0:

  python tests/golden/record_hf.py
"""

import json
import pathlib
import tempfile

import safetensors.numpy
import seeded
from PIL import Image

(transformers,) = seeded.import_torch('transformers')
from written import OURS  # noqa: E402

from vit_jax.weights import huggingface as ours  # noqa: E402

SMALL = seeded.HF | {'num_hidden_layers': 1}
NAMES = {i: f'class {i}' for i in range(5)}
CROP = {
  'size': {'shortest_edge': 16},
  'do_center_crop': True,
  'crop_size': {'height': 12, 'width': 12},
  'resample': 3,
  'image_mean': [0.485, 0.456, 0.406],
  'image_std': [0.229, 0.224, 0.225],
}
CLASSIFIER, MODEL = 'ViTForImageClassification', 'ViTModel'
THEIRS = {  # name: arguments of read_case
  'classifier': (
    *(CLASSIFIER, {'id2label': NAMES, 'num_hidden_layers': 2}),
    {'size': {'height': 12, 'width': 8}},
  ),
  'tanh': (
    CLASSIFIER,
    {
      'hidden_act': 'gelu_pytorch_tanh',
      'layer_norm_eps': 0.1,  # which can be seen in the logits
      **{'num_channels': 1, 'num_labels': 5},
      'problem_type': 'multi_label_classification',
    },
  ),
  'square': (
    *(CLASSIFIER, {'image_size': 12, 'patch_size': 4, 'num_labels': 5}),
    CROP,
  ),
  'pooler': (MODEL, {'pooler_output_size': 20, 'num_hidden_layers': 2}),
  'no_pooler': (MODEL, {}, None, {'add_pooling_layer': False}),
}


def run(folder, shape, kind, **arguments):
  """Logits of a folder's model, or features, in float64."""
  model, loading = getattr(transformers, kind).from_pretrained(
    folder, output_loading_info=True, **arguments
  )
  wrong = {k: v for k, v in loading.items() if v}
  assert not wrong, wrong
  out = seeded.compute(model.double().eval(), seeded.images(shape))
  if kind == CLASSIFIER:
    found = out.logits
  elif out.pooler_output is not None:
    found = out.pooler_output
  else:
    found = out.last_hidden_state[:, 0]
  return found.numpy().tolist()


def row(folder):
  """What the image processor makes of a picture."""
  processor = transformers.AutoImageProcessor.from_pretrained(folder)
  picture = Image.fromarray(seeded.picture())
  made = processor(images=picture, return_tensors='np')['pixel_values'][0]
  return seeded.middle_row(made)


def read_case(kind, fields, processor=None, arguments=None):
  """Return what a model of these arguments computes, and how to make it."""
  arguments = arguments or {}
  config = transformers.ViTConfig(**SMALL | fields)
  model = getattr(transformers, kind)(config, **arguments)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    model.save_pretrained(path)
    arrays = safetensors.numpy.load_file(path / 'model.safetensors')
    shapes = {name: list(value.shape) for name, value in arrays.items()}
    save(path, seeded.weights(shapes))
    size = config.image_size
    size = [size, size] if isinstance(size, int) else list(size)
    shape = [*size, config.num_channels]
    found = json.loads((path / 'config.json').read_text())
    case = {
      'shapes': shapes,
      'image': shape,
      'logits': run(path, shape, kind, **arguments),
      'config': found,
    }
    if processor is not None:
      transformers.ViTImageProcessor(**processor).save_pretrained(path)
      text = (path / 'preprocessor_config.json').read_text()
      found['preprocessor_config'] = json.loads(text)
      case['row'] = row(path)
  return case


def write_case(settings):
  weights = seeded.model_weights(settings)
  arrays, files = ours.write(weights)
  kind, arguments = CLASSIFIER, {}
  if 'num_classes' in settings:
    has_pooler = 'head' in settings
    kind, arguments = MODEL, {'add_pooling_layer': has_pooler}
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    save(path, arrays)
    for name, content in files.items():
      (path / name).write_text(json.dumps(content))
    return {
      'digest': seeded.digest(arrays),
      'files': files,
      'logits': run(path, weights.image_shape, kind, **arguments),
      'row': row(path),
    }


def save(path, arrays):
  file = path / 'model.safetensors'
  safetensors.numpy.save_file(arrays, file, {'format': 'pt'})


if __name__ == '__main__':
  golden = {
    'read': {name: read_case(*case) for name, case in THEIRS.items()},
    'written': {name: write_case(case) for name, case in OURS['hf'].items()},
  }
  seeded.write('formats_hf', golden)
