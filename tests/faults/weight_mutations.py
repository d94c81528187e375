"""Structure-aware mutations of weights: zip, npy, safetensors, JSON, bytes.

A mutator is a function (random.Random, bytes) -> (name, bytes). It knows the
structure of a format, changes one part of it, and leaves the rest valid. The
result is a damaged or a hostile file. 'resealed' in the name means that the
checksum was computed again after the change, so the file is valid.
"""

import copy
import functools
import io
import json
import pickle
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

Mutator = Callable[[random.Random, bytes], tuple[str, bytes]]

# A module in the folder of the worker that writes a file when it is imported.
CANARY = 'canary_of_the_mutations'
CODE = f"__import__('{CANARY}').run()"
_BOMB = 150_000_000  # unpacked size of a bomb in bytes


class Harmful:
  """An object whose pickle imports the canary."""

  def __reduce__(self):
    return __import__, (CANARY,)


PICKLE = pickle.dumps(Harmful(), protocol=2)
_SMALL = [0, 1, 2, 3, 7, 8, 255, 4096]
_LARGE = [2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63]


def _number(rng: random.Random, value: int, limit: int) -> int:
  """Return a random number, often near the value or near a limit."""
  found = rng.choice(
    [
      *(value + 1, value - 1, value * 2, value ^ (1 << rng.randrange(16))),
      *(rng.choice(_SMALL), rng.choice(_LARGE), limit, rng.randrange(limit)),
    ]
  )
  return found % (limit + 1)


# Bytes of any file.


def any_bytes(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Flip, cut, insert, repeat or drop bytes."""
  data = data or b'\0'
  at = rng.randrange(len(data))
  end = min(len(data), at + rng.choice([1, 2, 8, 100, 5000]))
  kind, out = rng.choice(
    [
      ('a bit flipped', _flip(data, at, 1 << rng.randrange(8))),
      ('a byte changed', _flip(data, at, rng.randrange(1, 256))),
      ('truncated', data[:at]),
      ('truncated by a byte', data[:-1]),
      ('bytes appended', data + data[at:end]),
      ('bytes prepended', data[at:end] + data),
      ('bytes removed', data[:at] + data[end:]),
      ('bytes zeroed', data[:at] + bytes(end - at) + data[end:]),
      ('bytes repeated', data[:end] + data[at:]),
      ('halves swapped', data[at:] + data[:at]),
      ('empty', b''),
    ]
  )
  return kind, out


def _flip(data, at, mask):
  return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


# .npz

# {field: (offset, size)} of the records of a zip.
_CENTRAL = {
  **{'signature': (0, 4), 'version made by': (4, 2), 'version needed': (6, 2)},
  **{'flags': (8, 2), 'method': (10, 2), 'time': (12, 4), 'crc': (16, 4)},
  **{'compressed size': (20, 4), 'size': (24, 4), 'name length': (28, 2)},
  **{'extra length': (30, 2), 'comment length': (32, 2), 'disk': (34, 2)},
  **{'attributes': (38, 4), 'offset': (42, 4)},
}
_LOCAL = {
  **{'signature': (0, 4), 'version needed': (4, 2), 'flags': (6, 2)},
  **{'method': (8, 2), 'time': (10, 4), 'crc': (14, 4)},
  **{'compressed size': (18, 4), 'size': (22, 4), 'name length': (26, 2)},
  'extra length': (28, 2),
}
_END = {
  **{'signature': (0, 4), 'disk': (4, 2), 'disk of directory': (6, 2)},
  **{'entries here': (8, 2), 'entries': (10, 2), 'size': (12, 4)},
  **{'offset': (16, 4), 'comment length': (20, 2)},
}


def npz_fields(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Change a field of the directory, of a local header or of the end."""
  where = rng.choice(['directory', 'directory', 'local header', 'end'])
  fields, signature = {
    'directory': (_CENTRAL, b'PK\x01\x02'),
    'local header': (_LOCAL, b'PK\x03\x04'),
    'end': (_END, b'PK\x05\x06'),
  }[where]
  starts = _all(data, signature)
  field = rng.choice(list(fields))
  offset, size = fields[field]
  at = rng.choice(starts) + offset
  other = rng.choice(starts) + offset
  value = int.from_bytes(data[at : at + size], 'little')
  new = _number(rng, value, 256**size - 1)
  if rng.random() < 0.3:  # the value of another member
    new = int.from_bytes(data[other : other + size], 'little')
  changed = data[:at] + new.to_bytes(size, 'little') + data[at + size :]
  return f'{field} in the {where}', changed


def _all(data, signature):
  found, at = [], data.find(signature)
  while at >= 0:
    found.append(at)
    at = data.find(signature, at + 1)
  return found


def npz_zip64(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Give a member, or the whole archive, 64-bit sizes that are wrong."""
  numbers = [rng.choice([*_SMALL, *_LARGE[:-1]]) for _ in range(3)]
  end = data.rindex(b'PK\x05\x06')
  if rng.random() < 0.5:
    return 'zip64 end', _with_zip64_end(data, end, numbers)
  at = rng.choice(_all(data, b'PK\x01\x02'))
  return 'zip64 sizes', _with_zip64_sizes(data, at, end, numbers)


def _with_zip64_end(data, end, numbers):
  """Add 64-bit numbers of entries, size and offset of the directory.

  Args:
    data: archive.
    end: offset of the end record.
    numbers: number of all entries, size and offset.
  """
  # Signature, size of the rest, two versions, two disks; entries on this disk.
  record = struct.pack('<4sQ2H2I', b'PK\x06\x06', 44, 45, 45, 0, 0)
  record += struct.pack('<4Q', 1, *numbers)
  # Signature, disk and offset of the record, number of disks.
  locator = struct.pack('<4sIQI', b'PK\x06\x07', 0, end, 1)
  # In the end record, bits that are all 1 refer to the 64-bit record.
  tail = data[end : end + 8] + b'\xff' * 12 + data[end + 20 :]
  return data[:end] + record + locator + tail


def _with_zip64_sizes(data, at, end, numbers):
  """Add 64-bit sizes and a 64-bit offset to an entry of the directory.

  Args:
    data: archive.
    at: offset of the entry.
    end: offset of the end record.
    numbers: size, compressed size and offset of the member.
  """
  name_length, extra_length = struct.unpack_from('<HH', data, at + 28)
  extra = struct.pack('<HH3Q', 1, 24, *numbers)  # 1: zip64; 24 bytes follow
  header = bytearray(data[at : at + 46])
  # Bits that are all 1 refer to the extra field.
  header[20:28] = b'\xff' * 8  # both sizes
  header[42:46] = b'\xff' * 4  # offset
  header[30:32] = struct.pack('<H', extra_length + len(extra))
  rest = at + 46 + name_length
  name = data[at + 46 : rest]
  directory = data[:at] + header + name + extra + data[rest:end]
  (size,) = struct.unpack_from('<I', data, end + 12)
  size = struct.pack('<I', size + len(extra))
  return directory + data[end : end + 12] + size + data[end + 16 :]


def npz_stream(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Change the compressed bytes of a member."""
  with zipfile.ZipFile(io.BytesIO(data)) as file:
    members = [m for m in file.infolist() if m.compress_size]
  member = rng.choice(members)
  name, extra = struct.unpack_from('<HH', data, member.header_offset + 26)
  start = member.header_offset + 30 + name + extra
  at = start + rng.randrange(member.compress_size)
  return 'stream of a member', _flip(data, at, rng.randrange(1, 256))


def npz_members(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Write the archive again, with other names or members."""
  with zipfile.ZipFile(io.BytesIO(data)) as file:
    members = {m.filename: file.read(m) for m in file.infolist()}
  names = list(members)
  name, other = rng.choice(names), rng.choice(names)
  entries = list(members.items())
  new = rng.choice(
    [
      *('x', '../x.npy', '/etc/x.npy', '.npy', 'x\0.npy', 'a/' * 500 + 'x.npy'),
      *(CODE, 'data.pkl', 'block_99999/x.npy', name.replace('0', '9999')),
      *(name.replace('0', '99'), name[1:] or 'y', name + '.npy', name.upper()),
      *(name.replace('/', '//'), name.replace('Transformer', 'opt/target')),
      *('opt/state/x.npy', 'params/t.npy', 'resnet/stage1/unit900/x.npy'),
    ]
  )
  add = {
    'dropped': None,
    'renamed': (new, members[name]),
    'added': (new, members[name]),
    'twice': (name, members[other]),
    'itself inside': (rng.choice([new, 'self.npy']), data),
    'pickle inside': (rng.choice([new, 'data.pkl', 'x.npy']), PICKLE),
    'swapped': (name, members[other]),
    'bomb added': (rng.choice([new, 'opt/x.npy']), bomb()),
    'bomb': (name, bomb()),
    'bomb in the header': (name, bomb(header=True)),
  }
  kind = rng.choice(list(add))
  if kind not in ('added', 'twice', 'bomb added', 'itself inside'):
    entries = [entry for entry in entries if entry[0] != name]
  if add[kind]:
    entries.insert(rng.randrange(len(entries) + 1), add[kind])
  method = rng.choice(
    [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]
    if 'bomb' not in kind
    else [zipfile.ZIP_DEFLATED]
  )
  return f'member {kind}, resealed', zipped(entries, method)


def zipped(entries: Any, method: int = zipfile.ZIP_DEFLATED) -> bytes:
  """Return a zip of (name, bytes); a name can occur twice."""
  out = io.BytesIO()
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    with zipfile.ZipFile(out, 'w', method) as file:
      for name, content in entries:
        if isinstance(content, Packed):
          _write_packed(file, name, content)
        else:
          file.writestr(name, content)
  return out.getvalue()


class Packed(bytes):
  """Bytes that are already compressed by deflate.

  Attributes:
    size: number of bytes after unpacking.
    crc: CRC-32 of the unpacked bytes.
  """

  size: int
  crc: int


@functools.cache
def bomb(header: bool = False) -> Packed:
  """Return an array of zeros, or one whose header is longer than any model."""
  if header:
    head = b'\x93NUMPY\x02\0' + struct.pack('<I', _BOMB)
    content = head + b' ' * _BOMB
  else:
    content = npy((_BOMB // 4,)) + bytes(_BOMB)
  packer = zlib.compressobj(1, zlib.DEFLATED, -15)
  found = Packed(packer.compress(content) + packer.flush())
  found.size = len(content)
  found.crc = zlib.crc32(content)
  return found


def _write_packed(file, name, content):
  info = zipfile.ZipInfo(name)
  info.compress_type = zipfile.ZIP_DEFLATED
  info.CRC = content.crc
  info.file_size = content.size
  info.compress_size = len(content)
  info.header_offset = file.fp.tell()
  file.fp.write(info.FileHeader() + content)
  # `ZipFile.close` writes the directory there, from this list.
  file.start_dir = file.fp.tell()
  file.filelist.append(info)
  file.NameToInfo[name] = info


def npy(shape: Any, descr: Any = '<f4', order: Any = False) -> bytes:
  """Return the header of an .npy file, with any values."""
  text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}"
  head = text.encode() + b'\n'
  return b'\x93NUMPY\x01\0' + struct.pack('<H', len(head)) + head


_DESCRS = [
  *('|O', '>f4', '<f2', '<f8', '|V2', '|V4', '<U9', '|S4', '<M8[s]', '<c8'),
  *('<i4', '<i8', '|b1', '|u1', '<f16', 'f', '', 'x', 'float32', '<f4,<f4'),
  *([('a', '<f4')], [('a', '|O')], ('<f4', (2,)), [('a', '<f4', (9**9,))], 4),
]


def npz_header(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Change the header of an array, sometimes with a correct checksum."""
  with zipfile.ZipFile(io.BytesIO(data)) as file:
    entries = [[m.filename, file.read(m)] for m in file.infolist()]
    crcs = [m.CRC for m in file.infolist()]
  number = rng.randrange(len(entries))
  content = entries[number][1]
  length = struct.unpack_from('<H', content, 8)[0]
  header, values = content[10 : 10 + length], content[10 + length :]
  found = eval(header)  # of a file that make_originals has written
  shape, descr = found['shape'], found['descr']
  order = found['fortran_order']
  kind = rng.choice(['shape', 'shape', 'descr', 'order', 'text', 'bytes'])
  if kind == 'shape':
    shape = _shape(rng, shape)
  elif kind == 'descr':
    descr = rng.choice(_DESCRS)
  elif kind == 'order':
    order = rng.choice([not order, None, 3, "'x'", '[]'])
  head = npy(shape, descr, order)
  if kind == 'text':
    head = _header_text(rng, head)
  elif kind == 'bytes':
    head = any_bytes(rng, head)[1]
  entries[number][1] = head + values
  out = zipped(entries, rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
  if rng.random() < 0.5:
    return f'{kind} in the header of an array, resealed', out
  offset, size = _CENTRAL['crc']
  at = _all(out, b'PK\x01\x02')[number] + offset
  out = out[:at] + struct.pack('<I', crcs[number]) + out[at + size :]
  return f'{kind} in the header of an array', out


def _shape(rng, shape):
  shape = list(shape)
  at = rng.randrange(len(shape)) if shape else 0
  large = rng.choice([-1, 0, -(2**63), *_LARGE, 2**70, 10**5])
  change = rng.choice(['large', 'swap', 'more', 'less', 'merge', 'odd', 'near'])
  if change == 'large':
    shape[at : at + 1] = [large]
  elif change == 'swap':
    rng.shuffle(shape)
  elif change == 'more':
    shape.insert(at, rng.choice([1, 1, 2, large]))
  elif change == 'less':
    del shape[at:]
  elif change == 'merge' and shape:
    product = 1
    for n in shape:
      product *= n
    shape = [product]
  elif change == 'odd':
    odd = [[1] * 70, ['1'], [1.5], [None], [True], [[2]], [1e300], [(1, 2)]]
    shape = rng.choice(odd)
  elif shape:
    shape[at] += rng.choice([-1, 1])
  return tuple(shape)


def _header_text(rng, head):
  body = rng.choice(
    [
      *(CODE.encode(), b'(' * 900, b'-' * 900 + b'1', b'{}', b'[]'),
      *(b'{' * 90 + b'}' * 90, b"{'shape': 1}", b' ' * 60_000, b'1' * 5000),
      *(head[10:].replace(b'shape', b'Shape'), b'\xff' * 9, b'1'),
      head[10:].replace(b'}', b"'more': " + CODE.encode() + b'}'),
    ]
  )
  version = rng.choice([b'\1\0', b'\1\0', b'\2\0', b'\3\0', b'\xff\xff'])
  length = rng.choice([len(body)] * 3 + [0, 2**16 - 1])
  size = '<I' if version == b'\2\0' else '<H'
  return b'\x93NUMPY' + version + struct.pack(size, length) + body


NPZ: list[Mutator] = [
  *(npz_fields, npz_fields, npz_fields, npz_header, npz_header, npz_header),
  *(npz_members, npz_members, npz_stream, npz_zip64, any_bytes),
]

# JSON

_VALUES: list[Any] = [
  *(None, True, False, 0, 1, -1, 3, 2**31, 2**53, 2**63, 2**70, -(2**70)),
  *(0.5, -0.5, 1e-300, 1e308, float('nan'), float('inf'), '', 'x', '0', CODE),
  *('x' * 10_000, '\0', '\ud800', '../x', [], {}, [[]], [0], [1] * 1000),
  *({'target': 'os.system', 'command': 'true'}, {'target': f'{CANARY}.run'}),
  *({'target': 'vit_jax.models.vit.VisionTransformer'}, {'target': 'this.s'}),
  *({'target': 'vit_jax.data.transforms.Resize', 'size': 2**40},),
  *('float64', 'float16', 'int8', 'bogus', 'posemb', 'tanh', 'exact'),
]


def json_tree(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Change, remove, add, rename or move a value in JSON."""
  tree = json.loads(data)
  places = list(_places(tree))
  if not places:
    return any_bytes(rng, data)
  node, key = rng.choice(places)
  old = node[key]
  kind = rng.choice(['value', 'value', 'number', 'key', 'gone', 'move', 'deep'])
  if kind == 'value':
    node[key] = rng.choice(_VALUES)
  elif kind == 'number':
    numbers = [p for p in places if type(p[0][p[1]]) in (int, float)]
    node, key = rng.choice(numbers or places)
    value = node[key] if numbers else 1
    factor = rng.choice([-1, 0, 1.5, 2, 10, 1000, 10**6, 10**12, 10**400])
    change = [value + 1, value - 1, -value, str(value), [value], float(value)]
    if type(value) is int or factor < 10**13:
      change.append(value * factor)
    node[key] = rng.choice(change)
  elif kind == 'key' and isinstance(node, dict):
    name = rng.choice([key + 'x', key[1:], key.upper(), 'target', '', CODE])
    node[name] = node.pop(key)
  elif kind == 'gone':
    del node[key]
  elif kind == 'move':
    other, place = rng.choice(places)
    # Copies, because one of the values can contain the other.
    node[key], other[place] = copy.deepcopy((other[place], old))
  else:
    for _ in range(rng.choice([1, 45, 60, 500])):
      old = rng.choice([[old], {'target': old}])
    node[key] = old
  return f'{kind} in JSON', json.dumps(tree).encode('utf-8', 'surrogatepass')


def _places(value):
  """Yield (parent dict or list, key) of all values in JSON."""
  if isinstance(value, dict | list):
    for key in value if isinstance(value, dict) else range(len(value)):
      yield value, key
      yield from _places(value[key])


def json_text(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Change the text of JSON."""
  kind, out = rng.choice(
    [
      ('levels', b'[' * 10**5),
      ('levels', b'{"a":' * 10**5),
      ('levels', b'[' * 900 + b']' * 900),
      ('levels', b'{"model":' * 300 + b'1' + b'}' * 300),
      ('digits', data.replace(b'1', b'1' * 5000)),
      ('exponent', data.replace(b'1', b'1e9999')),
      ('a byte order mark', b'\xef\xbb\xbf' + data),
      ('UTF-16', b'\xff\xfe' + data.decode().encode('utf-16-le')),
      ('invalid UTF-8', data.replace(b'a', b'\xe1\x80', 1)),
      ('9 MB of spaces', data + b' ' * 9_000_000),
      ('9 MB of lists', b'[' + b'[],' * 3_000_000 + b'0]'),
      ('keys twice', data.replace(b'{', b'{' + data[1:-1].strip(b'}') + b',')),
      ('two values', data + data),
      ('another value', rng.choice([b'[]', b'1', b'null', b'"x"', b'{}'])),
      ('NaN', data.replace(b'0', b'NaN')),
    ]
  )
  return f'{kind} in JSON', out


JSON: list[Mutator] = [json_tree, json_tree, json_tree, json_text, any_bytes]

# safetensors


def safetensors_header(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Change the JSON header and keep its length correct."""
  length = struct.unpack_from('<Q', data)[0]
  text, values = data[8 : 8 + length], data[8 + length :]
  header = json.loads(text)
  names = [name for name in header if name != '__metadata__']
  name, other = rng.choice(names), rng.choice(names)
  entry = header[name]
  kind = rng.choice(
    ['dtype', 'shape', 'data_offsets', 'name', 'JSON', 'values']
  )
  if kind == 'dtype':
    entry['dtype'] = rng.choice(
      ['F64', 'F16', 'BF16', 'I32', 'U32', 'F8_E4M3', 'BOOL', 'x', '', None, 3]
    )
  elif kind == 'shape':
    entry['shape'] = list(_shape(rng, entry['shape']))
  elif kind == 'data_offsets':
    offsets = entry['data_offsets']
    at = rng.randrange(2)
    entry['data_offsets'] = rng.choice(
      [
        *(offsets[::-1], header[other]['data_offsets'], offsets[:1], [], None),
        *([n + 4 for n in offsets], [0, len(values)], [-4, 0], ['0', 1]),
        [n + (i == at) * 10**12 for i, n in enumerate(offsets)],
        [2**64, 0],
      ]
    )
  elif kind == 'name':
    new = rng.choice([other, CODE, '', 'x' * 10**5, '\0', '__metadata__'])
    header = {(new if k == name else k): v for k, v in header.items()}
  elif kind == 'JSON':
    text = rng.choice([json_tree, json_text])(rng, text)[1]
    head = struct.pack('<Q', len(text)) + text
    return 'JSON of the header', head + values
  else:  # no checksum covers them
    at = rng.randrange(len(values))
    values = _flip(values, at, 1 << rng.randrange(8))
    return 'values (no checksum)', data[: 8 + length] + values
  text = json.dumps(header).encode()
  head = struct.pack('<Q', len(text)) + text
  return f'{kind} in the header', head + values


def safetensors_length(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """Change the length of the header."""
  length = struct.unpack_from('<Q', data)[0]
  new = _number(rng, length, 2**64 - 1)
  if rng.random() < 0.2:  # a valid header with 6 MB of spaces
    spaces = b' ' * 6_000_000
    head = struct.pack('<Q', length + len(spaces)) + data[8 : 8 + length]
    return 'length of the header', head + spaces + data[8 + length :]
  return 'length of the header', struct.pack('<Q', new) + data[8:]


SAFETENSORS: list[Mutator] = [
  *(safetensors_header, safetensors_header, safetensors_header),
  *(safetensors_length, any_bytes),
]
BYTES: list[Mutator] = [any_bytes]


def of_file(name: str) -> list[Mutator]:
  """Return the mutators for a file by its name."""
  if name.endswith('.npz'):
    return NPZ
  if name.endswith('.safetensors'):
    return SAFETENSORS
  is_json = name.endswith('.json') or name in (
    *('_METADATA', '_CHECKPOINT_METADATA', '_sharding', 'metadata'),
    *('.zarray', 'zarr.json', 'process_0'),
  )
  return JSON if is_json else BYTES
