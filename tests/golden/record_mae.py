"""Record what transformers' masked autoencoder learns, for objectives/mae.py.

mae.npz holds images and noise, the parameters of a tiny ViTMAEForPreTraining,
its loss and gradients and, of ten steps of AdamW, the losses and the last
parameters. Parameters are named as in transformers.

To record again, in a virtual environment as record_hf.py describes:

  python tests/golden/record_mae.py
"""

import numpy as np
import seeded

SIZES = {
  **{'image_size': 16, 'patch_size': 4, 'hidden_size': 12},
  **{'num_hidden_layers': 2, 'num_attention_heads': 2},
  **{'intermediate_size': 24, 'decoder_intermediate_size': 32},
  **{'decoder_hidden_size': 8, 'decoder_num_hidden_layers': 1},
  'decoder_num_attention_heads': 2,
}
STEPS = 10
ADAMW = {'lr': 3e-3, 'betas': (0.9, 0.95), 'eps': 1e-6, 'weight_decay': 0.05}


def record():
  torch, transformers = seeded.import_torch('torch', 'transformers')
  config = transformers.ViTMAEConfig(
    **SIZES, norm_pix_loss=True, layer_norm_eps=1e-6
  )
  model = transformers.ViTMAEForPreTraining(config).double()
  # The constructor leaves the fixed positions at zero.
  embeddings = model.vit.embeddings
  embeddings.patch_embeddings.projection._is_hf_initialized = False
  embeddings.initialize_weights()
  model.decoder.initialize_weights(num_patches=16)
  assert embeddings.position_embeddings.any()
  assert model.decoder.decoder_pos_embed.any()
  learned = {k: x for k, x in model.named_parameters() if x.requires_grad}
  arrays = seeded.fill(learned)
  rng = np.random.default_rng(2)
  images = rng.integers(0, 256, (8, 16, 16, 3), np.uint8)
  noise = rng.random((STEPS, 8, 16), np.float32)
  pixels = torch.from_numpy(images.transpose(0, 3, 1, 2) / 127.5 - 1)
  optimizer = torch.optim.AdamW(learned.values(), **ADAMW)
  losses, golden = [], {f'first/{k}': x for k, x in arrays.items()}
  for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(pixels, noise=torch.from_numpy(noise[step])).loss
    loss.backward()
    losses.append(loss.item())
    if step == 0:
      golden |= {f'grad/{k}': x.grad.numpy() for k, x in learned.items()}
    optimizer.step()
  golden |= {f'last/{k}': x.detach().numpy() for k, x in learned.items()}
  golden = {k: np.asarray(x, np.float32) for k, x in golden.items()}
  golden |= {'images': images, 'noise': noise, 'losses': losses}
  seeded.save('mae', golden)


if __name__ == '__main__':
  record()
