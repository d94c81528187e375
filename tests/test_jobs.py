"""The files in docs/jobs with stand-ins for gcloud, srun and the hosts."""

import os
import subprocess
import sys
import time

import pytest
import yaml
from processes import PLAIN, ROOT, difference, free_port, steps

from vit_jax import config

STAND_INS = ROOT / 'tests/stand_ins'
QUEUE = {'TYPE': 'v6e-16', 'VERSION': 'v2', 'SLICES': '2', 'ACTIVE': 'ACTIVE'}
GROUP = {'MACHINE': 'm', 'HOSTS': '4', 'TOPOLOGY': '4x4', 'ACTIVE': 'RUNNING'}


def start(folder, script, *arguments, **environ):
  """Start a script in a repository of its own."""
  commit = '-c user.name=a -c user.email=b commit -qm One --allow-empty'
  make = f'[ -d repo ] || (git init -q repo && git -C repo {commit})'
  subprocess.run(make, shell=True, cwd=folder, check=True)
  given = {'CLOUD': str(folder), 'VENV': str(STAND_INS), 'EVERY_S': '1'}
  given |= {'NAME': 'vit', 'ZONE': 'here-1-a', 'PYTHONPATH': str(ROOT)}
  given |= {'PATH': f'{STAND_INS}:{os.environ["PATH"]}'}
  return subprocess.Popen(
    ['bash', ROOT / 'docs/jobs' / script, *arguments],
    cwd=folder / 'repo',
    env=os.environ | given | environ,
    stdout=subprocess.PIPE,
    text=True,
  )


@pytest.mark.parametrize(
  ('environ', 'status', 'created'),
  [
    (QUEUE, '70', 'queued-resources create vit --node-count=2 --node-prefix='),
    (GROUP, '1', '--workload-policy=projects/it/regions/here-1/resource'),
  ],
)
def test_tpu_vms_repeat_no_mistake(tmp_path, environ, status, created):
  flags = '--config=a b', '--workdir=gs://c'
  run = start(tmp_path, 'tpu_vm.sh', 'run', *flags, STATUS=status, **environ)
  run.communicate()
  log, is_mistake = (tmp_path / 'log').read_text(), status == '1'
  assert run.returncode == is_mistake and ('delete' in log) != is_mistake
  assert log.count(created) == 1
  line = f'8476 -m vit_jax.main --distributed {" ".join(flags)} One\n'
  assert (tmp_path / 'calls').read_text() == line * (2 if is_mistake else 4)


@pytest.mark.slow
def test_preempted_tpu_vms_train_as_others(tmp_path):
  (tmp_path / 'config.py').write_text(PLAIN)
  environ = QUEUE | {'VENV': sys.prefix, 'JAX_NUM_PROCESSES': '2'}
  workdirs = tmp_path / 'preempted', tmp_path / 'undisturbed'
  for workdir in workdirs:
    environ['JAX_COORDINATOR_ADDRESS'] = f'localhost:{free_port()}'
    flags = f'--config={tmp_path}/config.py', f'--workdir={workdir}'
    run = start(tmp_path, 'tpu_vm.sh', 'run', *flags, **environ)
    if workdir == workdirs[0]:
      while run.poll() is None and not steps(workdir):
        time.sleep(0.05)
      for host in '01':
        os.kill(int((tmp_path / host / 'pid').read_text()), 9)
      (tmp_path / 'state').write_text('SUSPENDED')
    run.communicate()
    assert run.returncode == 0
  assert (tmp_path / 'log').read_text().count(' create ') == 3
  assert not difference(*workdirs)


@pytest.mark.parametrize(
  ('status', 'again'), [('143', ['requeue 7']), ('1', [])]
)
def test_slurm_repeats_no_mistake(tmp_path, status, again):
  environ = {'STATUS': status, 'SLURM_JOB_ID': '7'}
  run = start(tmp_path, 'slurm.sbatch', 'a.py:x,y', '/w', '--b=1', **environ)
  first, *others = run.communicate()[0].splitlines()
  assert first.endswith('--config=a.py:x,y --workdir=/w --b=1')
  assert others == again and run.returncode == int(status)


def test_gke_starts_the_image_and_repeats_no_mistake():
  spec = yaml.safe_load((ROOT / 'docs/jobs/gke.yaml').read_text())['spec']
  job = spec['replicatedJobs'][0]['template']['spec']
  (container,) = job['template']['spec']['containers']
  wanted = {'containerName': container['name'], 'operator': 'In', 'values': [1]}
  assert job['podFailurePolicy']['rules'][0]['onExitCodes'] == wanted
  given = dict(x[2:].split('=', 1) for x in container['args'] if '=' in x)
  loaded = config.load(given.pop('config'))
  config.override(loaded, [f'{k[7:]}={given[k]}' for k in given if '.' in k])
