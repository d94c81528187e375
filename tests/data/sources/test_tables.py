"""Tables of images as people have them: headers, encodings, labels, groups."""

import numpy as np
import packed
import pytest

from vit_jax.data import images, pipeline
from vit_jax.data.sources.folder import Folder
from vit_jax.data.sources.named import open_source
from vit_jax.data.targets import Grades, Labels, Numbers

STEMS = [f'{i:03d}' for i in range(6)]


@pytest.fixture
def root(tmp_path):
  files = [*(f'pictures/{x}.jpg' for x in STEMS), 'masks/p.PNG']
  return packed.write_folder(tmp_path, dict.fromkeys(files, b'x'))


def opened(root, text, encoding='utf-8', **options):
  (root / 't.csv').write_bytes(text.encode(encoding))
  return open_source(csv=root / 't.csv', **options)


def rows(line, header=''):
  """Return a table of six images; {c} is a class."""
  found = (line.format(i=i, x=x, c='ab'[i % 2]) for i, x in enumerate(STEMS))
  return '\n'.join([header] * bool(header) + [*found])


@pytest.mark.parametrize(
  'text, encoding',
  [
    (rows('pictures/{x}.jpg,{c}'), 'utf-8'),
    (rows('{x},{c}', 'path,label'), 'utf-8-sig'),
    (rows('{x},é{c}', 'id,breed'), 'cp1252'),
    (rows('é{c},{x}.JPG', 'Label,Image'), 'utf-16'),
    (rows('pictures\\{x}.jpg;{c}', 'image_id;label'), 'utf-8'),
    (rows('{x}\t./pictures/{x}\t{c}', '\tany\tkind'), 'utf-8'),
    (rows('{x},{c},"two\nlines; or, 3"', 'filename,target,note'), 'utf-8'),
    (rows('{x};{c};{i},5', 'file;class;size'), 'utf-8'),
    (rows('{x},{c},train', 'scan,kind,split'), 'utf-8'),
    (rows('{x},p,{c}', 'image,mask,labels'), 'utf-8'),
  ],
)
def test_any_header_separator_and_encoding(root, text, encoding):
  source = opened(root, text, encoding)
  names = [source.file_name(i) for i in range(len(source))]
  assert names == [f'pictures/{x}.jpg' for x in STEMS]
  assert [x.strip('é') for x in source.class_names] == ['a', 'b']
  assert source.labels().tolist() == [0, 1] * 3


TABLE = """id,age,MEL,NV,tags,grade,zip,split
000,31.5,1,0,a|b,low,01,Train
001,,0,1,b,high,1,Train
002,40,-1,0,,mid,1,Train
003,50,0,1,a,,1,test
"""


@pytest.mark.parametrize('ending', ['.xlsx', '.json', '.parquet', '.jsonl'])
def test_other_tables_are_refused_in_one_message(root, ending):
  (root / f't{ending}').write_bytes(b'junk')
  remedy = 'damaged' if ending in ('.parquet', '.jsonl') else r'\.csv or'
  with pytest.raises(ValueError, match=rf't{ending}.*{remedy}'):
    open_source(csv=root / f't{ending}')


def test_json_lines(root):
  lines = [f'{{"image": "{x}", "tags": ["{x[-1]}", "a"]}}' for x in STEMS]
  (root / 't.jsonl').write_text('\n'.join(lines))
  source = open_source(csv=root / 't.jsonl', targets=Labels(('tags',)))
  assert source.class_names == [*'012345a'] and source.labels().sum() == 12


@pytest.mark.parametrize(
  ('text', 'found'),
  [
    (rows('{i},{x},{x},{i},{c}', 'id,image,file,target,label'), 'file'),
    (rows('{i},{x}.jpg,{c}', 'id,scan,label'), 'scan'),
    (rows('{i},{x},{c}', 'index,file,label'), 'file'),
    (rows('{x},{c}', 'id,label'), 'id'),
    (rows('{x},3f2a-{i}.jpg,{c}', 'id,image,label'), None),
  ],
)
def test_an_id_is_no_picture_if_a_column_is_named_like_one(root, text, found):
  if found:
    assert opened(root, text).used == {'image': found, 'label': 'label'}
  else:  # a hash is not guessed away
    with pytest.raises(ValueError, match=r"'image' does not.*3f2a-0\.jpg"):
      opened(root, text)


@pytest.mark.parametrize(
  'targets, label_key, labels, names',
  [
    (Numbers(('age',)), None, [[31.5], [40], [50]], ['age']),
    (
      *(Labels(('MEL', 'NV')), None),
      *([[1, 0], [0, 1], [np.nan, 0], [0, 1]], ['MEL', 'NV']),
    ),
    (Labels(), 'tags', [[1, 1], [0, 1], [1, 0]], ['a', 'b']),
    (
      Grades(order=('low', 'mid', 'high')),
      'grade',
      [0, 2, 1],
      ['low', 'mid', 'high'],
    ),
    (None, 'zip', [0, 1, 1, 1], ['01', '1']),
  ],
)
def test_kinds_of_labels(root, capsys, targets, label_key, labels, names):
  source = opened(root, TABLE, targets=targets, label_key=label_key)
  np.testing.assert_array_equal(source.labels(), labels)
  assert source.class_names == (names or targets.order)
  np.testing.assert_array_equal(source[0]['label'], labels[0])
  assert source.num_classes == len(source.class_names)
  missing = 4 - len(labels)
  assert (f'{missing} of 4 rows' in capsys.readouterr().out) == bool(missing)


def test_columns_are_keys_of_the_examples(root):
  source = opened(root, TABLE, label_key='NV', split='train')
  assert source.column('age')[:1] == [31.5] and len(source) == 3
  assert source[0]['zip'] == '01' and source[1]['MEL'] == 0


@pytest.mark.parametrize(
  'text, options, words',
  [
    (TABLE, {}, ['id (4): 000, 001', 'MEL (3): -1, 0', 'label_key=COLUMN']),
    (TABLE, {'label_key': 'nv'}, ["no column 'nv' (label_key)", 'MEL, NV']),
    (TABLE, {'image_key': 'age'}, ['no column has the names of files below']),
    (TABLE, {'targets': Labels(('a', 'NV'))}, ["'a'", 'MEL']),
    (TABLE, {'targets': Numbers(('tags',))}, ["'a|b' in row 1", 'number']),
    (TABLE, {'label_key': 'age'}, ['number=age']),
    (TABLE, {'label_key': 'NV', 'split': 'val'}, ["['Train', 'test']"]),
    (TABLE, {'label_key': 'NV', 'split_key': 'x', 'split': 'a'}, ["'x'"]),
    (rows('{x}.gif,{c}'), {}, ["'path' does not", '(6): 000.gif, 001.gif']),
    (rows('{x},{x}', 'a,b'), {}, ['2 columns have', 'image_key=COLUMN']),
    (rows('{x},', 'id,label'), {}, ['all labels in label are missing']),
    ('id,label\n000,a\n001,b,c\n', {}, ["['001', 'b', 'c']", 'Quote']),
    ('id,label\n000,a\n000.jpg,b\n', {}, ['pictures/000.jpg', 'a and b']),
    ('id,id\n000,a\n', {}, ['different columns']),
    ('', {}, ['t.csv has 0 rows']),
  ],
)
def test_mistakes(root, text, options, words):
  with pytest.raises(ValueError) as error:
    opened(root, text, **options)
  assert all(word in str(error.value) for word in words), error.value


def test_several_files_for_a_cell(root):
  packed.write_folder(root, {'a/000.png': b'', '000.bmp': b''})
  source = opened(root, '000,a\npictures/000,a\na/000.PNG,b\n')
  found = [source.file_name(i) for i in range(3)]
  assert found == ['000.bmp', 'pictures/000.jpg', 'a/000.png']
  packed.write_folder(root, {'a/001.png': b''})
  with pytest.raises(ValueError, match=r'001 could be a/001.png or pictures/'):
    opened(root, '001,a\n')


def test_what_is_left_out_is_counted_and_named(root, capsys):
  text = rows('{x}.jpg,{c},1') + '\n000.jpg,a,1\ngone.jpg,c,2\n'
  source = opened(root, text, label_key='1', split_key='2', split='1')
  out = capsys.readouterr().out
  assert 'left out 1 rows that are repeated' in out
  assert "'1' has no examples of (1): c" in out and 'not there' not in out
  assert len(source) == 6
  source = opened(root, text, label_key='1')
  assert 'files that are not there (1): gone.jpg' in capsys.readouterr().out
  with pytest.raises(images.UnreadableError, match=r'gone\.jpg: .*No such'):
    pipeline.Data(source, 1).first_example()


def test_a_table_next_to_class_folders_is_named(root, capsys):
  opened(root, rows('{x},{c}') + '\np,a\n')
  out = capsys.readouterr().out
  assert 'not the folders (2): masks, pictures' in out
  Folder(root)
  assert 'set --config.data.source.csv=t.csv' in capsys.readouterr().out
  with pytest.raises(ValueError, match='the path of images, or csv'):
    open_source()


def test_groups_stay_together(root):
  text = rows('{x},{i},{c}', 'id,label,patient')
  for key, sizes in ('patient', [3, 3]), (r'(\d)\.jpg', [5, 1]):
    options = {'group_key': key, 'stratified': True}
    parts = [
      opened(root, text, split=x, **options) for x in ('[:83%]', '[83%:]')
    ]
    assert [*map(len, parts)] == sizes
    if key == 'patient':
      assert all(
        len({x['patient'] for x in packed.all_of(y)}) == 1 for y in parts
      )
  for key in '(p)[12]', 'none':
    with pytest.raises(ValueError, match='group_key'):
      opened(root, text, split='[:50%]', group_key=key)
