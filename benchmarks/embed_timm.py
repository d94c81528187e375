"""Embed a folder of JPEGs by timm in PyTorch, as tools.predict does.

  python benchmarks/embed_timm.py MODEL FOLDER FILE.npz

MODEL is a folder that vit_jax.tools.convert has written, with config.json.
"""

import sys

import numpy as np
import timm
import torch

model, folder, file = sys.argv[1:]
net = timm.create_model(f'local-dir:{model}', pretrained=True).eval()
transform = timm.data.create_transform(
  **timm.data.resolve_data_config(model=net)
)
images = timm.data.ImageDataset(folder, transform=transform)
loader = torch.utils.data.DataLoader(images, 32, num_workers=2)
with torch.inference_mode():
  found = [net(batch).numpy() for batch, _ in loader]
np.savez(file, features=np.concatenate(found))
