"""Prepared TFDS data sets: where they are, or the command that makes them."""

import difflib
import os
import re


def directory(name, data_dir):
  """The folder of the prepared data set `name`."""
  import tensorflow_datasets as tfds

  data_dir = None if data_dir is None else os.path.expanduser(str(data_dir))
  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except tfds.core.DatasetNotFoundError:
    raise ValueError(_unknown(name, data_dir)) from None
  except Exception as error:  # unknown versions and configs: several types
    reason = str(error).strip().splitlines()[0]
    raise ValueError(
      f'TFDS cannot open {name!r} (data_dir={data_dir!r}): {reason}'
    ) from error
  if (builder.data_path / 'dataset_info.json').exists():
    return str(builder.data_path)
  parent, others = builder.data_path.parent, []
  if parent.exists():
    others = sorted(
      x.name for x in parent.iterdir() if (x / 'dataset_info.json').exists()
    )
  hint = ''
  if others:
    hint = f' Prepared versions there: {others}; name one as NAME:VERSION.'
  raise ValueError(
    f'the TFDS data set {name!r} is not prepared: nothing in'
    f' {builder.data_path}.{hint} Prepare it with\n'
    f'  {_prepare_command(name, data_dir)}\n'
    'The code of many sets needs TensorFlow for this step (pip install'
    ' tensorflow, in another environment if you like); reading does not.'
    f'{_by_hand(builder, data_dir)}'
  )


def _by_hand(builder, data_dir):
  """What TFDS says of files that it cannot download itself."""
  import tensorflow_datasets as tfds

  text = getattr(builder, 'MANUAL_DOWNLOAD_INSTRUCTIONS', None)
  if not text:
    return ''
  folder = data_dir or os.path.expanduser(tfds.core.constants.DATA_DIR)
  return (
    f'\nFiles to download by hand before, to {folder}/downloads/manual:'
    f' {" ".join(text.split())}'
  )


def _prepare_command(name, data_dir):
  where = '' if data_dir is None else f", data_dir='{data_dir}'"
  return (
    'python -c "import tensorflow_datasets as tfds;'
    f" tfds.builder('{name}'{where}, file_format='array_record')"
    '.download_and_prepare()"'
  )


def _unknown(name, data_dir):
  import tensorflow_datasets as tfds

  known = tfds.list_builders(with_community_datasets=False)
  folder = data_dir or tfds.core.constants.DATA_DIR
  if os.path.isdir(folder):
    known = known + [x for x in os.listdir(folder) if x != 'downloads']
  stem = re.split('[/:]', name)[0]
  home = os.path.join(folder, stem)
  if os.path.isdir(home):
    return (
      f'no TFDS data set {name!r}: {home} holds {sorted(os.listdir(home))}; the'
      ' name is NAME:VERSION or NAME/CONFIG:VERSION.'
    )
  close = difflib.get_close_matches(stem, known, n=3)
  close = f' Did you mean {" or ".join(close)}?' if close else ''
  return (
    f'no TFDS data set {name!r}: neither its code in tensorflow_datasets nor'
    f' a prepared one in {folder}.{close} For a set of your own give the'
    ' data_dir that holds NAME/VERSION/dataset_info.json.'
  )


def records(builder, name, split):
  """Random access to the serialized examples of a split."""
  import tensorflow_datasets as tfds

  splits = {k: v.num_examples for k, v in builder.info.splits.items()}
  try:
    return builder.as_data_source(
      split=split,
      deserialize_method=tfds.core.decode.DeserializeMethod.RAW_BYTES,
    )
  except NotImplementedError:
    path, kind = builder.data_path, builder.info.file_format.value
    raise ValueError(
      f'the TFDS data set {name!r} in {path} is prepared as {kind}, which has'
      ' no random access. Convert it, keeping the old files, with\n'
      f'  python -m vit_jax.tools.to_array_record {path}'
    ) from None
  except Exception as error:  # ValueError, and AssertionError of slices
    reason = str(error).strip().splitlines()[0]
    if 'length' in reason:  # what array_record says of no files
      reason = 'it selects no examples.'
    raise ValueError(
      f'cannot take the split {split!r} of the TFDS data set {name!r}: {reason}'
      f' Its splits and their sizes are {splits}; slices are written as'
      " 'train[:99%]' or 'train[:800]+train[900:]'."
    ) from error
