"""Rasters: what is read of files, what is refused, and what becomes of it."""

import io
import sys

import cv2
import datasets
import numpy as np
import pydicom
import pytest
import tifffile
from pydicom.dataset import FileDataset, FileMetaDataset

from vit_jax.data import augment, images
from vit_jax.data import transforms as T
from vit_jax.data.description import Description
from vit_jax.data.images import picture
from vit_jax.data.pipeline import Data
from vit_jax.data.rasters import Raster, moments
from vit_jax.data.sources import tables
from vit_jax.data.sources.folder import Folder
from vit_jax.data.sources.hugging_face import HuggingFace
from vit_jax.data.subsets import fingerprint
from vit_jax.models.dense import Standardize
from vit_jax.types import UserError

RNG = np.random.default_rng(0)
WIDE = RNG.integers(0, 65536, (20, 24, 13)).astype(np.uint16)
FLOATS = np.where(WIDE < 9999, np.nan, WIDE).astype(np.float32)
READ_ONLY = np.broadcast_to(np.nan_to_num(FLOATS, nan=-9999), FLOATS.shape)
BANDS = {'photometric': 'minisblack', 'planarconfig': 'contig'}


def tif(array, **options):
  file = io.BytesIO()
  tifffile.imwrite(file, array, **options)
  return file.getvalue()


def npy(array, save=np.save):
  file = io.BytesIO()
  save(file, array)
  return file.getvalue()


def png(array):
  return cv2.imencode('.png', array)[1].tobytes()


def series(*parts, **of_others):
  file = io.BytesIO()
  with tifffile.TiffWriter(file) as writer:
    for i, part in enumerate(parts):
      writer.write(part, **(of_others if i else {}))
  return file.getvalue()


def dicom(array, kind='MONOCHROME2'):
  meta = FileMetaDataset()
  meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
  meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
  meta.MediaStorageSOPInstanceUID = '1.2.3'
  data = FileDataset(None, {}, file_meta=meta, preamble=bytes(128))
  data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, '1.2.3'
  data.Rows, data.Columns = array.shape
  data.SamplesPerPixel, data.PixelRepresentation = 1, 0
  data.BitsAllocated, data.BitsStored, data.HighBit = 16, 12, 11
  data.PhotometricInterpretation = kind
  data.RescaleSlope, data.RescaleIntercept = 2, -1024
  data.PixelData = array.astype(np.uint16).tobytes()
  file = io.BytesIO()
  data.save_as(file, enforce_file_format=True)
  return file.getvalue()


LOW = WIDE[..., 0] % 4096


@pytest.mark.parametrize(
  'data, expected, options',
  [
    (tif(WIDE, **BANDS), WIDE, {}),
    (tif(WIDE, **BANDS, compression='lzw', predictor=True), WIDE, {}),
    (tif(WIDE, **BANDS, tile=(16, 16), bigtiff=True, byteorder='>'), WIDE, {}),
    (tif(WIDE.transpose(2, 0, 1)), WIDE, {}),  # pages
    (tif(WIDE), WIDE, {}),  # 20 pages of 24 x 13
    (tif(WIDE, **BANDS), WIDE[..., [3, 1]], {'bands': (3, 1)}),
    (series(WIDE, WIDE[::2, ::2], subfiletype=1), WIDE, {}),  # a pyramid
    (tif(WIDE[..., :3], photometric='rgb'), WIDE[..., :3], {}),
    (png(WIDE[..., 2::-1]), WIDE[..., :3], {}),
    (png(WIDE[..., 0]), WIDE[..., :1], {}),
    (npy(WIDE), WIDE, {}),
    (npy(WIDE.transpose(2, 0, 1)), WIDE, {}),
    (npy(WIDE[..., 0], np.savez), WIDE[..., :1], {}),
    (npy(FLOATS), FLOATS, {}),
    (npy(np.nan_to_num(FLOATS, nan=-9999)), FLOATS, {'missing': -9999.0}),
    (READ_ONLY, FLOATS, {'missing': -9999.0}),
    (npy(WIDE[:, :13]), WIDE[:, :13], {'axis': 'last'}),
    (WIDE, WIDE, {}),
    (dicom(LOW), 2.0 * LOW[..., None] - 1024, {}),
    (dicom(4095 - LOW, 'MONOCHROME1'), 2.0 * LOW[..., None] - 1024, {}),
  ],
)
def test_values_are_those_of_the_file(data, expected, options):
  channels = 13 if 'bands' in options else expected.shape[2]
  found = Raster(channels, **options)(data)
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
  'data, message',
  [
    (npy(WIDE[:, :13].transpose(1, 0, 2).copy()), 'has 13 twice. Set axis'),
    (tif(WIDE[..., :5]), 'Expected 13 channels'),
    (series(WIDE, WIDE[:9]), 'has 2 images'),
    (tif(WIDE, **BANDS)[:3000], 'failed to read'),
    (dicom(LOW)[:600], 'as a raster'),
    (npy(WIDE + 1j), 'values are complex'),
    (npy(np.full((4, 4, 13), np.nan)), 'all its values are missing'),
    (npy(np.full((4, 4, 13), np.inf)), r'value inf. .*decode\.missing'),
    (npy(np.full((4, 4, 13), 1e30)), r'value 1e\+30'),
    (b'', 'raster'),
  ],
)
def test_files_that_are_refused(data, message):
  with pytest.raises(images.UnreadableError, match=message):
    Raster(13)(data)


def test_arguments_that_are_refused():
  for options in ({'bands': (13,)}, {'shown': (0, 1, 13)}, {'files': ('a',)}):
    with pytest.raises(UserError, match='|'.join(options)):
      Raster(13, **options)
  with pytest.raises(images.UnreadableError, match='max_image_bytes'):
    Raster(13)(tif(WIDE, **BANDS), max_image_bytes=1000)


@pytest.mark.parametrize(
  'transform',
  [
    *(T.InceptionCrop(16), T.InceptionCrop(16, antialias=True)),
    *(T.Resize(12, 'area'), T.Resize((12, 40), 'area')),
    *(T.Resize(40, 'lanczos'), T.ResizeSmall(10, 'bicubic', antialias=True)),
    *(T.SimpleRandomCrop(16), T.FlipLR(1.0), T.KeepAspect(4, 16)),
  ],
  ids=str,
)
def test_transforms_change_channels_as_each_alone(transform):
  image = Raster(13)(WIDE)

  def changed(image):
    found = transform(image, np.random.default_rng(1))
    return found['image'] if isinstance(found, dict) else found

  many = changed(image)
  alone = [np.ascontiguousarray(image[..., i : i + 1]) for i in range(13)]
  expected = np.concatenate([*map(changed, alone)], axis=2)
  assert many.dtype == np.float32 and many.shape[2] == 13
  # Measured: 0.016, in levels of 65,536, by bicubic coefficients.
  np.testing.assert_allclose(many, expected, atol=0.05)


def test_augmentations():
  image, rng = Raster(13)(npy(FLOATS)), np.random.default_rng(0)
  for made in (augment.RandAugment(), augment.ColorJitter()):
    with pytest.raises(UserError, match='ChannelJitter and ChannelDrop'):
      made(image, rng)
  erased = augment.RandomErasing(1.0)(image, rng)
  assert np.isfinite(erased[np.isnan(image)]).any()
  jittered = augment.ChannelJitter(0.5, 0.0)(image, rng)
  factor = (jittered / image).reshape(-1, 13)
  assert np.nanstd(factor, axis=0).max() < 1e-5  # float32
  assert 0.2 < np.ptp(np.nanmean(factor, axis=0)) < 1
  levels = WIDE[..., :3].astype(np.uint8)
  assert augment.ChannelJitter()(levels, rng).dtype == np.uint8
  dropped = np.isnan(augment.ChannelDrop(0.5)(image, rng)).all((0, 1))
  assert 0 < dropped.sum() < 13
  all_but_one = augment.ChannelDrop(1.0)(levels, rng).any((0, 1))
  assert all_but_one.sum() == 1


@pytest.fixture
def folder(tmp_path):
  for i in range(6):
    (tmp_path / 'ab'[i % 2]).mkdir(exist_ok=True)
    for j in (1, 2):
      path = tmp_path / 'ab'[i % 2] / f'cell{i}_w{j}.tif'
      path.write_bytes(tif(np.full((8, 9), 40 * i + 300 * j, np.uint16)))
  return tmp_path


def test_statistics_of_files_of_one_channel_each(folder, capsys):
  decode = Raster(2, files=('_w1', '_w2'))
  source = Folder(folder, decode=decode)
  assert len(source) == 6 and source.file_name(0) == 'a/cell0_w1.tif'
  found = moments(source)
  expected = [(x + 100, np.std(40 * np.arange(6))) for x in (300, 600)]
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert 'uint16 up to 800 (like 10 bits)' in capsys.readouterr().out
  assert any('400 ± 68.3' in x for x in tables.said(source.where))
  made = Standardize(found)(np.float32([[[300, np.nan]]]))
  np.testing.assert_allclose(made[0, 0], [-100 / expected[0][1], 0], rtol=1e-5)
  for path in folder.rglob('*_w2.tif'):
    path.write_bytes(tif(np.zeros((8, 9), np.uint16)))
  with pytest.raises(UserError, match=r'Channels \[1\] .*bands=\(0,\)'):
    moments(source)
  for path in folder.rglob('cell3_*.tif'):
    path.write_bytes(tif(np.ones((8, 9), np.uint8)))
  with pytest.raises(UserError, match=r'different kinds: .*uint8.*cell3_w1'):
    moments(source)


def test_arrays_of_a_data_set(tmp_path):
  kinds = {'image': datasets.Array3D(WIDE.shape, 'uint16')}
  kinds = datasets.Features(kinds | {'label': datasets.Value('int32')})
  rows = {'image': [WIDE, WIDE + np.uint16(1)], 'label': [0, 1]}
  datasets.Dataset.from_dict(rows, kinds).save_to_disk(tmp_path / 'x')
  source = HuggingFace(tmp_path / 'x', decode=Raster(13))
  (batch,) = Data(source, batch_size=2).eval_batches()
  np.testing.assert_array_equal(batch['image'], rows['image'])
  assert len(moments(source)) == 13 and fingerprint(source)
  assert 'size 24x20' in Description.of(source).sizes
  assert picture(source, source[0]['image']).shape == (20, 24, 3)


def test_files_that_nothing_reads(tmp_path, monkeypatch):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / '0.tif').write_bytes(b'II*\0' + bytes(40))
  source = Folder(tmp_path, decode=Raster(13))
  with pytest.raises(UserError, match=r'0\.tif and others: cannot decode 44'):
    moments(source)
  monkeypatch.setitem(sys.modules, 'tifffile', None)  # is not installed
  for read in (moments, lambda source: source.check_files('')):
    with pytest.raises(UserError, match=r"^[^\n]*'\.\[rasters\]'$"):
      read(source)


def test_a_column_for_each_channel(folder):
  rows = [f'{"ab"[i % 2]}/cell{i}_w{{}}.tif' for i in range(6)]
  lines = [f'{x.format(1)},{x.format(2)},{i % 2}' for i, x in enumerate(rows)]
  table = folder / 't.csv'
  table.write_text('\n'.join(['red,nir,label', *lines]))
  fields = {'csv': 't.csv', 'image_key': 'red+nir', 'decode': Raster(2)}
  source = Folder(folder, **fields)
  source.check_files('')
  assert source.used == {'image': 'red+nir', 'label': 'label'}
  image = source.decode(source[3]['image'])
  assert image.shape == (8, 9, 2) and image[0, 0].tolist() == [420, 720]
  before = fingerprint(source)
  table.write_text(table.read_text().replace('cell3_w2', 'cell5_w2'))
  (folder / 'b' / 'cell5_w2.tif').rename(folder / 'b' / 'cell5_w2.tiff')
  with pytest.raises(UserError, match=r"'nir' .* a file in each row"):
    Folder(folder, **fields)
  (folder / 'b' / 'cell5_w2.tiff').rename(folder / 'b' / 'cell5_w2.tif')
  assert fingerprint(Folder(folder, **fields)) != before
  with pytest.raises(UserError, match='channels=N'):
    Folder(folder, **fields | {'decode': None})


def test_pictures():
  shown = Raster(13, shown=(4, 2, 0)).show(Raster(13)(WIDE))
  assert shown.shape == (20, 24, 3) and shown.dtype == np.uint8
  order = np.argsort(WIDE[..., 4].ravel())
  assert (np.diff(shown[..., 0].ravel()[order].astype(int)) >= 0).all()


def test_what_pictures_of_8_bits_lose():
  def lost(data):
    return ' '.join(images.Encoded(data).lost)

  levels = (WIDE >> 8).astype(np.uint8)
  assert 'of 16 bits' in lost(png(WIDE[..., 0]))
  assert not lost(png(levels[..., 0]))
  assert 'of 16 bits' in lost(tif(WIDE[..., :3], photometric='rgb'))
  assert 'of 13 pages' in lost(tif(levels.transpose(2, 0, 1)))
  rgba = levels[..., :4].copy()
  assert 'on white' in lost(png(rgba))
  assert '1 more' in lost(tif(rgba, photometric='rgb', extrasamples=[0]))
  white = {'photometric': 'miniswhite'}
  both = [images.decode(tif(x, **white)) for x in (WIDE[..., 0], rgba[..., 0])]
  np.testing.assert_array_equal(*both)
