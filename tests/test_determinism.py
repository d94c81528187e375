"""Results that are bit-identical on a CPU, as docs/faults.md says."""

import numpy as np
import pytest
from faults.runs import Run, difference, records, steps


@pytest.mark.slow
def test_what_is_bit_identical(tmp_path):
  def start(name, *flags, devices=1):
    more = ['--config.total_steps=10', '--config.log_every_steps=1', *flags]
    env = {'JAX_NUM_CPU_DEVICES': str(devices)}
    run = Run(tmp_path, tmp_path / name, *more, env=env)
    assert run.finish() == 0, run.output
    return run.workdir

  once = start('once')
  assert steps(once) and len(records(once)) >= 10
  # The same command changes no bit, nor do workers.
  assert not difference(once, start('again', '--config.data.num_workers=2'))
  # Other devices add float32 numbers in another order.
  other = start('devices', devices=2)
  assert difference(once, other)
  losses = [
    np.array([r['train/loss'] for r in records(x) if 'train/loss' in r])
    for x in (once, other)
  ]
  np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)  # measured: 2.4e-7
