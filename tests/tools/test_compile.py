"""Reports on train steps: what they count, and what they refuse."""

import csv
import functools
import importlib.util
import json
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from absl.testing import flagsaver

from vit_jax import config as configs
from vit_jax import main as program
from vit_jax.data import tfds
from vit_jax.data.embedded.glyphs import CHARACTERS
from vit_jax.tools import outputs
from vit_jax.tools.compile import __main__ as command_line
from vit_jax.tools.compile import (
  attention,
  classes,
  peer,
  report,
  search,
  step,
  table,
)
from vit_jax.tools.compile.costs import costs, num_products

ROOT = pathlib.Path(__file__).parents[2]
HAS_LIBTPU = importlib.util.find_spec('libtpu') is not None

LOOP = """\
HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%product (x: bf16[8,4], stack: bf16[3,4,4], i: s32[]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %stack = bf16[3,4,4]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slice = bf16[1,4,4]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), \
dynamic_slice_sizes={1,4,4}
  %w = bf16[4,4]{1,0} bitcast(%slice)
  ROOT %out = bf16[8,4]{1,0} convolution(%x, %w), dim_labels=bf_io->bf, \
backend_config={"window_config":{"estimated_cycles":"999"}}
}

%body (state: (s32[], bf16[8,4], bf16[3,4,4])) -> (s32[], bf16[8,4], \
bf16[3,4,4]) {
  %state = (s32[]{:T(128)}, bf16[8,4]{1,0}, /*index=2*/bf16[3,4,4]{2,1,0}) \
parameter(0)
  %i.1 = s32[] get-tuple-element(%state), index=0
  %x.1 = bf16[8,4]{1,0} get-tuple-element(%state), index=1
  %s.1 = bf16[3,4,4]{2,1,0} get-tuple-element(%state), index=2
  %y = bf16[8,4]{1,0} fusion(%x.1, %s.1, %i.1), kind=kOutput, \
calls=%product, metadata={op_name="jit(f)/transpose(jvp(M))/M.g/while/body/\
block_3/fc1/dot_general"}, backend_config={"window_config":\
{"estimated_cycles":"100","x":"1"}}
  %total = bf16[8,4]{1,0} all-reduce(%y), channel_id=1, to_apply=%add
  %one = s32[] constant(1)
  %next = s32[] add(%i.1, %one)
  ROOT %made = (s32[], bf16[8,4]{1,0}, bf16[3,4,4]{2,1,0}) \
tuple(%next, %total, %s.1)
}

%condition (state.2: (s32[], bf16[8,4], bf16[3,4,4])) -> pred[] {
  %state.2 = (s32[], bf16[8,4]{1,0}, bf16[3,4,4]{2,1,0}) parameter(0)
  %bound = s32[]{:T(128)} constant(3)
  %i.2 = s32[] get-tuple-element(%state.2), index=0
  ROOT %less = pred[] compare(%i.2, %bound), direction=LT
}

ENTRY %main (p: (s32[], bf16[8,4], bf16[3,4,4]), q: f32[16]) -> f32[64] {
  %p = (s32[], bf16[8,4]{1,0}, bf16[3,4,4]{2,1,0}) parameter(0)
  %q = f32[16]{0} parameter(1)
  %loop = (s32[], bf16[8,4]{1,0}, bf16[3,4,4]{2,1,0}) while(%p), \
condition=%condition, body=%body
  %start = (f32[16]{0}, f32[64]{0}) all-gather-start(%q), dimensions={0}
  ROOT %all = f32[64]{0} all-gather-done(%start), \
backend_config={"window_config":{"estimated_cycles":"7"}}
}
"""


def test_loops_count_as_often_as_they_run():
  found = costs(LOOP)
  # The fusion's cycles thrice, and none of what is inside of it.
  assert found.cycles == 3 * 100 + 7
  assert found.operations[('block_*/fc1/dot_general (backward)', 'fusion')] == (
    300
  )
  assert found.unknown_loops == 0
  # Two rounds beyond the first.
  assert found.repeated_flops == 2 * (2 * 8 * 4 * 4)
  # x in and out of the fusion, one slice of the stack and not the stack, i;
  # in and out of the all-reduce; the counter.
  x, one_slice = 8 * 4 * 2, 4 * 4 * 2
  assert found.repeated_bytes == 2 * (2 * x + one_slice + 4 + 2 * x + 3 * 4)


@pytest.mark.parametrize(
  ('labels', 'x', 'w', 'out'),
  [
    ('b?f_io->b?f', '8,1,4', '4,4', '8,1,4'),
    ('bf?_?io->?bf', '8,4,1', '1,4,4', '1,8,4'),
    ('bf_io->bf?', '8,4', '4,4', '8,4,1'),
    ('b?f_io->b?f', '2,4,4', '4,4', '2,4,4'),
  ],
)
def test_dims_of_a_product_that_have_no_role(labels, x, w, out):
  text = LOOP.replace('dim_labels=bf_io->bf', f'dim_labels={labels}')
  for name, old, new in (('x', '8,4', x), ('w', '4,4', w), ('out', '8,4', out)):
    text = text.replace(f'%{name} = bf16[{old}]', f'%{name} = bf16[{new}]')
  assert costs(text).repeated_flops == 2 * (2 * 8 * 4 * 4)


def test_collectives_by_kind():
  found = costs(LOOP).collectives
  assert found == {'all-reduce': 3 * 8 * 4 * 2, 'all-gather': 64 * 4}


def test_the_compilers_own_trip_count_comes_first():
  text = LOOP.replace(
    'body=%body', 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
  )
  assert costs(text).cycles == 507


def test_a_loop_whose_counter_takes_larger_steps():
  larger = LOOP.replace('%one = s32[] constant(1)', '%one = s32[] constant(2)')
  assert larger != LOOP
  assert costs(larger).cycles == 2 * 100 + 7  # rounds 0 and 2, of 3


def test_a_loop_without_a_bound_counts_once_and_is_told():
  found = costs(LOOP.replace('direction=LT', 'direction=NE'))
  assert (found.cycles, found.unknown_loops) == (107, 1)
  (told,) = report.warnings({'unknown_loops': 1})
  assert 'first iteration of 1 loops' in told


def test_kernels_without_an_estimate_are_told():
  kernel = '%k = f32[16]{0} custom-call(%q), custom_call_target='
  added = f'  {kernel}"tpu_custom_call"\n  %start ='
  found = costs(LOOP.replace('  %start =', added))
  assert (found.cycles, found.uncounted_kernels) == (307, 1)
  (told,) = report.warnings({'uncounted_kernels': 1})
  assert '1 runs of Pallas kernels' in told
  other = added.replace('tpu_custom_call', 'ConcatBitcast')
  assert costs(LOOP.replace('  %start =', other)).uncounted_kernels == 0
  assert report.warnings({'unknown_loops': 0}) == []


def test_kernels_can_state_their_cost():
  config = '{"cost_estimate":{"flops":"394000000","transcendentals":"7",'
  config += '"bytes_accessed":"819000","remote_bytes_transferred":"0"}}'
  kernel = '  %k = f32[16]{0} custom-call(%q), custom_call_target='
  kernel += f'"tpu_custom_call", backend_config={config}\n  %start ='
  stated = costs(LOOP.replace('  %start =', kernel))
  assert (stated.kernel_flops, stated.kernel_bytes) == (394_000_000, 819_000)
  assert (stated.uncounted_kernels, stated.unknown_kernels) == (1, 0)
  # At v5e's 197 TFLOP/s: 2 us; at 819 GB/s: 1 us; and 15%.
  cycles = functools.partial(report.kernel_cycles, device_kind='TPU v5 lite')
  found = cycles(stated, head_dim=128)
  assert found == pytest.approx(1.15 * 3e-6 * 1.5e9)
  assert found == cycles(stated, head_dim=None)
  # Half of the lanes of registers are empty: 4 us and 1 us.
  found = cycles(stated, head_dim=64)
  assert found == pytest.approx(1.15 * 5e-6 * 1.5e9)
  # Of 8 heads of 80 lanes, 4 are in two registers: 192 lanes on average.
  found = cycles(stated, head_dim=80)
  assert found == pytest.approx(1.15 * (2 * 192 / 80 + 1) * 1e-6 * 1.5e9)
  assert cycles(costs(LOOP), head_dim=64) == 0


def test_the_estimate_with_the_fewest_cycles():
  found = [
    attention.Estimate('a', 3.0),
    attention.Estimate('b', problem='no kernel here'),
    attention.Estimate('c', 2.0),
  ]
  assert attention.fastest(found).name == 'c'
  assert attention.fastest(found[1:2]) is None
  assert '; '.join(map(str, found)) == (
    'a 3 Mcycles; b is left out (no kernel here); c 2 Mcycles'
  )


def test_the_dearest_branch_counts():
  branch = """\
%{0} (x{0}: f32[]) -> f32[] {{
  %x{0} = f32[] parameter(0)
  ROOT %y{0} = f32[] negate(%x{0}), backend_config={{"estimated_cycles":"{1}"}}
}}
"""
  text = branch.format('left', 5) + branch.format('right', 11)
  text += """\
ENTRY %main (i: s32[], x: f32[]) -> f32[] {
  %i = s32[] parameter(0)
  %x = f32[] parameter(1)
  ROOT %y = f32[] conditional(%i, %x, %x), branch_computations={%left, %right}
}
"""
  assert costs(text).cycles == 11


def test_text_that_is_no_hlo():
  with pytest.raises(ValueError, match='ENTRY'):
    costs('module @jit_f { }')


@pytest.mark.parametrize(
  ('window', 'pairs'),
  [
    ({'stride': 1, 'pad': 0, 'lhs_dilate': 1, 'rhs_dilate': 1}, 3 * 5),
    # 'SAME': at either end one of three places is outside.
    ({'stride': 1, 'pad': 1, 'lhs_dilate': 1, 'rhs_dilate': 1}, 3 * 7 - 2),
    ({'stride': 1, 'pad': 0, 'lhs_dilate': 2, 'rhs_dilate': 1}, None),
  ],
)
def test_products_of_a_convolution(window, pairs):
  size, kernel = 7, 3
  dilated = np.zeros((size - 1) * window['lhs_dilate'] + 1)
  dilated[:: window['lhs_dilate']] = 1
  padded = np.pad(dilated, window['pad'])
  out = len(padded) - kernel + 1
  counted = num_products(size, kernel, out, **window)
  assert counted == sum(padded[o : o + kernel].sum() for o in range(out))
  assert pairs in (None, counted)


def test_a_scan_has_the_flops_of_its_rounds():
  def fn(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

  shapes = jnp.zeros((4, 8)), jnp.zeros((5, 8, 8))
  compiled = jax.jit(fn).lower(*shapes).compile()
  found = costs(compiled.as_text())
  assert (found.repeated_flops, found.unknown_loops) == (4 * 2 * 4 * 8 * 8, 0)


@pytest.fixture(scope='module', autouse=True)
def fast_compilation():
  """Little is computed here, so XLA's optimizations would not pay off."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


def make_config(**changes):
  config = ml_collections.ConfigDict(
    {
      'run': 'vit_jax.train.train',
      'total_epochs': 2.0,
      'model': {
        'target': 'vit_jax.models.vit.VisionTransformer',
        'width': 16,
        'depth': 1,
        'mlp_dim': 16,
        'num_heads': 2,
        'embedding': {
          'target': 'vit_jax.models.common.PatchEmbedding',
          'patch_size': 4,
        },
        'dtype': 'bfloat16',
        'num_classes': ml_collections.config_dict.placeholder(int),
      },
      'data': {
        'source': {
          'target': 'vit_jax.data.folder.Folder',
          'path': '/does/not/exist',
        },
        'transforms': (
          {'target': 'vit_jax.data.transforms.ResizeSmall', 'size': 12},
          {'target': 'vit_jax.data.transforms.CentralCrop', 'size': (8, 12)},
        ),
        'batch_size': 16,
      },
      'objective': {'target': 'vit_jax.objectives.classification.softmax_xent'},
      'optimizer': {'target': 'optax.adamw'},
      'schedule': {'lr': 1e-3, 'decay': 'cosine', 'warmup_fraction': 0.1},
    }
  )
  configs.override(config, [f'{k}={v}' for k, v in changes.items()])
  return config


def test_local_report(tmp_path):
  config = make_config()
  row = step.measure(config, jax.devices(), num_classes=5)
  assert row['mesh'] == f'data {jax.device_count()}'
  assert row['image_shape'] == '8x12x3'
  assert row['hbm_gib'] is row['fits'] is row['megacycles'] is None
  assert 'step_ms' not in row
  # Adam: parameters and two moments on each device, and a share of the batch.
  batch = 16 / jax.device_count() * (8 * 12 * 3 + 4)
  state = 3 * 4 * row['parameters']
  assert row['arguments_gib'] * 2**30 == pytest.approx(state + batch, rel=0.05)
  assert row['alias_gib'] * 2**30 == pytest.approx(state, rel=0.05)
  assert row['total_gib'] >= row['arguments_gib'] + row['temporaries_gib']
  gradients = 4 * row['parameters'] / 1e6
  reduced = row['collectives_mb']['all-reduce']
  assert reduced == pytest.approx(gradients, rel=0.05)
  # By hand: 6 patches of 48 pixels and a class token; q, k, v, out and the MLP
  # of 16 x 16; scores and sums over 7 x 7; a head; 3 x forward, 2 examples.
  products = 6 * 48 * 16 + 7 * 6 * 16 * 16 + 2 * 7 * 7 * 16 + 16 * 5
  per_device = 16 / jax.device_count() * 3 * 2 * products
  assert row['model_tflop'] * 1e12 == per_device
  assert row['compiler_tflop'] * 1e12 > 0.8 * per_device

  outputs.write_values(tmp_path / 'rows.json', [row])
  report.write_csv(tmp_path / 'rows.csv', [row])
  assert json.loads((tmp_path / 'rows.json').read_text()) == [row]
  with (tmp_path / 'rows.csv').open() as file:
    (line,) = csv.DictReader(file)
  assert float(line['all-reduce_mb']) == reduced
  assert line['fits'] == ''


@pytest.mark.parametrize(
  ('changes', 'options', 'message'),
  [
    ({'run': 'vit_jax.study.study'}, {}, 'only vit_jax.train.train'),
    ({}, {}, '--num_classes'),
    ({'data.batch_size': 17}, {'num_classes': 5}, 'must be a multiple of'),
    ({'data.transforms': ()}, {'num_classes': 5}, '--image_size'),
    ({'model.remart': 'full'}, {'num_classes': 5}, "did you mean 'remat'"),
  ],
)
def test_what_cannot_be_compiled(changes, options, message):
  config = make_config(**changes)
  with pytest.raises(ValueError, match=message):
    step.lower(config, jax.devices(), **options)


SOURCES = {  # number of classes: source, not opened
  1000: {
    'target': 'vit_jax.data.tfds.Tfds',
    'name': 'imagenet2012',
    'split': 'train[:99%]',
    'data_dir': '/does/not/exist',
  },
  20: {
    'target': 'vit_jax.data.sources.open_source',
    'path': 'tfds:cifar100:train',
    'label_key': 'coarse_label',
  },
  6: {
    'target': 'vit_jax.data.subset.Subset',
    'source': {
      'target': 'vit_jax.data.tfds.Tfds',
      'name': 'clevr',
      'split': 'train',
      'label_key': 'objects',
      'label_fn': {'target': 'vit_jax.data.vtab.ClevrDistance'},
    },
    'examples': 8,
  },
  len(CHARACTERS): {'target': 'vit_jax.data.embedded.glyphs.Glyphs'},
  7: {
    'target': 'vit_jax.data.embedded.fractals.Fractals',
    'num_classes': 7,
    'image_size': 8,
  },
}


@pytest.mark.parametrize('wanted', SOURCES)
def test_classes_of_named_data_sets(wanted):
  config = make_config()
  config.data.source = SOURCES[wanted]
  plan, _ = configs.plan_run(config)
  assert classes.declared(plan.kwargs['data'].kwargs['source']) == wanted


def test_classes_need_not_be_given_for_imagenet():
  config = make_config()
  config.data.source = SOURCES[1000]
  _, row = step.lower(config, jax.devices())
  assert row['num_classes'] == 1000
  _, row = step.lower(config, jax.devices(), num_classes=5)
  assert row['num_classes'] == 5


def test_classes_of_imagenet_21k_and_of_unknown_names():
  assert tfds.registered_classes('imagenet21k') == 21_843
  assert tfds.registered_classes('my_own_set/config:1.0.0') is None
  assert tfds.registered_classes('cifar10', 'no_such_feature') is None


@pytest.mark.parametrize(
  ('text', 'shape'),
  [(None, None), ('8', (8, 8, 3)), ('8x4', (8, 4, 3)), ('8x4x1', (8, 4, 1))],
)
def test_image_sizes(text, shape):
  assert step.read_image_shape(text) == shape


@pytest.mark.parametrize('text', ['', '8x', 'x', '0', '1x2x3x4', 'large'])
def test_image_sizes_that_are_none(text):
  with pytest.raises(ValueError, match='HxWxC'):
    step.read_image_shape(text)


@pytest.mark.parametrize(
  ('text', 'key', 'wanted', 'spare'),
  [
    (
      'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.25G '
      'of 15.75G hbm. Exceeded hbm capacity by 1.50G.',
      *('total_gib', 17.25, -1.5),
    ),
    (  # to the temporaries come 2 GiB of arguments
      'RESOURCE_EXHAUSTED: the total memory required for HLO temporaries '
      '(512.0M) exceeds available HBM (256.0M). HLO module: m.',
      *('temporaries_gib', 0.5, -2.25),
    ),
  ],
)
def test_what_the_compiler_says_when_memory_is_short(text, key, wanted, spare):
  row = report.too_large({'arguments_gib': 2}, text)
  assert row['fits'] is False
  assert (row[key], row['spare_gib']) == (wanted, spare)
  shown = report.markdown([row], ['fits'])
  assert shown.splitlines()[2] == f'| NO, {-spare:.1f} too much |'


@pytest.mark.parametrize('largest', [8, 64, 128, 4096])
@pytest.mark.parametrize('cheapest', search.POLICIES)
def test_search(largest, cheapest):
  order = search.POLICIES
  tried = []

  def fits(size, remat):
    tried.append((size, remat))
    return size <= largest and order.index(remat) >= order.index(cheapest)

  sizes = search.batch_sizes(16, 1500)
  assert sizes == [16, 32, 64, 128, 256, 512, 1024]
  best = search.search(fits, sizes)
  assert best == (None if largest < 16 else (min(largest, 1024), cheapest))
  assert len(tried) == len(set(tried)) <= 3 + 3


def test_a_search_for_a_loop_over_layers_begins_with_dots():
  policies = search.POLICIES_OF_LOOPS
  assert search.search(lambda *_: True, [8, 16], policies) == (16, 'dots')


def test_a_search_continues_after_an_interruption(tmp_path, capsys):
  compiled = []

  def compile_one(size, remat):
    if len(compiled) == 2:
      raise KeyboardInterrupt
    compiled.append((size, remat))
    about = {'batch_size': size, 'remat': remat, 'compile_s': 30.0}
    return about | {'fits': size <= 16, 'spare_gib': 16.0 - size}

  def run(topology):
    compiled.clear()
    about, file = {'topology': topology}, tmp_path / 'rows.json'
    return search.run(compile_one, about, 8, 32, file)

  with pytest.raises(KeyboardInterrupt):
    run('v5e:2x2')
  assert compiled == [(16, 'full'), (32, 'full')]
  shown = capsys.readouterr().out
  assert 'batch 16, remat full: yes, 0.0 left' in shown
  assert '32, remat full: NO, 16.0 too much (at most 3 to go, 0:01:30)' in shown
  best, rows = run('v5e:2x2')
  assert (best['batch_size'], best['remat']) == (16, 'none')
  assert compiled == [(16, 'none')] and len(rows) == 3
  assert 'data.batch_size=16 --config.model.remat=none' in (
    capsys.readouterr().out
  )
  with pytest.raises(KeyboardInterrupt):
    run('v5e:4x4')
  assert compiled == [(16, 'full'), (32, 'full')]


def test_a_search_without_batch_sizes():
  with pytest.raises(ValueError, match='the smallest batch is 8, one example'):
    search.run(None, {}, 8, 7)


def test_the_smallest_batch():
  config = make_config(**{'mesh.model': 2}, accum_steps=3)
  assert step.smallest_batch(config, [*jax.devices()]) == 12


def test_the_committed_page_is_made_of_its_data():
  page = ROOT / 'docs' / 'compile.md'
  rows = json.loads(page.with_suffix('.json').read_text())
  assert page.read_text() == table.text(rows, page)
  assert {'B/16', 'L/16'} <= {row['model'] for row in rows}


@pytest.mark.parametrize('model', table.MODELS)
def test_each_line_of_the_page_is_a_command(model):
  entry = table.MODELS[model]
  for options in entry.options:
    (spec, *given) = entry.arguments
    config = configs.load(ROOT / spec.removeprefix('--config='))
    given = [word.removeprefix('--config.') for word in given]
    configs.override(config, [*given, *options])
    configs.plan_run(config)
    made = configs.make({'model': config.model})['model']
    for option in options:
      key, value = option.removeprefix('model.').split('=')
      assert str(getattr(made, key)) == value


CONFIG = '--config=configs/pretrain_imagenet.py:B/16,tiny'


def test_command(monkeypatch, tmp_path, capsys):
  def measure(config, devices, **options):
    assert config.ema_decay == 0.9 and config.model.depth == 1
    assert options == {'image_shape': (8, 8, 3), 'num_classes': 10}
    operations = [['block_*/mlp', 'fusion', 2_000_000]]
    about = {'mesh': '1 device', 'device_kind': 'cpu', 'operations': operations}
    return about | {'batch_size': 16, 'fits': True, 'spare_gib': 1.5}

  monkeypatch.setattr(step, 'measure', measure)
  file = tmp_path / 'configs' / 'tiny.py'
  file.parent.mkdir()
  file.write_text("""
from ml_collections import ConfigDict
def get_config(name):
  return ConfigDict({'model': {'name': name, 'depth': 2}})
""")
  command = [
    'compile',
    f'--config={file}:B/16',
    '--topology=local',
    '--config.ema_decay=0.9',
    '--config.model.depth=1',
    '--image_size=8',
    '--num_classes=10',
    '--operations=1',
    f'--json={tmp_path}/row.json',
    f'--csv={tmp_path}/row.csv',
  ]
  with flagsaver.flagsaver():
    command_line.main(program.parse_flags(command))
  shown = capsys.readouterr().out
  assert 'yes, 1.5 left' in shown and 'block_*/mlp: fusion' in shown
  (row,) = json.loads((tmp_path / 'row.json').read_text())
  changes = 'ema_decay=0.9 model.depth=1 image_size=8 num_classes=10'
  assert row['config'] == f'tiny.py:B/16 {changes}'
  assert 'batch_size' in (tmp_path / 'row.csv').read_text()


PEER = """
import jax
import jax.numpy as jnp

def make_step(factor='1', *, batch_size, image_shape, num_classes, mesh):
  def step(w, images):
    images = images.reshape(len(images), -1)
    return w - (images.T @ (images @ w)) * float(factor), w.sum()
  inputs = image_shape[0] * image_shape[1] * image_shape[2]
  w = jax.ShapeDtypeStruct((inputs, num_classes), jnp.float32)
  images = jax.ShapeDtypeStruct((batch_size, *image_shape), jnp.float32)
  return step, (w, images)
"""


def test_a_peer_gets_the_same_batch_and_devices(tmp_path, capsys):
  config = make_config()
  row = step.measure(config, jax.devices(), num_classes=5)
  script = tmp_path / 'peer.py'
  script.write_text(PEER)
  mesh = step.make_mesh(config, jax.devices())
  found = peer.measure(f'{script}:0.5', row, mesh)
  shared = 'mesh', 'devices', 'batch_size', 'image_shape', 'num_classes'
  assert [found[k] for k in shared] == [row[k] for k in shared]
  inputs, share = 8 * 12 * 3, 16 / len(jax.devices())
  assert found['arguments_gib'] * 2**30 == 4 * inputs * (5 + share)
  assert found['model_tflop'] * 1e12 == 2 * 2 * share * inputs * 5
  assert found['alias_gib'] * 2**30 == 4 * inputs * 5  # w is donated
  assert set(found['collectives_mb']) == {'all-reduce'}
  row['peer_ratio'] = peer.ratio(row, found)
  report.show_ratio(row, found)
  assert 'No ratio' in capsys.readouterr().out


def test_the_ratio_of_a_peer(capsys):
  ours, theirs = {'megacycles': 200.0}, {'megacycles': 300.0}
  ours['peer_ratio'] = peer.ratio(ours, theirs)
  report.show_ratio(ours, theirs)
  assert '1.50 times our cycles: 300 to 200' in capsys.readouterr().out
  assert peer.ratio(ours, {'fits': False}) is None


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('x = 1', 'no function make_step'),
    ('def make_step(): pass', 'batch_size, image_shape, num_classes, mesh'),
    ('def make_step(**about): return 3', 'returned int. Expected .step, arg'),
    (None, 'is not a file'),
  ],
)
def test_peers_that_are_none(text, message, tmp_path):
  script = tmp_path / 'peer.py'
  if text:
    script.write_text(text)
  row = {'batch_size': 8, 'image_shape': '8x8x3', 'num_classes': 2}
  with pytest.raises(ValueError, match=message):
    peer.measure(str(script), row, step.make_mesh(make_config(), jax.devices()))


def test_the_plain_vit_is_a_peer():
  script = runpy.run_path(str(ROOT / 'benchmarks' / 'plain_linen_vit.py'))
  about = {'batch_size': 8, 'image_shape': (32, 32, 3), 'num_classes': 3}
  train, arguments = script['make_step']('Ti/16', **about, mesh=None)
  state, loss = jax.eval_shape(train, *arguments)
  assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, arguments[0])
  assert loss.shape == ()


BIG_VISION = """
from big_vision import utils
from big_vision.models import common
import flax.linen as nn

class Model(nn.Module):
  num_classes: int
  variant: str
  rep_size: bool
  pool_type: str
  dtype_mm: str

  @nn.compact
  def __call__(self, image, *, train=False):
    x = nn.Dense(self.num_classes, dtype=self.dtype_mm)(image.mean((1, 2)))
    return x, {}
"""
VISION_TRANSFORMER = """
from vit_jax import models_resnet
import flax.linen as nn

class VisionTransformer(nn.Module):
  num_classes: int
  model_name: str

  @nn.compact
  def __call__(self, inputs, *, train):
    return nn.Dense(self.num_classes)(inputs.mean((1, 2)))
"""
REPOSITORIES = {
  'big_vision': {'big_vision/models/vit.py': BIG_VISION},
  'vision_transformer': {
    'vit_jax/models_vit.py': VISION_TRANSFORMER,
    'vit_jax/configs/models.py': (
      "MODEL_CONFIGS = {'ViT-B_16': {'model_name': 'ViT-B_16'}}"
    ),
  },
}


@pytest.mark.parametrize('name', REPOSITORIES)
def test_peers_in_a_checkout(name, tmp_path, monkeypatch):
  script = str(ROOT / 'benchmarks' / f'peer_{name}.py')
  row = {'batch_size': 8, 'image_shape': '32x32x3', 'num_classes': 3}
  row |= {'device_kind': 'cpu', 'hbm_gib': None}
  mesh = step.make_mesh(make_config(), jax.devices())
  with pytest.raises(ValueError, match=f'PYTHONPATH. Clone .*/{name}, and'):
    peer.measure(f'{script}:B/16', row, mesh)
  monkeypatch.syspath_prepend(tmp_path)
  for file, text in REPOSITORIES[name].items():
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
  before = set(sys.modules)
  found = peer.measure(f'{script}:B/16', row, mesh)
  images, labels = 4 * 32 * 32 * 3, 4 * 3
  per_device = (images + labels) * 8 / len(jax.devices())
  assert found['arguments_gib'] * 2**30 > per_device
  assert found['batch_size'] == 8
  added = {module.partition('.')[0] for module in set(sys.modules) - before}
  assert 'big_vision' not in added and 'vit_jax' not in added


@pytest.mark.slow
@pytest.mark.skipif(HAS_LIBTPU, reason='libtpu is installed')
def test_without_the_compiler():
  command = [sys.executable, '-m', 'vit_jax.tools.compile', CONFIG]
  done = subprocess.run(
    [*command, '--topology=v5e:2x2'], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 1
  assert "pip install -e '.[tpu]'" in done.stderr
  assert 'Traceback' not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LIBTPU, reason='needs libtpu')
def test_tpu():
  """In a process of its own: only one can use libtpu."""
  code = """
import jax
import jax.numpy as jnp
import pytest
from vit_jax import config
from vit_jax.tools.compile import step
from vit_jax.tools.compile.costs import costs

with pytest.raises(ValueError, match='v5e:16x16'):
  step.find_devices('v5e:99x99x99')
assert len(step.find_devices('v5e:1x1')) == 1
devices = step.find_devices('v5e:2x2')

# The compiler's own printout, for programs that jaxlib cannot print.
class Refused:
  def as_text(self):
    raise jax.errors.JaxRuntimeError('no')

def f(x, w):
  return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

here = jax.sharding.SingleDeviceSharding(devices[0])
x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16, sharding=here)
w = jax.ShapeDtypeStruct((6, 512, 512), jnp.bfloat16, sharding=here)
lowered = jax.jit(jax.grad(f, argnums=1)).lower(x, w)
compiled = lowered.compile()
texts = [step.read_hlo(lowered, c) for c in (compiled, Refused())]
first, second = map(costs, texts)
assert first.cycles > 0 and first == second, (first, second)

training = config.load('configs/pretrain_imagenet.py:B/16,tiny')
config.override(training, ['model.scan=True'])
row = step.measure(training, devices, num_classes=10)
assert row['fits'] and row['devices'] == 4 and row['unknown_loops'] == 0
assert row['step_ms'] == pytest.approx(row['megacycles'] / 1.5)
assert row['images_per_s'] == pytest.approx(16e3 / row['step_ms'])
assert row['collectives_mb']['all-reduce'] > 0

# Without a device the choice of attention is by estimates, unless it is off.
assert row['attention'] in ('pallas', 'xla', 'einsum')
(words,) = row['attention_estimates']
assert 'einsum' in words and 'pallas' in words and 'Mcycles' in words
config.override(training, ['attention_autotune=False'])
lowered, row = step.lower(training, devices, num_classes=10)
assert row['attention'] == 'auto' and 'attention_estimates' not in row
"""
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert done.returncode == 0, done.stderr
