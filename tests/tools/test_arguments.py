"""Command-line arguments that tools share."""

import argparse
import json
import types

import pytest

from vit_jax.models.pooling import Mean
from vit_jax.tools import arguments, parsers


def parse(*words, name='--weights'):
  parser = parsers.parser('A tool.', 'tools.x')
  arguments.add_weights(parser, name)
  return parser.parse_args(words)


def test_how_weights_are_read(monkeypatch, capsys):
  read, fitted = {}, {}
  found = types.SimpleNamespace(notes=['  assumed'])
  monkeypatch.setattr(
    arguments.formats, 'read', lambda path, **given: read.update(given) or found
  )
  monkeypatch.setattr(
    arguments.pretrained,
    'fit',
    lambda path, **given: fitted.update(given) or ('fitted', 'a report'),
  )
  assert arguments.read(parse('--weights=a.npz')) == found
  assert capsys.readouterr().err == '  assumed\n' and not found.notes
  wanted = {'step': None, 'ema': 'auto', 'trust': (), 'use_size': None}
  assert read == wanted
  assert not fitted
  args = parse(
    *('b', '--ema=off', '--step=7', '--trust=mine', '--trust=yours'),
    *('--set', 'block.mlp.form=exact', '--set=grid=[7,5]', '--set=posemb=null'),
    '--set=pooling={"target": "vit_jax.models.pooling.Mean"}',
    '--image_size=64x32',
    name='weights',
  )
  assert arguments.read(args, num_classes=0, patch_size=None) == 'fitted'
  wanted = {'step': 7, 'ema': False, 'trust': ('mine', 'yours')}
  wanted |= {'block.mlp.form': 'exact', 'grid': (7, 5), 'posemb': None}
  wanted |= {'use_size': (64, 32)}
  assert read == wanted | {'pooling': Mean()}
  assert fitted == {'num_classes': 0, 'image_size': (64, 32)}
  assert 'a report' in capsys.readouterr().err
  arguments.read(parse('--weights=c', '--ema=on'))
  assert read['ema'] is True


def test_assignments_without_a_field():
  with pytest.raises(ValueError, match='FIELD=VALUE'):
    arguments.read(parse('--weights=x', '--set', 'gelu'))


def test_sizes():
  assert arguments.size('224') == 224
  assert arguments.size('224x192') == (224, 192)
  for text in ('', '4xx', '0', '3x0', 'x'):
    with pytest.raises(argparse.ArgumentTypeError, match='size'):
      arguments.size(text)


def test_counts():
  assert parsers.count('7') == 7
  for text in ('0', '-1', '1.5', 'x'):
    with pytest.raises(argparse.ArgumentTypeError, match=text):
      parsers.count(text)


def test_class_names(file, tmp_path):
  for names, text in (
    (tmp_path / 'names.json', json.dumps(list('abcdef'))),
    (tmp_path / 'names.txt', 'a\nb\nc\nd\ne\nf\n'),
  ):
    names.write_text(text)
    command = f'--weights={file}', f'--class_names={names}'
    assert arguments.read(parse(*command)).class_names == list('abcdef')
  names.write_text('a\n')
  with pytest.raises(ValueError, match='=6, and there are 1 class names'):
    arguments.read(parse(*command))
