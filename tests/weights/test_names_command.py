"""`python -m vit_jax.names`: the table, its filter, and summaries."""

import re

import pytest

from vit_jax import names
from vit_jax.models import names as models


def lines_of(capsys, *words):
  names.main(words)
  return capsys.readouterr().out.splitlines()


def test_the_table_has_every_model(capsys):
  heading, *rows = lines_of(capsys)
  assert heading.split() == ['name', 'also', '(in', 'timm)']
  assert 'ViT-S/8         vit_small_patch8_224' in rows
  listed = {x for row in rows for x in row.split()}
  for name, others in models.models().items():
    assert {name, *others} <= listed
  assert max(map(len, rows)) <= 80


@pytest.mark.parametrize(
  'text, found',
  [
    ('patch16*384', '4 rows, 5 names of timm'),
    ('PATCH16*384', '4 rows, 5 names of timm'),
    ('bit-r50', '4 rows, 2 names of timm'),
    ('mixer_?16', '3 rows, 3 names of timm'),
    ('ViT-So400m/14', '1 rows, 0 names of timm'),
  ],
)
def test_filters(capsys, text, found):
  """A row has all names of timm if our name matches, else those that do."""
  rows = [row.split() for row in lines_of(capsys, text)[1:]]
  timm = [x for row in rows for x in row if re.fullmatch('[a-z0-9_]+', x)]
  ours = [row[0] for row in rows if row[0] not in timm]
  assert f'{len(ours)} rows, {len(timm)} names of timm' == found


@pytest.mark.parametrize(
  'words, status, named',
  [
    (['vit_bse*'], 1, 'vit_bse*'),
    (['nothing', '--summary'], 1, 'nothing'),
    (['--summary'], 2, '--summary'),
    (['B/16', '--summary', '--image_size=0'], 2, "'0'"),
    (['B/16', '--summary', '--image_size=100'], 1, '100'),
  ],
)
def test_mistakes_are_one_line(capsys, words, status, named):
  with pytest.raises(SystemExit) as stopped:
    names.main(words)
  assert stopped.value.code == status
  out, err = capsys.readouterr()
  assert named in err.splitlines()[-1] and not out


def test_a_summary(capsys):
  lines = lines_of(capsys, 'ViT-Ti/16', '--summary', '--num_classes=10')
  assert lines[0] == 'ViT-Ti/16: VisionTransformer, 224x224 pixels'
  text = '\n'.join(lines)
  for part in ('float32[1,14,14,192]', 'blocks/attn', '5,526,346', '2.507 GFL'):
    assert part in text
  size = lines_of(capsys, 'vit_tiny_patch16_384', '--summary')
  assert '384x384 pixels' in size[0] and '[1,577,192]' in '\n'.join(size)
