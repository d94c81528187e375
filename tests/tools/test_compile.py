"""Reports on train steps: what they count, and what they refuse."""

import dataclasses
import importlib.util
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import pytest
from absl.testing import flagsaver
from processes import needs_libtpu, python, with_libtpu

from vit_jax import config as configs
from vit_jax import main as program
from vit_jax.analysis import chips
from vit_jax.step import Objective
from vit_jax.tools.compile import __main__ as command_line
from vit_jax.tools.compile import lowering, rows
from vit_jax.tools.compile.hlo import costs, num_bytes
from vit_jax.tools.compile.roofline import roofline

HAS_CUDA = importlib.util.find_spec('jax_cuda12_plugin') is not None

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
  cost = costs(LOOP)
  # The fusion's cycles thrice, and none of what is inside of it.
  assert cost.cycles == 3 * 100 + 7
  assert cost.operations['block_*/fc1/dot_general (backward)', 'fusion'] == 300
  assert cost.unknown_loops == 0
  assert cost.collectives == {'all-reduce': 3 * 8 * 4 * 2, 'all-gather': 64 * 4}


SENT = """\
ENTRY %main (p: f32[1000]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  %t = token[] after-all()
  %sum = (f32[1000]{0}, u32[], token[]) send(%p, %t), channel_id=1, \
is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %other = (f32[1000]{0}, u32[], token[]) send(%p, %t), channel_id=2, \
frontend_attributes={_xla_megascale_transfer_type="ONE_TO_ONE"}
  ROOT %all = f32[1000]{0} all-reduce(%p), channel_id=3, to_apply=%add
}
"""


def test_bytes_between_slices_are_counted_apart():
  cost = costs(SENT)
  assert cost.network == {'all-reduce': 4000, 'one-to-one': 4000}
  assert cost.collectives == {'all-reduce': 4000}
  chip = chips.find('TPU v5 lite')
  sent = {'all-reduce': 100_000_000, 'one-to-one': 12_500_000}
  found = rows.network(sent, slices=4, chip=chip, step_ms=30.0)
  # 6.4 Tbit/s for 256 chips; three quarters twice; 20 ms of backward pass.
  assert found['network_ms'] == pytest.approx(100 / 3.125 * 1.5 + 4)
  assert found['network_exposed_ms'] == pytest.approx(48 - 20 + 4)


@pytest.mark.parametrize(
  ('old', 'new', 'cycles', 'unknown'),
  [
    (  # the compiler's own count comes first
      'body=%body',
      'body=%body, backend_config={"known_trip_count":{"n":"5"}}',
      *(507, 0),
    ),
    # A larger step of the counter: 0 and 2, of 3.
    ('%one = s32[] constant(1)', '%one = s32[] constant(2)', 207, 0),
    # No bound: it counts once, and the report says so.
    ('direction=LT', 'direction=NE', 107, 1),
  ],
)
def test_numbers_of_iterations(old, new, cycles, unknown):
  found = costs(LOOP.replace(old, new))
  assert (found.cycles, found.unknown_loops) == (cycles, unknown)


def with_kernel(more=''):
  kernel = '  %k = f32[16]{0} custom-call(%q), custom_call_target='
  return LOOP.replace(
    '  %start =', f'{kernel}"tpu_custom_call"{more}\n  %start ='
  )


def test_cost_of_kernels():
  assert costs(with_kernel()).unknown_kernels == 1
  other = with_kernel().replace('tpu_custom_call', 'ConcatBitcast')
  assert costs(other).unknown_kernels == 0
  config = '{"cost_estimate":{"flops":"394000000","transcendentals":"7",'
  config += '"bytes_accessed":"819000","remote_bytes_transferred":"0"}}'
  stated = costs(with_kernel(f', backend_config={config}'))
  chip = chips.find('TPU v6 lite')
  # Not attention, so part of a layer: FLOPs at the peak, and bytes.
  assert stated.kernel_flops == {'layer': 394_000_000}
  found = rows.kernel_cycles(stated, chip)
  expected = (394e6 / 918e12 + 819e3 / 1640e9) * 1.75e9
  assert found == pytest.approx(expected)
  where = 'metadata={op_name="jit(f)/attention_forward/pallas_call"}'
  stated = costs(with_kernel(f', {where}, backend_config={config}'))
  assert stated.kernel_flops == {'attention': 394_000_000}
  assert stated.kernel_bytes == {'attention': 819_000}
  assert stated.unknown_kernels == 0
  # 394 MFLOP at 12% of v6e's 918 TFLOP/s, at 1.75 GHz. 200 times as many bytes,
  # 163.8 MB, take longer at 1,640 GB/s.
  found = rows.kernel_cycles(stated, chip)
  assert found == pytest.approx(394e6 / 0.12 / 918e12 * 1.75e9)
  stated.kernel_bytes['attention'] *= 200
  found = rows.kernel_cycles(stated, chip)
  assert found == pytest.approx(163.8e6 / 1640e9 * 1.75e9)
  assert rows.kernel_cycles(costs(LOOP), chip) == 0


def test_shapes_in_bytes():
  for shape, size in (
    ('f32[2,3]{1,0}', 24),
    ('(s32[], bf16[8,4], pred[3])', 4 + 64 + 3),
    ('s4[6]', 3),
    ('f8e4m3fn[5]', 5),
  ):
    assert num_bytes(shape) == size


def test_loops_of_this_compiler():
  def fn(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

  shapes = jnp.zeros((4, 8)), jnp.zeros((5, 8, 8))
  compiled = jax.jit(fn).lower(*shapes).compile()
  assert costs(compiled.as_text()).unknown_loops == 0


def make_config(**changes):
  config = ml_collections.ConfigDict(
    {
      'run': 'vit_jax.train.train',
      'total_epochs': 2.0,
      'model': {
        'target': 'vit_jax.models.vit.VisionTransformer',
        **{'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2},
        'embedding': {'patch_size': 4},
        'dtype': 'bfloat16',
        'num_classes': ml_collections.config_dict.placeholder(int),
      },
      'data': {
        'source': {
          'target': 'vit_jax.data.sources.folder.Folder',
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


def test_local_report():
  config = make_config(**{'model.num_classes': 5})  # not that of the data
  row = lowering.measure(config, jax.devices(), num_classes=9)
  assert row['num_classes'] == 5
  assert row['mesh'] == f'data {jax.device_count()}'
  assert row['image_shape'] == '8x12x3'
  assert row['spare_gib'] is row['fits'] is row['megacycles'] is None
  assert 'step_ms' not in row
  # Adam: parameters and two moments on each device, and a share of the batch.
  batch = 16 / jax.device_count() * (8 * 12 * 3 + 4)
  state = 3 * 4 * row['parameters']
  assert row['arguments_gib'] * 2**30 == pytest.approx(state + batch, rel=0.05)
  assert row['donated_gib'] * 2**30 == pytest.approx(state, rel=0.05)
  assert row['total_gib'] >= row['arguments_gib'] + row['temporaries_gib']
  gradients = 4 * row['parameters'] / 1e6
  reduced = row['collectives_mb']['all-reduce']
  assert reduced == pytest.approx(gradients, rel=0.05)
  # By hand: 6 patches of 48 pixels and a class token; q, k, v, out and the MLP
  # of 16 x 16; scores and sums over 7 x 7; a head; 3 x forward, 2 examples.
  products = 6 * 48 * 16 + 7 * 6 * 16 * 16 + 2 * 7 * 7 * 16 + 16 * 5
  per_device = 16 / jax.device_count() * 3 * 2 * products
  assert row['model_tflop'] * 1e12 == per_device
  assert row['step_tflop'] == pytest.approx(row['model_tflop'], rel=0.1)


@pytest.mark.parametrize(
  ('changes', 'options', 'message'),
  [
    ({'run': 'vit_jax.study.study'}, {}, 'vit_jax.study.study'),
    ({'data.batch_size': 17}, {'num_classes': 5}, 'must be a multiple of'),
    ({'data.transforms': ()}, {'num_classes': 5}, '--image_shape'),
    ({'model.remart': 'full'}, {'num_classes': 5}, "did you mean 'remat'"),
  ],
)
def test_what_cannot_be_compiled(changes, options, message):
  config = make_config(**changes)
  with pytest.raises(ValueError, match=message):
    lowering.lower(config, jax.devices(), **options)


@dataclasses.dataclass(frozen=True)
class OfViews(Objective):
  """Objective of two global and three local views of each image."""

  model: Any
  _: dataclasses.KW_ONLY
  preprocess: Any
  timeline: Any = None

  def init(self, rng, images):
    return {'scale': jnp.ones(())}

  def of_run(self, timeline, images):
    return dataclasses.replace(self, timeline=timeline)

  def __call__(self, params, batch, rng, context):
    assert batch['image'].shape == (16, 2, 8, 12, 3)
    assert batch['local'].shape == (16, 3, 4, 4, 3)
    assert self.timeline.total_steps > 0
    images = self.preprocess(batch['image'].reshape(-1, 8, 12, 3))
    return self.model.apply({'params': params}, images).mean(), {}


def test_several_views_of_an_image():
  name = 'vit_jax.data.transforms.MultiCrop'
  sizes = {'size': (8, 12), 'local_size': 4, 'local_count': 3}
  config = make_config()
  config.data.transforms = ({'target': name, **sizes},)
  config.objective.target = f'{__name__}.OfViews'
  _, row = lowering.lower(config, jax.devices())
  assert row['image_shape'] == '8x12x3' and row['num_classes'] == 1000
  assert row['model_tflop'] == row['step_tflop']


def test_numbers_of_a_tpu(monkeypatch):
  """Times follow from the cycles and the data sheet of the chip."""
  row = {'device_kind': 'TPU v5 lite'}
  row |= {'batch_size': 8, 'model_tflop': 1e-6}
  compiled = jax.jit(jnp.tanh).lower(jnp.zeros(4)).compile()
  found = rows.numbers(row, compiled, LOOP)
  assert found['megacycles'] == pytest.approx(307e-6)
  seconds = 307 / 1.5e9
  assert found['step_ms'] == pytest.approx(1e3 * seconds)
  assert found['images_per_s'] == pytest.approx(8 / seconds)
  assert found['mfu'] == pytest.approx(1e6 / seconds / 197e12)
  sent = 2 * 3 * 64 + 256  # an all-reduce sends each byte twice
  assert found['collectives_ms'] == pytest.approx(sent / 200e9 * 1e3)
  assert found['fits'] and found['spare_gib'] < 15.75
  assert found['operations'][0] == [
    *('block_*/fc1/dot_general (backward)', 'fusion', 300)
  ]


GPU = """\
HloModule m, is_scheduled=true

%inner (x: bf16[64,32]) -> bf16[64,32] {
  %x = bf16[64,32]{1,0} parameter(0)
  ROOT %twice = bf16[64,32]{1,0} add(%x, %x)
}

%update (stack: bf16[9,64,32], i: s32[]) -> bf16[9,64,32] {
  %stack = bf16[9,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = bf16[1,64,32]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero)
  %new = bf16[1,64,32]{2,1,0} negate(%one)
  ROOT %put = bf16[9,64,32]{2,1,0} dynamic-update-slice(%stack, %new, %i, \
%zero, %zero)
}

ENTRY %main (p: bf16[64,16], w: bf16[16,32], q: bf16[2,6,3,8], \
s: bf16[9,64,32], j: s32[]) -> bf16[64,32] {
  %s = bf16[9,64,32]{2,1,0} parameter(3)
  %j = s32[] parameter(4)
  %put.1 = bf16[9,64,32]{2,1,0} fusion(%s, %j), kind=kLoop, calls=%update, \
metadata={op_name="jit(f)/put"}
  %p = bf16[64,16]{1,0} parameter(0)
  %w = bf16[16,32]{1,0} parameter(1)
  %q = bf16[2,6,3,8]{3,2,1,0} parameter(2)
  %call = (bf16[64,32]{1,0}, s8[4194304]{0}) custom-call(%p, %w), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/block_0/fc1/\
dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %y = bf16[64,32]{1,0} get-tuple-element(%call), index=0
  %sum = bf16[64,32]{1,0} fusion(%y), kind=kLoop, calls=%inner
  %attend = (bf16[2,3,6,8]{3,1,2,0}, f32[2,3,6]{2,1,0}, u8[0]{0}) \
custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward", \
backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":\
{"element_type":"BF16","dimensions":["2","3","6","6"]}}}
  %conv = (bf16[2,6,3,8]{3,2,1,0}, u8[99]{0}) custom-call(%q, %w), \
custom_call_target="__cudnn$convForward"
  ROOT %all = bf16[64,32]{1,0} all-reduce(%sum), to_apply=%inner
}
"""


def test_the_roofline_of_a_gpu_program():
  """Each kernel takes the longer of its memory's and its products' time."""
  product, attention = 2 * 64 * 16 * 32, 5 * 2 * 2 * 3 * 6 * 6 * 8
  moved = {  # bytes read and written; workspaces and fused additions are free
    ('block_*/fc1/dot_general', 'custom-call'): 2 * (64 * 16 + 16 * 32 + 2048),
    ('other', 'fusion'): 2 * 2 * 2048,
    ('put', 'fusion'): 2 * 2 * 2048 + 4,  # in place, one of nine
    ('other', 'custom-call'): 2 * 4 * 288 + 4 * 36 + 2 * (2 * 288 + 512),
  }
  assert roofline(GPU, 1e30, 1.0).seconds == pytest.approx(moved)
  found = roofline(GPU, 1.0, 1e30)
  assert found.seconds.total() == pytest.approx(product + attention)
  found = roofline(GPU, 1.0, 1.0)
  moved['block_*/fc1/dot_general', 'custom-call'] = product
  moved['other', 'custom-call'] += attention - (2 * 4 * 288 + 4 * 36)
  assert found.seconds == pytest.approx(moved)
  assert (found.kernels, found.without_flops) == (5, 1)


def test_numbers_of_a_gpu():
  row = {'device_kind': 'NVIDIA H100 80GB HBM3'}
  row |= {'batch_size': 8, 'model_tflop': 1e-6, 'mesh': '1 device'}
  compiled = jax.jit(jnp.tanh).lower(jnp.zeros(4)).compile()
  found = rows.numbers(row, compiled, GPU)
  least = roofline(GPU, 989e12, 3352e9).seconds.total()
  assert found['roofline_ms'] == pytest.approx(1e3 * least)
  assert found['mfu_at_roofline'] == pytest.approx(1e6 / least / 989e12)
  assert found['collectives_ms'] == pytest.approx(2 * 2 * 2048 / 450e9 * 1e3)
  assert found['fits'] and 'step_ms' not in found
  assert found['megacycles'] is None


@pytest.mark.skipif(HAS_CUDA, reason='the compiler is here')
def test_a_missing_compiler_for_gpus():
  with pytest.raises(ValueError, match=r"--topology=h100:8: .*'\.\[cuda\]'"):
    lowering.find_devices('h100:8')


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CUDA, reason="needs the extra 'cuda'")
def test_the_program_of_b16_for_gpus():
  """Fused attention, rows in order, no gather of activations, its memory."""
  code = """
import re
import jax
from vit_jax import config
from vit_jax.tools.compile import lowering, rows

def program(topology, batch_size, model='B/16'):
  training = config.load(f'configs/pretrain_paper.py:imagenet,{model}')
  changes = [f'data.batch_size={batch_size}', 'model.dropout=0.0']
  config.override(training, changes)
  devices = lowering.find_devices(topology)
  lowered, row = lowering.lower(training, devices)
  compiled = lowering.compile_for(devices[0], lowered)
  text = compiled.as_text()
  return text, row | rows.numbers(row, compiled, text)

text, row = program('h100:1', 128)
calls = r'custom_call_target="__cudnn\\$fmhaSoftmax(Backward)?"'
assert len(re.findall(calls, text)) == 24  # 12 layers, forward and backward
assert row['attention'] == 'cudnn' and row['kernels_without_flops'] == 0
# The residual stream is [B, N, D], as written: nothing is [N, D, B] in memory.
assert re.search(r'\\[128,197,768\\]\\{2,1,0\\}', text)
assert not re.search(r'\\[128,19[78],768\\]\\{0,2,1\\}', text)
assert row['temporaries_gib'] < 8 and row['fits']
assert row['roofline_ms'] < 25, row['roofline_ms']

for model in ('B/16', 'B/16,fsdp'):
  text, row = program('h100:8', 1024, model)
  gathered = re.findall(r' = (.*) all-gather(?:-start)?\\(', text)
  assert not any(re.search(r'\\[\\d+,19[678],', shape) for shape in gathered)
  assert row['roofline_ms'] < 27, row['roofline_ms']
"""
  done = python('-c', code, JAX_PLATFORMS='cpu', JAX_COMPILATION_CACHE_DIR='')
  assert done.returncode == 0, done.stderr


def test_what_the_compiler_says_when_memory_is_short(monkeypatch, capsys):
  class Lowered:
    def compile(self, options):
      text = 'RESOURCE_EXHAUSTED: Used 17.25G of 15.75G hbm.\nAllocations: ...'
      raise jax.errors.JaxRuntimeError(text)

  known = {'device_kind': 'TPU v5 lite', 'mesh': '1 device'}
  monkeypatch.setattr(lowering, 'lower', lambda *_: (Lowered(), known))
  row = lowering.measure(make_config(), jax.devices())
  assert row['fits'] is False
  rows.show(row)
  assert 'Used 17.25G of 15.75G' in capsys.readouterr().out


def test_command(monkeypatch, tmp_path, capsys):
  def measure(config, devices, **options):
    assert config.seed == 3 and config.model.depth == 1
    assert options == {'image_shape': (8, 8, 3), 'num_classes': 10}
    operations = [['block_*/mlp', 'fusion', 2_000_000]]
    about = {'mesh': '1 device', 'device_kind': 'cpu', 'operations': operations}
    return about | {'batch_size': 16, 'fits': True, 'spare_gib': 1.5}

  monkeypatch.setattr(lowering, 'measure', measure)
  file = tmp_path / 'tiny.py'
  file.write_text("""
from ml_collections import ConfigDict
def get_config(name):
  return ConfigDict({'model': {'name': name, 'depth': 2}})
""")
  command = [
    'compile',
    f'--config={file}:B/16',
    '--config.seed=3',
    '--config.model.depth=1',
    '--image_shape=8,8,3',
    '--num_classes=10',
    '--operations=1',
    f'--json={tmp_path}/row.json',
  ]
  with flagsaver.flagsaver():
    command_line.main(program.parse_flags(command))
  shown = capsys.readouterr().out
  for words in ('True', '1.5', 'block_*/mlp: fusion', '2.00'):
    assert words in shown
  row = json.loads((tmp_path / 'row.json').read_text())
  assert row['config'] == f'{file}:B/16 seed=3 model.depth=1'
  assert row['topology'] == 'local' and row['batch_size'] == 16


@pytest.mark.slow
@needs_libtpu
def test_tpu():
  code = """
import pytest
from vit_jax import config
from vit_jax.tools.compile import lowering

with pytest.raises(ValueError, match='v5e:16x16'):
  lowering.find_devices('v5e:99x99x99')
assert len(lowering.find_devices('v5e:1x1')) == 1
devices = lowering.find_devices('v5e:2x2')

training = config.load('configs/pretrain_paper.py:imagenet,B/16,tiny')
config.override(training, ['model.scan=True'])
row = lowering.measure(training, devices, num_classes=10)
assert row['fits'] and row['mesh'] == 'data 4'
assert row['loops_counted_once'] == 0
assert row['step_ms'] == pytest.approx(row['megacycles'] / 1.5)
assert row['images_per_s'] == pytest.approx(16e3 / row['step_ms'])
assert row['collectives_mb']['all-reduce'] > 0

# Several slices: 'data' spans them, and gradients pass the network.
training.mesh = {'fsdp': -1}
for slices in (2, 4):
  several = lowering.find_devices(f'v5e:2x2*{slices}')
  assert {x.slice_index for x in several} == {*range(slices)}
  _, row = lowering.lower(training, several)
  assert row['mesh'] == f'data {slices}, fsdp 4' and row['slices'] == slices
row = lowering.measure(training, lowering.find_devices('v5e:2x2*2'))
assert 0 < row['network_mb']['all-reduce'] < 4e-6 * row['parameters']
assert row['network_exposed_ms'] <= row['network_ms']
del training.mesh

# The kernel is chosen where the model allows it.
assert row['attention'] == 'pallas' and row['kernel_megacycles'] > 0
_, row = lowering.lower(training, devices)
assert row['attention'] == 'pallas'
name = 'vit_jax.models.posemb.Relative'
config.override(training, [f'model.posemb.target={name}'])
_, row = lowering.lower(training, devices)
assert row['attention'] == 'auto'
"""
  with_libtpu(code)
