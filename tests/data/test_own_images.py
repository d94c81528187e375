"""Own images: fine-tuning with the model of the weights, and from scratch."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import tiny
from nightly import nightly
from PIL import Image
from preset_configs import load_config

from vit_jax import config as configs
from vit_jax import pretrained
from vit_jax.data import pipeline
from vit_jax.data.sources.folder import Folder
from vit_jax.data.sources.named import open_source
from vit_jax.runs import records
from vit_jax.weights import formats
from vit_jax.weights.surgery import InitFrom


def weights(shape=(24, 24, 1), **fields):
  """Weights of a small ViT for grey images of 24 px, as the quickstart's."""
  return tiny.weights(tiny.vit(num_classes=7, **fields), shape, 0.1)


def save(folder, name, mode='RGB', size=(50, 40), seed=0, **options):
  rng = np.random.default_rng(seed)
  channels = {'L': (), 'RGB': (3,), 'RGBA': (4,), 'I;16': (), 'P': (3,)}[mode]
  kind = np.uint16 if mode == 'I;16' else np.uint8
  pixels = rng.integers(0, np.iinfo(kind).max, (*size, *channels), kind)
  image = Image.fromarray(pixels)
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  (image.convert('P') if mode == 'P' else image).save(path, **options)
  return path


@pytest.fixture(scope='module')
def images(tmp_path_factory):
  """A folder as users have it: of all kinds, sizes and names."""
  path = tmp_path_factory.mktemp('images')
  for i in range(30):
    save(path, f'large/{i}.JPG', size=(40 + i, 90 - i), seed=i)
  for i in range(5):
    save(path, f'Äpfel und 梨/bild {i} é.png', 'RGBA', seed=i)
  save(path, 'one/only.webp')
  save(path, 'kinds/grey.png', 'L')
  save(path, 'kinds/16 bit.png', 'I;16')
  save(path, 'kinds/palette.png', 'P')
  save(path, 'kinds/deep/er/nested.bmp', size=(3, 200))
  (path / 'empty').mkdir()
  (path / 'one/notes.txt').write_text('no image')
  (path / 'Thumbs.db').write_bytes(b'\0')
  return path


CLASSES = ['kinds', 'large', 'one', 'Äpfel und 梨']


def test_a_tenth_of_each_class_is_held_out(images):
  parts = {
    split: open_source(images, split=split, stratified=True)
    for split in ('[:90%]', '[90%:]', '[80%:]')
  }
  train, test = parts['[:90%]'], parts['[90%:]']
  assert train.class_names == test.class_names == CLASSES
  count = {k: Counter(x.labels().tolist()) for k, x in parts.items()}
  assert count['[:90%]'] == {0: 3, 1: 27, 2: 1, 3: 4}
  assert count['[90%:]'] == {0: 1, 1: 3, 3: 1}
  assert count['[80%:]'] == {1: 6, 0: 1, 3: 1}
  names = [{x.describe(i) for i in range(len(x))} for x in (train, test)]
  assert not names[0] & names[1] and len(names[0] | names[1]) == 40


@pytest.mark.parametrize('words', ['tiny', *nightly(['tiny,balanced'])])
def test_training_from_scratch_is_one_command(words, images, tmp_path):
  config = load_config('train_folder', words)
  config.data.source.path = str(images)
  state = configs.run(config, tmp_path)
  assert state.params['head']['kernel'].shape[-1] == len(CLASSES)
  found = [r.get('test/num_examples') for r in records.read_records(tmp_path)]
  assert 5 in found
  saved = formats.read(tmp_path)
  assert saved.class_names == CLASSES
  resize = configs.resolve(config.evals.test.data.transforms)
  assert saved.transforms == tuple(resize)


def test_an_image_that_cannot_be_read_is_named(images, tmp_path):
  broken = save(tmp_path, 'a/broken.jpg', size=(99, 99))
  broken.write_bytes(broken.read_bytes()[:2000])
  save(tmp_path, 'b/whole.jpg')
  source = Folder(tmp_path)
  (tmp_path / 'b/page.png').write_text('<html>')
  half = save(tmp_path, 'b/half.png')
  half.write_bytes(half.read_bytes()[:-500])
  message = (
    r'(?s)3 of 4 images.*broken\.jpg: .*half\.png: .*page\.png: .*\nRepair'
  )
  with pytest.raises(ValueError, match=message):
    pipeline.Data(Folder(tmp_path), 2).first_example()
  half.unlink()
  (tmp_path / 'b/page.png').unlink()
  with pytest.raises(ValueError, match=r'broken\.jpg.*Repair or remove'):
    next(iter(pipeline.Data(source, 2).eval_batches()))
  resize = load_config('train_folder').evals.test.data.transforms
  data = pipeline.Data(source, 2, configs.resolve(resize), on_error='skip')
  assert [x['mask'].sum() for x in data.eval_batches()] == [1]


def test_what_cannot_be_trained(images, tmp_path):
  config = load_config('train_folder', 'tiny')
  config.data.source.path = str(images)
  with pytest.raises(ValueError, match='data finds images'):
    configs.run(config, images / 'large' / 'run')
  assert not (images / 'large' / 'run').exists()
  for i in range(2):
    save(tmp_path, f'data/only/{i}.jpg')
  config.data.source.path = str(tmp_path / 'data')
  with pytest.raises(ValueError, match=r"one class: \['only'\]"):
    configs.run(config, tmp_path / 'run')


def test_class_weights_of_a_config_are_those_of_its_training_images(images):
  config = load_config('train_folder', 'class_weights')
  config.data.source.path = str(images)
  call, known = configs.plan_run(config), {}
  training = dataclasses.replace(call, run=None).make()
  found = training.supplied(known).objective
  expected = [35 / 12, 35 / 108, 35 / 4, 35 / 16]
  np.testing.assert_allclose(found.keywords['class_weights'], expected)
  # A run that resumes has those that it began with, of any data.
  known = json.loads(json.dumps(known))
  resumed = dataclasses.replace(training, data=None).supplied(known)
  assert resumed.objective == found
  fine = load_config('finetune', 'folder,class_weights').objective
  assert fine.class_weights == config.objective.class_weights


def test_contradictions():
  for words, message in [
    ('balanced,class_weights', 'Keep one'),
    ('held_out=0.2', 'a whole number'),
    ('held_out=100', 'below 100'),
  ]:
    for name, first in (('train_folder', ''), ('finetune', 'folder,')):
      with pytest.raises(ValueError, match=message):
        load_config(name, first + words)
  with pytest.raises(ValueError, match='held_out'):
    load_config('finetune', 'pets,held_out=20')


# Fine-tuning.


@pytest.mark.slow
def test_grey_weights_are_fine_tuned_on_rgb_images(images, tmp_path, capsys):
  formats.write(weights(), tmp_path / 'grey.npz', 'vit_jax')

  def finetune(words, init_from, workdir, *more):
    config = load_config('finetune', f'folder,{words}')
    config.init_from.path = str(init_from)
    config.data.source.path = str(images)
    configs.override(
      config, ['total_epochs=None', 'total_steps=2', 'data.batch_size=8', *more]
    )
    return configs.run(config, workdir), config

  with pytest.raises(ValueError, match='adapt_channels') as error:
    finetune('size=24', tmp_path / 'grey.npz', tmp_path / 'wrong')
  assert 'embedding/kernel (4, 4, 1, 16)' in str(error.value)

  adapt = 'init_from.adapt_channels=True'
  state, _ = finetune('', tmp_path / 'grey.npz', tmp_path / 'rgb', adapt)
  assert state.params['embedding']['kernel'].shape == (4, 4, 3, 16)
  assert state.params['pos_embedding'].shape == (1, 10, 10, 16)  # 40 px
  assert 'channels adapted' in capsys.readouterr().out
  # The result is weights, too: from a workdir, now of RGB images.
  init_from = InitFrom(str(tmp_path / 'rgb'))
  assert pretrained.from_weights(init_from).num_classes is None
  assert pretrained.finetuning_size(init_from) == (68, 68)


@pytest.mark.parametrize(
  'changes, sizes',
  [
    ([], [(47, 47), (40, 40), 47, (40, 40)]),
    (['data.image_size=24'], [(28, 28), (24, 24), 28, (24, 24)]),
    (['data.transforms.1.size=48'], [(47, 47), (48, 48), 47, (40, 40)]),
    (['data.image_size=(24, 36)'], [(28, 42), (24, 36), 42, (24, 36)]),
  ],
)
def test_sizes_follow_the_weights_unless_they_are_set(changes, sizes, tmp_path):
  formats.write(weights(), tmp_path / 'grey.npz', 'vit_jax')
  config = load_config('finetune', 'folder,resize')
  config.init_from.path = str(tmp_path / 'grey.npz')
  configs.override(config, changes)
  call = configs.plan_run(config)
  test = call.kwargs['evals']['test'].kwargs['evaluator']
  made = []
  for data in (call.kwargs['data'], test.kwargs['data']):
    kwargs = data.kwargs | {'source': source()}
    made += dataclasses.replace(data, kwargs=kwargs).make().transforms
  assert [t.size for t in made if hasattr(t, 'size')] == sizes
  if not changes:  # what --print_config prints
    shown = list(configs.settings(call))
    assert 'config.data.image_size = [40, 40]' in shown
    assert 'config.evals.test.data.transforms.1.size = 1.0' in shown


def source():
  return [{'image': tiny.encode(Image.new('RGB', (9, 9))), 'label': 0}]


def test_the_weights_are_asked_for_once(tmp_path):
  config = load_config('finetune', 'folder,class_weights')
  with pytest.raises(ValueError, match='values to be set') as error:
    configs.run(config, tmp_path)
  assert str(error.value).split('Add ')[1].split() == [
    '--config.init_from.path=...',
    '--config.data.source.path=...',
  ]
