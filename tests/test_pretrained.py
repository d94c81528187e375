"""pretrained.load: one call from a file to a model that computes the same."""

import json

import jax
import numpy as np
import pytest
from small import logits, random_weights

from vit_jax import pretrained, tree
from vit_jax.data.transforms import Resize
from vit_jax.models.dense import Gelu, Normalize
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import Head
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import PatchEmbedding, VisionTransformer, as_pair
from vit_jax.types import UserError
from vit_jax.weights import bundle, formats, surgery

SMALL = {
  **{'width': 24, 'depth': 2, 'mlp_dim': 48, 'num_heads': 3},
  **{'embedding': PatchEmbedding((4, 4)), 'num_classes': 5},
}


def make(size=(12, 12), **fields):
  """Weights of a small ViT, all of its parameters random."""
  model = bundle.from_fields(VisionTransformer, **SMALL | fields)
  more = {'class_names': list('abcde'), 'preprocess': Normalize(9.0)}
  return random_weights(model, (*size, 3), activation='sigmoid', **more)


def images(size=(12, 12), channels=3):
  rng = np.random.default_rng(1)
  return rng.uniform(-1, 1, (2, *size, channels)).astype(np.float32)


def load(path, **options):
  """(model, params, report)."""
  report = []
  model, params = pretrained.load(path, report=report.append, **options)
  return model, params, report[0]


def out_of(model, params, inputs):
  """Shape and dtype of the logits, without computing them."""
  return jax.eval_shape(model.apply, {'params': params}, inputs)


def apply(model, params, inputs):
  flat = tree.flatten(params)
  return logits(bundle.Weights(model, flat, inputs.shape[1:]), inputs)


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp('weights') / 'small.npz'
  formats.write(make(), path, 'npz')
  return path


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """The folder of a model in the cache of huggingface_hub, without network."""
  constants = pytest.importorskip('huggingface_hub.constants')
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  model = tmp_path / 'models--facebook--vit-mae-tiny'
  for name in ('main', 'v2'):
    (model / 'refs' / name).parent.mkdir(parents=True, exist_ok=True)
    (model / 'refs' / name).write_text('0123')
  return model / 'snapshots' / '0123'


def test_a_model_of_the_hub_by_its_name(hub):
  formats.write(make(), hub, 'timm')
  formats.write(make(), hub / 'more' / 'x.npz', 'npz')
  name = 'hf://facebook/vit-mae-tiny'
  for path in (f'{name}/more/x.npz', f'{name}@v2/model.safetensors', name):
    model, params, report = load(path)
    assert 'cc-by-nc-4.0 (NOT for commercial use)' in report
    assert model.num_classes == 5
    assert params['norm']['scale'].shape == (24,)
  (hub / 'model.safetensors').rename(hub / 'model-1-of-1.safetensors')
  index = {'weight_map': {'any': 'model-1-of-1.safetensors'}}
  (hub / 'model.safetensors.index.json').write_text(json.dumps(index))
  assert load(name)[0].num_classes == 5
  parts = 'patch_embed.proj', 'blocks.0.mlp.linear_fc1'
  for part in parts:  # of an image encoder
    index['weight_map'][f'a.{part}.weight'] = index['weight_map']['any']
  index['weight_map']['any'] = 'is_not_there.safetensors'
  (hub / 'model.safetensors.index.json').write_text(json.dumps(index))
  assert load(name)[0].num_classes == 5


@pytest.mark.usefixtures('hub')
@pytest.mark.parametrize('path', ['nobody/nothing', 'a b/c', 'a', ''])
def test_models_that_the_hub_does_not_have(path):
  with pytest.raises(UserError, match=rf'^hf://{path} cannot.*\n.*hf://USER/'):
    load(f'hf://{path}')


def test_same_use_is_told_so_and_computes_the_same(file):
  model, params, report = load(file)
  assert report.endswith('everything unchanged')
  np.testing.assert_allclose(
    apply(model, params, images()), logits(make(), images()), atol=1e-6
  )


def test_other_image_sizes_resize_positions(file):
  model, params, report = load(file, image_size=(20, 8))
  assert 'pos_embedding 1x3x3x24 resized to 1x5x2x24 (paper)' in report
  assert out_of(model, params, images((20, 8))).shape == (2, 5)


def test_the_head_is_kept_swapped_or_dropped(file):
  model, params, report = load(file, num_classes=7)
  assert model.num_classes == 7
  assert not params['head']['kernel'].any() and not params['head']['bias'].any()
  assert out_of(model, params, images()).shape == (2, 7)
  assert 'head/kernel 24x7 newly initialised' in report
  model, params, report = load(file, num_classes=0)
  assert 'head' not in params and 'head/kernel 24x5 dropped' in report
  kept, whole, _ = load(file)
  kernel, bias = (np.asarray(whole['head'][k]) for k in ('kernel', 'bias'))
  np.testing.assert_allclose(
    apply(model, params, images()) @ kernel + bias,
    apply(kept, whole, images()),
    atol=1e-5,
  )
  model, params, _ = load(file, head='reset', **{'head.bias_init': -2.0})
  assert not params['head']['kernel'].any()
  np.testing.assert_array_equal(params['head']['bias'], -2)


def test_channels_and_patches(file):
  model, params, said = load(file, in_chans=1)
  grey = images(channels=1)
  same, colour, _ = load(file)
  np.testing.assert_allclose(
    apply(model, params, grey),
    apply(same, colour, np.repeat(grey, 3, axis=-1)),
    atol=1e-5,
  )
  assert 'channels adapted' in said
  model, params, said = load(file, patch_size=8, image_size=24)
  large = np.zeros((2, 24, 24, 3), np.float32)
  assert out_of(model, params, large).shape == (2, 5)
  assert 'resized to 8x8x3x24 (bicubic_antialias)' in said


def test_how_it_is_run_is_for_the_user_to_say(file):
  model, params, _ = load(
    file, dtype='bfloat16', scan=True, **{'block.mlp': Gelu('exact')}
  )
  assert params['blocks']['norm1']['scale'].shape == (2, 24)
  assert out_of(model, params, images()).dtype == np.float32
  for options, match in (
    ({'mpl': None}, r"no field 'mpl'.*'block.mlp'"),
    ({'depth': 3}, 'block_2|encoderblock_2'),
    ({'image_size': 10}, '10'),
  ):
    with pytest.raises(ValueError, match=match):
      load(file, **options)
  assert formats.read(file, image_size=12).image_shape == (12, 12, 3)
  with pytest.raises(ValueError, match='images of 12x12'):
    formats.read(file, image_size=16)


def test_resnets_take_any_size(tmp_path):
  model = ResNet(stages=(1,), num_classes=5)
  weights = random_weights(model, (32, 32, 3))
  formats.write(weights, tmp_path / 'r.npz', 'npz')
  loaded, params, _ = load(tmp_path / 'r.npz', image_size=(24, 16))
  inputs = images((24, 16))
  np.testing.assert_allclose(
    apply(loaded, params, inputs), logits(weights, inputs), atol=1e-5
  )


def test_transforms_grow_with_the_image(file):
  weights, _ = pretrained.fit(formats.read(file), image_size=24)
  assert weights.transforms == (Resize((24, 24)),)
  assert weights.class_names == list('abcde')
  assert pretrained.fit(weights, num_classes=3)[0].class_names is None


def init_from(path, **fields):
  return surgery.InitFrom(path=str(path), **fields)


def test_the_model_that_is_fine_tuned(file, tmp_path):
  fields = {'dropout': 0.1, 'head': Head(8, -2.0), 'dtype': 'bfloat16'}
  fields |= {'block.attention_dropout': 0.1, 'remat': 'full'}
  formats.write(make(**fields), tmp_path / 'x.npz', 'vit_jax')
  own = init_from(tmp_path / 'x.npz')
  model = pretrained.from_weights(own, stochastic_depth=0.2)
  assert (model.dropout, model.stochastic_depth) == (0.0, 0.2)
  assert (model.dtype, model.num_classes) == ('bfloat16', None)
  assert model.head == Head() and model.block.attention_dropout == 0
  assert (model.remat, model.attention, model.scan) == ('none', 'auto', False)
  again = pretrained.from_weights(own, block={'attention_dropout': 0.2})
  assert again.block.attention_dropout == 0.2
  keep = pretrained.from_weights(init_from(own.path, head='keep'))
  assert (keep.num_classes, keep.head.representation_size) == (5, 8)
  published = pretrained.from_weights(init_from(file))
  assert published.dtype == 'float32'  # NAME.json says so
  (file.parent / 'small.json').rename(file.parent / 'other.json')
  assert pretrained.from_weights(init_from(file)).dtype == 'bfloat16'
  (file.parent / 'other.json').rename(file.parent / 'small.json')
  assert pretrained.transforms(own) == (Resize((12, 12)),)
  assert pretrained.interpolation(own) == 'bilinear'
  assert pretrained.preprocess(own) == make().preprocess
  with pytest.raises(ValueError, match='init_from'):
    pretrained.from_weights(None)
  formats.write(make(), tmp_path / 'timm', 'timm')
  of_timm = init_from(tmp_path / 'timm', options={'num_heads': 3})
  assert pretrained.from_weights(of_timm).dtype == 'bfloat16'


@pytest.mark.parametrize(
  'patch, size, expected',
  [
    *((16, 224, 384), (14, 224, 518), (16, 384, 384), (16, 512, 512)),
    *((32, 256, 384), (4, 24, 40), (14, 518, 518), (2, 28, 48)),
    (16, (224, 112), (384, 192)),
  ],
)
def test_the_size_of_fine_tuning(patch, size, expected, monkeypatch):
  weights = make(as_pair(size), embedding=PatchEmbedding(patch))
  monkeypatch.setattr(surgery, 'read', lambda *_, **__: weights)
  found = pretrained.finetuning_size(init_from('x'))
  assert found == as_pair(expected)


def test_the_size_of_fine_tuning_other_models(tmp_path):
  mixer = MlpMixer(
    **{'width': 8, 'depth': 1, 'tokens_mlp_dim': 8, 'channels_mlp_dim': 8},
    **{'embedding': PatchEmbedding(4), 'num_classes': 3},
  )
  resnet = ResNet(stages=(1,), num_classes=3)
  for model, size, expected in ((mixer, 24, 24), (resnet, 224, 384)):
    weights = random_weights(model, (size, size, 3))
    formats.write(weights, tmp_path / 'x.npz', 'vit_jax')
    found = pretrained.finetuning_size(init_from(tmp_path / 'x.npz'))
    assert found == (expected, expected)
