"""Sentences of grammars."""

import numpy as np
import pytest

from vit_jax.science.grammars import Grammar


def sentence(i, **options):
  source = Grammar(brackets=4, **options)
  image = source[i]['image']
  assert image.dtype == np.uint8 and image.shape == (8, 8, 1)
  np.testing.assert_array_equal(image, source[i]['image'])
  return image.ravel().tolist()


@pytest.mark.parametrize('kind', ['dyck', 'shuffle'])
def test_brackets_are_closed(kind):
  crossed = 0
  for i in range(50):
    still_open = []
    for token in sentence(i, kind=kind):
      if token < 4:
        still_open.append(token)
      else:
        crossed += still_open[-1] != token - 4
        still_open.reverse()  # the last of equal ones is closed
        still_open.remove(token - 4)
        still_open.reverse()
    assert not still_open
  assert (crossed > 100) == (kind == 'shuffle')


def test_words_are_copied():
  words = [sentence(i, kind='copy') for i in range(20)]
  assert all(x[:32] == x[32:] for x in words)
  assert {token for x in words for token in x} == set(range(8))


def test_a_permuted_sentence_has_the_same_tokens():
  plain = sentence(3)
  other = sentence(3, permuted=True)
  assert plain != other and sorted(plain) == sorted(other)
