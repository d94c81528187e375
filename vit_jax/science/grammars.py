"""Sentences of formal grammars, as images whose pixels are tokens."""

import dataclasses
from typing import Any, Literal

import numpy as np

from vit_jax.types import Count, Seed


@dataclasses.dataclass(kw_only=True, eq=False)
class Grammar:
  """Sentences of side^2 tokens, uint8 [side, side, 1], without labels.

  As in "Procedural pretraining" (arXiv 2511.13945; details are our choice).
  Sentence i depends on (seed, i) only.

  Attributes:
    kind: 'dyck', nested brackets of `brackets` kinds, opened and closed with
      equal probability; 'shuffle', in which any open bracket may be closed;
      'copy', a random word twice.
    side: square root of the number of tokens; even.
    brackets: k. Token i opens, token k + i closes. 'copy' has all 2 k tokens.
    permuted: whether tokens of a sentence are in random order (a control).
  """

  kind: Literal['dyck', 'shuffle', 'copy'] = 'dyck'
  side: Count = 8
  brackets: Count = 64
  num_examples: Count = 2**20
  seed: Seed = 0
  permuted: bool = False

  num_classes = None
  channels = 1

  def __len__(self) -> int:
    return self.num_examples

  def __getitem__(self, index: int) -> dict[str, Any]:
    rng = np.random.Generator(np.random.PCG64((self.seed, index)))
    length = self.side**2
    if self.kind == 'copy':
      word = rng.integers(2 * self.brackets, size=length // 2)
      tokens = np.concatenate([word, word])
    else:
      tokens = np.array(self._brackets(rng, length))
    tokens = rng.permutation(tokens) if self.permuted else tokens
    image = tokens.astype(np.uint8).reshape(self.side, self.side, 1)
    return {'image': image, 'label': 0}

  def _brackets(self, rng, length):
    kinds = rng.integers(self.brackets, size=length).tolist()
    draws = rng.random((length, 2)).tolist()
    tokens, still_open = [], []
    for i, (kind, (draw, choice)) in enumerate(zip(kinds, draws)):
      has_room = len(still_open) < length - i - 1  # to close one more
      if (draw < 0.5 and has_room) or not still_open:
        still_open.append(kind)
        tokens.append(kind)
      else:
        at = -1 if self.kind == 'dyck' else int(choice * len(still_open))
        tokens.append(self.brackets + still_open.pop(at))
    return tokens
