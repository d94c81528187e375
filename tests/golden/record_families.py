"""Record what timm and transformers compute, one file per case.

families/CASE.npz holds no weights but outputs; weights are made of a seed
(seeded.py), of the names and shapes that are stored. A new family is a row of
CASES. To record it, without touching others, in a virtual environment that has
vit_jax, and torch, timm and transformers as record_hf.py says:

  python tests/golden/record_families.py CASE ...
"""

import functools
import json
import pathlib
import re
import sys
import tempfile

import numpy as np
import safetensors.numpy
import seeded

FOLDER = pathlib.Path(__file__).parent / 'families'
CLASSES = seeded.TIMM['num_classes']
OTHER = (20, 14)


def fill(model, seed):
  """Give a model seeded parameters; return (shapes of these, buffers)."""
  params, state = dict(model.named_parameters()), model.state_dict()
  seeded.fill(params, functools.partial(seeded.weights, seed=seed))
  shapes = {k: list(x.shape) for k, x in params.items()}
  return shapes, {k: x.numpy() for k, x in state.items() if k not in params}


def run(forward, image):
  """Return the outputs of a model in float64, as float32."""
  found = seeded.compute(forward, seeded.images(image))
  return {k: np.float32(x) for k, x in found.items()}


def timm_outputs(model):
  """Return a function of images: tokens after the last norm, and logits.

  Without a head there are pooled features instead of logits.
  """
  model = model.double().eval()

  def forward(inputs):
    tokens = model.forward_features(inputs)
    found = {'tokens': tokens.flatten(1, -2)}  # perhaps a grid of patches
    if hasattr(model, 'head'):  # not encoders of VLMs
      found['logits'] = model.forward_head(tokens)
    return found

  return forward


def timm_case(architecture, *, other=None, back='same', **args):
  """Return a case of timm.create_model.

  Args:
    architecture, **args: its arguments, in addition to a tiny width.
    other: another image size, to which positions are resized.
    back: 'same' if our writer gives the same arrays, 'equal' if other arrays
      are read as the same parameters, '' if there is no writer.
  """

  def make(seed):
    timm, hub = seeded.import_torch('timm', 'timm.models._hub')
    import safetensors.torch

    used = seeded.TIMM | args
    model = timm.create_model(architecture, **used)
    shapes, buffers = fill(model, seed)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      hub.save_config_for_hf(model, path / 'config.json')
      config = json.loads((path / 'config.json').read_text())
      channels = config['pretrained_cfg']['input_size'][0]
      image = (*used['img_size'], channels)
      state = model.state_dict()
      safetensors.torch.save_file(state, path / 'model.safetensors')
      found = run(timm_outputs(model), image)
      if other:
        forward = timm_outputs(load('timm', path, img_size=other))
        found['other'] = run(forward, (*other, channels))['tokens']
    about = {'format': 'timm', 'config': config, 'image': image}
    return about | {'shapes': shapes, 'other': other, 'back': back}, (
      found | {f'buffer/{k}': x for k, x in buffers.items()}
    )

  return make


def original_case(architecture, to_original, format='original', **args):
  """Return a case of a file of the authors, which timm converts.

  Args:
    architecture, **args: see timm_case.
    to_original: {timm's name: shape} -> {name in the file: shape}.
    format: whose reader knows such files.
  """

  def make(seed):
    (timm,) = seeded.import_torch('timm')
    import torch

    used = seeded.TIMM | {'num_classes': 0} | args
    image = used['img_size']
    model = timm.create_model(architecture, **used)
    names = {k: list(x.shape) for k, x in model.state_dict().items()}
    shapes = to_original(names)
    arrays = seeded.weights(shapes, seed).items()
    arrays = {k: torch.tensor(x) for k, x in arrays}
    module, name = sys.modules[type(model).__module__], 'checkpoint_filter_fn'
    convert = getattr(module, name, None) or getattr(module, f'{name}_encoder')
    model.load_state_dict(convert(arrays, model))
    about = {'format': format, 'config': None, 'image': (*image, 3)}
    about['options'] = {'num_heads': 3, 'image_size': image}
    return about | {'shapes': shapes, 'other': None, 'back': ''}, (
      run(timm_outputs(model), (*image, 3))
    )

  return make


def vit5_case(seed):
  """Return the outputs of ViT-5's class, of models_vit5.py in its repository.

  The path of Python has this file and rope.py, which needs einops.
  """
  seeded.import_torch('timm')
  import models_vit5
  import torch

  torch.Tensor.cuda = lambda x: x  # rope.py knows no other device
  small = {k: x for k, x in seeded.TIMM.items() if not k.endswith('_size')}
  image = 12, 12, 3
  model = models_vit5.vit_models(
    img_size=image[0],
    patch_size=4,
    norm_layer=models_vit5.RMSNorm,
    rope=True,
    num_registers=4,
    reg_theta=100,
    qk_norm=True,
    flash=False,
    **small,
  )
  shapes, buffers = fill(model, seed)
  model = model.double().eval()
  about = {'format': 'original', 'config': None, 'image': image}
  about['options'] = {'num_heads': 3, 'image_size': image[:2]}
  about |= {'shapes': shapes, 'other': None, 'back': ''}
  found = run(lambda x: {'logits': model(x)}, image)
  return about, found | {f'buffer/{k}': x for k, x in buffers.items()}


def qwen_case(seed):
  """Return the outputs of transformers' Qwen3-VL, whose reader is timm's."""
  about, found = hf_case(
    'Qwen3VLVisionModel',
    **{'depth': 2, 'num_heads': 3, 'out_hidden_size': 20, 'patch_size': 4},
    **{'num_position_embeddings': 16, 'deepstack_visual_indexes': [0]},
    **{'image_size': 16, 'other': (24, 16)},
  )(seed)
  return about | {'format': 'timm', 'back': ''}, found


def in_blocks(images, patch):
  """Return rows of patches, 2 x 2 neighbours together, and their grids."""
  import torch

  x = images[:, :, None].expand(-1, -1, 2, -1, -1)  # two frames
  shape = images.shape[2] // patch // 2, 2, patch
  x = x.reshape(*x.shape[:3], *shape, images.shape[3] // patch // 2, 2, patch)
  x = x.permute(0, 3, 6, 4, 7, 1, 2, 5, 8)
  grid = [1, 2 * shape[0], 2 * x.shape[2]]
  return x.reshape(-1, x[0, 0, 0, 0, 0].numel()), torch.tensor([grid] * len(x))


def renamed(*swaps, prefix='', **more):
  """Return to_original: patterns are replaced in names, in order.

  `more` are shapes of arrays that timm leaves out, or keeps in another shape.
  """

  def to_original(shapes):
    out = {}
    for name, shape in shapes.items():
      for pattern, new in swaps:
        name = re.sub(pattern, new, name)
      out[prefix + name] = shape
    out |= {k.replace('__', '.'): x for k, x in more.items()}
    return {k: x for k, x in out.items() if x is not None}

  return to_original


_DINO = {'mask_token': [1, 24]}
_SWIGLU = (r'mlp\.fc1\b', 'mlp.w12'), (r'mlp\.fc2', 'mlp.w3')
# The position of the class token is not yet added to it.
dinov2_original = renamed(
  ('reg_token', 'register_tokens'), pos_embed=[1, 13, 24], **_DINO
)
dinov3_original = renamed(
  ('reg_token', 'storage_tokens'),
  (r'gamma_(\d)', r'ls\1.gamma'),
  (r'mlp\.fc1_g', 'mlp.w1'),
  (r'mlp\.fc1_x', 'mlp.w2'),
  (r'(blocks.*mlp)\.fc2', r'\1.w3'),
  ('attn.q_bias', 'attn.qkv.bias'),
  ('attn.v_bias', 'attn.qkv.bias_mask'),
  rope_embed__periods=[2],
  **{f'blocks__{i}__attn__qkv__bias': [72] for i in range(2)},
  **{f'blocks__{i}__attn__qkv__bias_mask': [72] for i in range(2)},
  **_DINO,
)
_DEEPSEEK = ('attn.qkv', 'attn.wqkv'), ('attn.proj', 'attn.wo')
_DEEPSEEK += ((r'(blocks.*)fc(\d)', r'\1w\2'),)
_RESBLOCKS = (
  ('patch_embed.proj', 'conv1'),
  ('norm_pre', 'ln_pre'),
  (r'^norm', 'ln_post'),
  (r'(blocks.*)norm(\d)', r'\1ln_\2'),
  (r'attn\.qkv\.', 'attn.in_proj_'),
  (r'attn\.proj', 'attn.out_proj'),
  (r'mlp\.fc1', 'mlp.c_fc'),
  (r'mlp\.fc2', 'mlp.c_proj'),
  ('^blocks', 'transformer.resblocks'),
  ('^cls_token', 'class_embedding'),
  ('^pos_embed', 'positional_embedding'),
  (r'^head\.weight', 'proj'),
)
_CLIP = {
  'visual__class_embedding': [24],
  'visual__positional_embedding': [13, 24],
  'visual__proj': [24, CLASSES],
  'visual__head__bias': None,
  'transformer__resblocks__0__ln_1__weight': [16],  # of the text tower
}
clip_original = renamed(*_RESBLOCKS, prefix='visual.', **_CLIP)


def unfold(images, patch):
  """Return arguments of SigLIP 2: rows of patches, mask and grid."""
  import torch

  rows = images.unfold(2, patch, patch).unfold(3, patch, patch)
  rows = rows.permute(0, 2, 3, 4, 5, 1)  # [B, gh, gw, patch, patch, C]
  grid = torch.tensor(rows.shape[1:3]).repeat(len(rows), 1)
  mask = torch.ones(len(rows), rows.shape[1] * rows.shape[2])
  rows = rows.flatten(3).flatten(1, 2)
  return rows, {'pixel_attention_mask': mask, 'spatial_shapes': grid}


def hf_outputs(model):
  """Return a function of images: tokens after the last norm, and logits.

  Of a model without a head the pooled features, if it has them.
  """
  model = model.double().eval()

  call = getattr(model, 'get_image_features', model)  # without the text
  tower = getattr(model, 'vision_model', model)
  is_clip = hasattr(tower, 'pre_layrnorm')  # tokens come before the last norm

  def forward(inputs, **options):
    if model.config.model_type == 'siglip2_vision_model':
      inputs, options = unfold(inputs, model.config.patch_size)
    elif model.config.model_type == 'qwen3_vl_vision':
      inputs, grids = in_blocks(inputs, model.config.patch_size)
      tokens = model(inputs, grids).last_hidden_state
      _, h, w = grids[0]
      tokens = tokens.reshape(len(grids), h // 2, w // 2, 2, 2, -1)
      return {'tokens': tokens.transpose(2, 3).flatten(1, 4)}
    elif model.config.model_type == 'radio':
      model.make_preprocessor_external()
      options = {}
    elif model.config.model_type == 'vit_mae':
      count = inputs.shape[2] * inputs.shape[3] // model.config.patch_size**2
      noise = np.arange(count)[None].repeat(len(inputs), 0)
      options['noise'] = inputs.new_tensor(noise)  # keeps the order
    out = call(inputs, **options)
    if 'logits' in out:
      return {'logits': out.logits}
    tokens = out.last_hidden_state
    found = {'tokens': tower.post_layernorm(tokens) if is_clip else tokens}
    pooled = out.get('image_embeds', out.get('pooler_output'))
    return found if pooled is None else found | {'logits': pooled}

  return forward


def hf_case(kind, *, other=None, back='same', **fields):
  """Return a case of a model of transformers.

  Args:
    kind: name of its class; that of its config begins alike.
    **fields: of the config, in addition to a tiny width.
    other, back: see timm_case. The model has interpolate_pos_encoding.
  """

  def make(seed):
    (transformers,) = seeded.import_torch('transformers')
    small = seeded.HF | fields
    config = re.sub('(Model|For).*', 'Config', kind)
    if config in TWO_TOWERS:
      small = {'vision_config': small, 'text_config': TEXT, **fields}
    model = getattr(transformers, kind)(getattr(transformers, config)(**small))
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      model.save_pretrained(path)  # names on disk are not those in memory
      names = safetensors.numpy.load_file(path / 'model.safetensors')
      kept = {k: x for k, x in names.items() if re.search(BUFFERS, k)}
      shapes = {k: list(x.shape) for k, x in names.items() if k not in kept}
      arrays, file = seeded.weights(shapes, seed), path / 'model.safetensors'
      safetensors.numpy.save_file(arrays | kept, file, {'format': 'pt'})
      model = load('hf', path)
      about = json.loads((path / 'config.json').read_text())
    vision = about.get('vision_config', about)
    size, channels = vision['image_size'], vision.get('num_channels', 3)
    size = [size, size] if isinstance(size, int) else size
    forward, image = hf_outputs(model), [*size, channels]
    found = run(forward, image)
    if other:
      found['other'] = run(
        lambda x: forward(x, interpolate_pos_encoding=True), (*other, channels)
      )['tokens']
    about = {'format': 'hf', 'config': about, 'image': image}
    found |= {f'buffer/{k}': x for k, x in kept.items()}
    return about | {'shapes': shapes, 'other': other, 'back': back}, found

  return make


def load(format, folder, **args):
  """Return the model that a library loads from a folder."""
  if format == 'timm':
    (timm,) = seeded.import_torch('timm')
    return timm.create_model(f'local-dir:{folder}', pretrained=True, **args)
  (transformers,) = seeded.import_torch('transformers')
  config = json.loads((pathlib.Path(folder) / 'config.json').read_text())
  model, loading = getattr(
    transformers, config['architectures'][0]
  ).from_pretrained(folder, output_loading_info=True)
  wrong = {k: v for k, v in loading.items() if v}
  assert not wrong, wrong
  return model


TEXT = {'hidden_size': 24, 'intermediate_size': 24, 'num_hidden_layers': 1}
TEXT |= {'num_attention_heads': 3, 'vocab_size': 9}
TEXT |= {'bos_token_id': 1, 'eos_token_id': 2, 'projection_dim': 20}
TWO_TOWERS = 'SiglipConfig', 'CLIPConfig', 'MetaClip2Config'
ONE_SIDE = {'image_size': 12, 'patch_size': 4}
RESIZED = ONE_SIDE | {'other': (20, 8)}
BUFFERS = 'input_conditioner|summary_idxs'
SQUARE = {'image_size': [12, 6]}  # a grid of 3 by 3
BARE = {'num_classes': 0, 'other': OTHER}
RADIO = {'img_size': (16, 8), 'other': (28, 14)}
BIASED = {'back': '', 'use_relative_position_bias': True}
TABLE = {'pos_embed_grid_size': 3, 'other': OTHER}
PLAIN = 'vit_base_patch16_224'
CASES = {  # name: function of the seed -> (about, outputs)
  'timm_token': timm_case(PLAIN, other=OTHER),  # DINO, MAE
  'timm_mean_with_class_token': timm_case(
    PLAIN, global_pool='avg', fc_norm=False
  ),
  'timm_fc_norm': timm_case(PLAIN, global_pool='avg', class_token=False),
  'timm_post_norm': timm_case('vit_base_patch16_rpn_224', other=OTHER),
  'timm_registers': timm_case(PLAIN, reg_tokens=2, back='equal'),
  'timm_deit': timm_case('deit_tiny_distilled_patch16_224'),
  'timm_deit3': timm_case('deit3_small_patch16_224', other=OTHER),
  'timm_siglip': timm_case('vit_so400m_patch16_siglip_256', other=OTHER),
  'timm_naflex': timm_case(
    'naflexvit_base_patch16_siglip',
    **{'img_size': (12, 12), 'patch_size': 4, 'pos_embed_grid_size': (3, 3)},
  ),
  'timm_dinov2_reg': timm_case('vit_small_patch14_reg4_dinov2', **BARE),
  'timm_dinov2': timm_case('vit_small_patch14_dinov2', back='equal', **BARE),
  'timm_dinov2_giant': timm_case('vit_giant_patch14_reg4_dinov2', **BARE),
  'timm_tipsv2': timm_case('vit_base_patch14_reg1_tipsv2', other=OTHER),
  'timm_clip': timm_case('vit_base_patch16_clip_224', other=OTHER),
  'timm_clip_quick': timm_case(
    'vit_large_patch14_clip_quickgelu_336', other=OTHER
  ),
  'timm_ijepa': timm_case('vit_huge_patch14_gap_224', other=OTHER),
  'timm_siglip_gap': timm_case('vit_so400m_patch14_siglip_gap_378'),
  'timm_aimv2': timm_case('aimv2_large_patch14_224', other=OTHER),
  'timm_beit3': timm_case('beit3_base_patch16_224', other=OTHER),
  'timm_intern': timm_case('vit_intern300m_patch14_448', **BARE),
  'timm_radio': timm_case('vit_large_patch16_radio_v3', **RADIO),
  'timm_radio_corners': timm_case('vit_base_patch16_radio_v3', **RADIO),
  'timm_flexivit': timm_case('flexivit_small', other=OTHER),
  'timm_so150m': timm_case('vit_so150m2_patch16_reg1_gap_256', back='equal'),
  'timm_rms': timm_case('test_vit4', back='equal'),
  'original_dinov2_reg': original_case(
    'vit_small_patch14_reg4_dinov2', dinov2_original
  ),
  'original_dinov2_swiglu': original_case(
    'vit_giant_patch14_dinov2', renamed(*_SWIGLU, **_DINO), mlp_ratio=2.0
  ),
  'original_dinov3': original_case(
    'vit_small_plus_patch16_dinov3_qkvb', dinov3_original, global_pool='token'
  ),
  'original_clip': original_case(
    'vit_base_patch16_clip_quickgelu_224', clip_original, num_classes=CLASSES
  ),
  'original_vit5': vit5_case,
  'timm_deepseek': timm_case('deepseek_vit_412m', other=OTHER),
  'timm_qwen3': timm_case('qwen3_vit_88m', img_size=(12, 6), **TABLE),
  'timm_qwen3_enc': timm_case(
    'qwen3_vit_306m_enc', img_size=(12, 6), out_features=5, back='', **TABLE
  ),
  'timm_qwen3_shard': qwen_case,
  'timm_deepseek_shard': original_case(
    'deepseek_vit_412m_enc',
    renamed(*_DEEPSEEK, patch_embed__proj__weight=[24, 48]),
    format='timm',
    **{'patch_size': 4, 'out_features': 5, 'global_pool': ''},
  ),
  'timm_dinov3': timm_case('vit_small_patch16_dinov3_qkvb', **BARE),
  'timm_dinov3_swiglu': timm_case('vit_huge_plus_patch16_dinov3'),
  'timm_lingbot': timm_case('vit_small_patch16_lingbot'),
  'timm_eva02_tiny': timm_case('eva02_tiny_patch14_224', other=OTHER),
  'timm_eva02_base': timm_case('eva02_base_patch14_224', other=OTHER),
  'timm_eva02_clip': timm_case('eva02_base_patch16_clip_224'),
  'timm_eva02_enormous': timm_case('eva02_enormous_patch14_clip_224'),
  'timm_eva_giant': timm_case('eva_giant_patch14_224', other=OTHER),
  'timm_rope_reg': timm_case('vit_medium_patch16_rope_reg1_gap_256'),
  'timm_rope_axial': timm_case('vit_small_patch16_rope_224', other=OTHER),
  'timm_rope_mixed': timm_case('vit_small_patch16_rope_mixed_224', other=OTHER),
  'timm_rope_ape': timm_case('vit_small_patch16_rope_ape_224', other=OTHER),
  'timm_rope_mixed_ape': timm_case('vit_small_patch16_rope_mixed_ape_224'),
  'timm_pe_core': timm_case('vit_pe_core_base_patch16_224', other=OTHER),
  'timm_pe_core_g': timm_case('vit_pe_core_gigantic_patch14_448'),
  'timm_pe_lang': timm_case('vit_pe_lang_large_patch14_448'),
  'timm_pe_spatial': timm_case('vit_pe_spatial_small_patch16_512'),
  'timm_beit': timm_case(  # timm resizes square grids
    'beit_base_patch16_224', img_size=(20, 10), other=(24, 14)
  ),
  'timm_beitv2': timm_case('beitv2_base_patch16_224', num_classes=0),
  'hf_vit': hf_case('ViTForImageClassification', num_labels=5),
  'hf_deit': hf_case(
    'DeiTForImageClassification', back='', num_labels=5, **ONE_SIDE
  ),
  'hf_deit_teacher': hf_case(
    'DeiTForImageClassificationWithTeacher', back='', num_labels=5, **ONE_SIDE
  ),
  'hf_deit_features': hf_case(
    'DeiTModel', back='', pooler_output_size=20, **RESIZED
  ),
  'hf_msn': hf_case(
    'ViTMSNForImageClassification', back='equal', num_labels=5, **ONE_SIDE
  ),
  'hf_msn_features': hf_case('ViTMSNModel', back='', **RESIZED),
  'hf_dinov2': hf_case('Dinov2Model', other=(20, 8), back='equal', **SQUARE),
  'hf_dinov2_swiglu': hf_case(
    'Dinov2Model', back='equal', use_swiglu_ffn=True, **SQUARE
  ),
  'hf_dinov2_reg': hf_case(
    'Dinov2WithRegistersModel', other=(4, 16), back='equal', **SQUARE
  ),
  'hf_dinov3': hf_case(
    'DINOv3ViTModel', other=OTHER, back='equal', num_register_tokens=2
  ),
  'hf_dinov3_gated': hf_case(
    'DINOv3ViTModel',
    back='equal',
    use_gated_mlp=True,
    hidden_act='silu',
    num_register_tokens=1,
    key_bias=True,
    proj_bias=False,
  ),
  'hf_siglip': hf_case('SiglipVisionModel', back='equal', **RESIZED),
  'hf_siglip_text': hf_case('SiglipModel', back='equal', **ONE_SIDE),
  'hf_siglip2_naflex': hf_case(
    'Siglip2VisionModel', other=(8, 20), back='equal', num_patches=9, **ONE_SIDE
  ),
  'hf_mae': hf_case('ViTMAEModel', back='', mask_ratio=0.0, **RESIZED),
  'hf_ijepa': hf_case('IJepaForImageClassification', num_labels=5, **SQUARE),
  'hf_ijepa_features': hf_case('IJepaModel', **RESIZED),
  'hf_beit': hf_case(
    'BeitForImageClassification', num_labels=5, **BIASED, **ONE_SIDE
  ),
  'hf_beit_features': hf_case(
    'BeitModel', use_mean_pooling=False, **BIASED, **RESIZED
  ),
  'hf_beit_absolute': hf_case(
    'BeitModel',
    back='',
    use_absolute_position_embeddings=True,
    use_mask_token=True,
    **RESIZED,
  ),
  'hf_data2vec': hf_case(
    'Data2VecVisionModel',
    back='',
    use_shared_relative_position_bias=True,
    **RESIZED,
  ),
  'hf_clip': hf_case(
    'CLIPVisionModelWithProjection', projection_dim=20, **RESIZED
  ),
  'hf_clip_text': hf_case(
    'CLIPModel', back='equal', projection_dim=20, **ONE_SIDE
  ),
  'hf_clip_features': hf_case(
    'CLIPVisionModel', back='equal', hidden_act='gelu', **ONE_SIDE
  ),
  'hf_metaclip2': hf_case(
    'MetaClip2VisionModelWithProjection',
    other=(4, 16),
    projection_dim=20,
    **ONE_SIDE,
  ),
  'hf_aimv2': hf_case('Aimv2VisionModel', back='', use_head=False, **ONE_SIDE),
  'hf_tips': hf_case('Tipsv2VisionModel', back='equal', **RESIZED),
  'hf_tips_swiglu': hf_case(
    'Tipsv2VisionModel', back='equal', use_swiglu_ffn=True, **ONE_SIDE
  ),
  'hf_radio': hf_case(
    'RadioModel', max_img_size=12, other=(28, 12), **ONE_SIDE
  ),
  'hf_pixio': hf_case('PixioModel', n_cls_tokens=3, **RESIZED),
  'hf_mlcd': hf_case('MLCDVisionModel', other=(8, 20), **ONE_SIDE),
  'hf_vit_features': hf_case('ViTModel', pooler_output_size=20, **RESIZED),
}


def main(names):
  FOLDER.mkdir(exist_ok=True)
  for name in names or CASES:
    about, arrays = CASES[name](seed=0)
    about = json.dumps(about)
    np.savez_compressed(FOLDER / f'{name}.npz', about=about, **arrays)


if __name__ == '__main__':
  main(sys.argv[1:])
