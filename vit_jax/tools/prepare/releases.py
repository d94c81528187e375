"""Releases of ImageNet, recognised by their lists of classes."""

import re
from collections.abc import Sequence

from vit_jax.data import imagenet

# Numbers of classes. That of winter 2021 is quoted from memory.
RELEASES = {
  'ImageNet-21k of fall 2011': 21_841,
  'ImageNet-21k of winter 2021': 19_167,
}
_WNID = re.compile(r'n\d{8}')


def report(names: Sequence[str] | None) -> str:
  """Return which release the classes are; '' if they are not WordNet ids.

  The lists of ImageNet-21k are not public files of their own, so that a release
  is known by its number of classes. ImageNet-1k is compared name by name.
  """
  if not names or not all(_WNID.fullmatch(name) for name in names):
    return ''
  for release, count in RELEASES.items():
    if len(names) == count:
      return f'the {count:,} classes of {release}'
  known = set(imagenet.wnids())
  missing, new = sorted(known - set(names)), sorted(set(names) - known)
  if not missing and not new:
    return 'the 1,000 classes of ImageNet-1k (ILSVRC 2012)'
  if len(names) < 10_000:
    return (
      f'{len(names):,} WordNet ids, not ImageNet-1k: {_listed(missing)}'
      f' missing, {_listed(new)} new'
    )
  near = [
    f'{abs(len(names) - count):,} {"more" if len(names) > count else "fewer"}'
    f' than {release} ({count:,})'
    for release, count in RELEASES.items()
  ]
  return (
    f'{len(names):,} WordNet ids, no known release of ImageNet-21k:'
    f' {", ".join(near)}; {_listed(missing)} of ImageNet-1k missing'
  )


def _listed(names):
  shown = ', '.join(names[:5])
  more = f' and {len(names) - 5} more' if len(names) > 5 else ''
  return f'{shown}{more}' if names else 'none'
