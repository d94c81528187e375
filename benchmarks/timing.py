"""Arguments and timing that the scripts share, without any package."""

import argparse
import time


def parser(doc):
  """Return an ArgumentParser that prints the docstring of a script."""
  return argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )


def step_parser(doc):
  """Return the ArgumentParser of a script that times a model."""
  made = parser(doc)
  made.add_argument('model', help='such as B/16')
  made.add_argument('--mode', choices=('train', 'infer'), default='train')
  made.add_argument('--batch_size', type=int, default=8, help='of all devices')
  made.add_argument('--image_size', type=int, default=224)
  made.add_argument('--dtype', default='bfloat16', help='or float32')
  made.add_argument('--steps', type=int, default=30)
  return made


def seconds(step, count, wait=lambda: None):
  """Return the seconds of `count` calls of `step`, after five others."""
  for calls in (5, count):
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
      step()
    wait()
  return time.perf_counter() - begin


def report(step, count, batch_size, wait=lambda: None):
  """Print the images per second of `count` calls of `step`."""
  print(count * batch_size / seconds(step, count, wait))
